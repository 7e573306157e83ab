"""A run's folder that somebody removes or empties while the run trains."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from callbacks.lib.best_effort import best_effort
from datamodules.errors import UserError
from recipes.cli.report import shown
from recipes.cli.run_folder import restart_loggers
from recipes.files import write_text
from recipes.results.results_file import set_aside

__all__ = ["FolderGuard"]

log = logging.getLogger("lightning_recipes.cli")


class FolderGuard(pl.Callback):
    """Writes ``config.yaml``, and makes the folder again where it is removed during training.

    Checkpoints, logs and results then go into the new folder. What was written before is lost, so such a run ends with
    status 1; see `removed`.

    Results that are there are of a shorter training of the run: see `set_aside`.

    Runs on: the start of training, each checkpoint and the end of training, on rank 0.

    Args:
        folder: of the run.
        config: the text of ``config.yaml``.
    """

    def __init__(self, folder: Path, config: str) -> None:
        self.path, self.config = folder / "config.yaml", config
        self.removed = False

    def write(self) -> None:
        """Write ``config.yaml``, before the run starts.

        Raises:
            UserError: it cannot be written.
        """
        try:
            write_text(self.path, self.config)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror or error}; make room, or pass --run-dir with a folder on"
                " another disk"
            ) from error

    def _is_there(self) -> bool:
        try:
            return self.path.exists()
        except OSError:  # Such as that of a network file system that is gone.
            return False

    def check(self, trainer: pl.Trainer) -> None:
        """Make the folder again if it is gone."""
        if not trainer.is_global_zero or self._is_there():
            return
        if not self.removed:
            log.warning(
                "warning: %s was removed or emptied; it is made again, for what is written from now on",
                shown(self.path.parent),
            )
        self.removed = True
        with best_effort(self.path.name):
            write_text(self.path, self.config)
        restart_loggers(trainer.loggers)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            with best_effort("the results of the shorter training"):
                set_aside(self.path.parent)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.check(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.check(trainer)
