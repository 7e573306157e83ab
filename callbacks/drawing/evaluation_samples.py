"""What callbacks that draw have in common: samples kept of evaluation batches, shown when training or a test ends."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks.lib.best_effort import best_effort

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EvaluationSamples", "tensorboards"]


def tensorboards(trainer: pl.Trainer) -> list[Any]:
    """The writers of the Trainer's TensorBoard loggers."""
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


class EvaluationSamples:
    """The hooks of a callback that keeps samples of validation and test batches and draws them into TensorBoard.

    It comes before `pl.Callback` in the list of bases. Only rank 0 keeps and draws samples, of its own batches; the
    images of the last validation are drawn as training ends.
    """

    def _forget(self) -> None:
        """Drop the samples: an evaluation begins, or they were drawn."""
        raise NotImplementedError

    def _keep(self, outputs: Any, batch: Any, batch_idx: int, batches: Sequence[float], dataloader_idx: int) -> None:
        """Keep samples of a batch; `batches` is the number of batches of each loader."""
        raise NotImplementedError

    def _figures(self, pl_module: pl.LightningModule, stage: str) -> "dict[str, Figure]":
        """Figures of the samples, by name; `stage` is "val" or "test"."""
        raise NotImplementedError

    def _draw(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not trainer.is_global_zero or not (writers := tensorboards(trainer)):
            return
        with best_effort("images in TensorBoard"):
            for name, figure in self._figures(pl_module, stage).items():
                for writer in writers:
                    writer.add_figure(name, figure, global_step=trainer.global_step)
            for writer in writers:
                writer.flush()
        self._forget()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero:
            self._keep(outputs, batch, batch_idx, trainer.num_val_batches, dataloader_idx)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero:
            self._keep(outputs, batch, batch_idx, trainer.num_test_batches, dataloader_idx)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, pl_module, "val")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, pl_module, "test")
