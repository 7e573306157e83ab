"""Records a hash of a run's weights whenever they are saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from callbacks.checkpointing.weights_hash import weights_hash
from callbacks.lib.best_effort import best_effort
from recipes.results.origin import environment
from recipes.results.weights_record import Save, Start, WeightsRecord

__all__ = ["WeightsRecorder"]


class WeightsRecorder(pl.Callback):
    """Appends to ``weights.jsonl``; `saved` is to be called with each checkpoint that was written.

    Runs on: `setup`, where it finds out on what the run trains.

    Args:
        folder: of the run.
        recipe: its title.
        resumed_from: the updates behind the checkpoint that is resumed; None where the run begins anew.
        config: the settings.
    """

    def __init__(self, folder: Path, recipe: str, resumed_from: int | None, config: Mapping[str, Any]) -> None:
        self.folder, self.recipe, self.resumed_from, self.config = folder, recipe, resumed_from, dict(config)
        self._record: WeightsRecord | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            start = Start(self.recipe, self.resumed_from, environment(trainer), self.config)
            self._record = WeightsRecord(self.folder, start)

    def saved(self, checkpoint: Mapping[str, Any]) -> None:
        """Append the hash of the weights in a checkpoint."""
        with best_effort("the hash of the weights"):
            if self._record is not None and (sha256 := weights_hash(checkpoint["state_dict"])):
                self._record.add(Save(checkpoint["global_step"], checkpoint["epoch"] + 1, sha256))
