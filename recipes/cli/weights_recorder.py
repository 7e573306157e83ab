"""Records a hash of a run's weights whenever they are saved, and what may change their bits."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.lib.writing import best_effort
from recipes.results.origin import differences, environment
from recipes.results.weights_record import Save, Start, WeightsRecord
from recipes.resume.saved_run import SavedRun
from recipes.runner.launch import rank_zero_print

__all__ = ["WeightsRecorder", "weights_hash"]


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def weights_hash(state_dict: Mapping[str, Any]) -> str | None:
    """The SHA-256 of the names, types, shapes and bytes of a state dict.

    None where a rank holds a part of a tensor only, as in a checkpoint that is saved in parts: each rank would have
    another hash.

    Example:
        >>> one, other = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0 + 2**-23])}
        >>> weights_hash(one) == weights_hash({"w": torch.ones(1)}), weights_hash(one) == weights_hash(other)
        (True, False)
    """
    sha256 = hashlib.sha256()
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
                return None
            sha256.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            sha256.update(_bytes(value))
        else:  # What a module keeps by `get_extra_state`.
            sha256.update(f"{name} {value!r}\n".encode())
    return sha256.hexdigest()


class WeightsRecorder(pl.Callback):
    """Appends to ``weights.jsonl``; `saved` is to be called with each checkpoint that was written.

    Runs on: `setup`, where it finds out on what the run trains, and says what differs from before a resume.

    Args:
        folder: of the run.
        recipe: its title.
        resumed: the checkpoint that is resumed; None where the run begins anew.
        config: the settings.
    """

    def __init__(self, folder: Path, recipe: str, resumed: SavedRun | None, config: Mapping[str, Any]) -> None:
        self.folder, self.recipe, self.resumed, self.config = folder, recipe, resumed, dict(config)
        self._here: dict[str, Any] = {}
        self._record: WeightsRecord | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            before, self._here = self.resumed, environment(trainer)
            start = Start(self.recipe, before.updates if before else None, self._here, self.config)
            self._record = WeightsRecord(self.folder, start)
            if before and (changed := differences(before.environment, self._here)):
                rank_zero_print(f"bits may differ from here on: {changed}")

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["environment"] = self._here

    def saved(self, checkpoint: Mapping[str, Any]) -> None:
        """Append the hash of the weights in a checkpoint."""
        with best_effort("the hash of the weights"):
            if self._record is not None and (sha256 := weights_hash(checkpoint["state_dict"])):
                self._record.add(Save(checkpoint["global_step"], checkpoint["epoch"] + 1, sha256))
