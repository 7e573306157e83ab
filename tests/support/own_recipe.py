"""A user's own recipe for another modality: next-character prediction, in batches that are limited by tokens.

It declares parameters that do not make the experiment, one that belongs to a single call, and what predict prints.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.contract import DataContract, Free, OneCall
from recipes import run
from tests.support.own_training import TrainedRecipe

ALPHABET = "abcdefgh"


class NextCharacter(TrainedRecipe):
    """Predicts the next character.

    Args:
        temperature: of the probabilities that predict prints.
        histogram: file to which predict writes the logits.
    """

    title = "characters"
    monitor = "val/loss"
    trainer_defaults: ClassVar[dict[str, Any]] = {"max_epochs": 2}

    def __init__(self, temperature: Free[float] = 1.0, histogram: OneCall[str | None] = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(len(ALPHABET), 8), nn.Linear(8, len(ALPHABET)))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        targets = batch[:, 1:]
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), targets.flatten())
        return {"loss": loss, "count": targets.numel()}

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)[:, -1] / self.hparams.temperature

    def prediction_rows(self, outputs: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        logits = torch.cat(list(outputs))
        if self.hparams.histogram is not None:
            Path(self.hparams.histogram).write_text(str(logits.tolist()))
        best = logits.softmax(1).max(1)
        return [
            {"continued": name + ALPHABET[index], "certainty": value}
            for name, index, value in zip(names, best.indices.tolist(), best.values.tolist(), strict=True)
        ]


class Batches(list[Tensor]):
    """A loader over batches that are in memory."""

    def __init__(self, batches: Sequence[Tensor], batch_size: int) -> None:
        super().__init__(batches)
        self.batch_size = batch_size


class Text(pl.LightningDataModule, DataContract):
    """The alphabet, over and over.

    Args:
        characters: limit of a batch.
        length: characters in a line.
        predict_inputs: texts to continue.
    """

    tokens_parameter = "characters"

    def __init__(
        self, characters: Free[int] = 32, length: int = 8, predict_inputs: OneCall[list[str] | None] = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": 64}

    @property
    def prediction_names(self) -> list[str]:
        return list(self.hparams["predict_inputs"])

    def _batches(self, lines: list[list[int]], size: int) -> Batches:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return Batches(torch.tensor(lines).split(size)[rank::world_size], size)

    def train_dataloader(self) -> Batches:
        length = self.hparams["length"]
        lines = [[(start + i) % len(ALPHABET) for i in range(length)] for start in range(64)]
        return self._batches(lines, self.hparams["characters"] // length)

    def predict_dataloader(self) -> Batches:
        return self._batches([[ALPHABET.index(c) for c in text] for text in self.prediction_names], 1)


if __name__ == "__main__":
    run(NextCharacter, Text)
