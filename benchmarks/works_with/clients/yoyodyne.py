"""yoyodyne: a subclass of Trainer, a data module with files, a batch that is a module with buffers."""

import functools
import random
from typing import Any

import torch
from yoyodyne import data, models, special, trainers
from yoyodyne.models import modules

from ..rows import SAMPLES, Row, Run

LIBRARY = "yoyodyne"
PACKAGE = "lightning.pytorch"


class Counting(models.SoftAttentionGRUModel):  # type: ignore[misc]
    """What a user writes: the loss is a mean over tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        count = (batch.target.tensor != special.PAD_IDX).sum()
        return {"loss": super().training_step(batch, batch_idx), "count": count}


def transducer(run: Run, model: Any) -> None:
    callbacks = run.callbacks()
    choices = random.Random(3)
    for part, size in (("train", SAMPLES), ("val", 12)):
        lines = []
        for index in range(size):
            letters = [choices.choice("abcdefg") for _ in range(1 + index % 7)]
            lines.append(" ".join(letters) + "\t" + " ".join(letters).upper() + "\n")
        (run.folder / f"{part}.tsv").write_text("".join(lines))
    files = {part: str(run.folder / f"{part}.tsv") for part in ("train", "val")}
    datamodule = data.DataModule(
        model_dir=str(run.folder / "model"), source_sep=" ", target_sep=" ", batch_size=run.batch_size, **files
    )
    dropout = 0.2 if run.noise else 0.0
    module = model(
        source_encoder=modules.GRUEncoder(embedding_size=8, hidden_size=8, layers=1, dropout=dropout),
        decoder_hidden_size=8,
        embedding_size=8,
        decoder_layers=1,
        decoder_dropout=dropout,
        vocab_size=datamodule.vocab_size,
        target_vocab_size=datamodule.target_vocab_size,
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        max_source_length=datamodule.max_source_length,
        max_features_length=datamodule.max_features_length,
        max_target_length=datamodule.max_target_length,
    )
    trainer = trainers.Trainer(callbacks=callbacks, **run.options())
    trainer.fit(module, datamodule=datamodule, ckpt_path=run.checkpoint, weights_only=False)


ROWS = {
    "plain": Row(lambda run: transducer(run, models.SoftAttentionGRUModel), "GRU with attention, own data module"),
    "count": Row(
        lambda run: transducer(run, Counting),
        "the same, with the number of tokens",
        user="a subclass whose `training_step` returns `count`",
    ),
}
