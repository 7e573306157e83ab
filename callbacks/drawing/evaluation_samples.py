"""What callbacks that draw have in common: samples kept of evaluation batches, shown when the evaluation ends."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks.lib.writing import best_effort

__all__ = ["EvaluationSamples", "first_training_batch", "tensorboards"]


def tensorboards(trainer: pl.Trainer) -> list[Any]:
    """The writers of the Trainer's TensorBoard loggers."""
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def first_training_batch(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether a batch is the first one of a run that rank 0 logs to TensorBoard."""
    first = batch_idx == 0 and trainer.global_step == 0 and trainer.is_global_zero
    return first and any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)


def rendered(image: Any) -> Any:
    """A figure of matplotlib as an array of pixels, uint8 of shape (height, width, 3); an array as it is."""
    if isinstance(image, np.ndarray):
        return image
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(image)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


class EvaluationSamples:
    """The hooks of a callback that keeps samples of validation and test batches and draws them into TensorBoard.

    It comes before `pl.Callback` in the list of bases. Only rank 0 keeps and draws samples, of its own batches. They
    are drawn when `trainer.validate` or `trainer.test` ends. The images of a training's last validation are drawn as it
    ends, unless a checkpoint callback monitors a score: then the last weights are not the result, and those of the best
    checkpoint are drawn by `trainer.validate(ckpt_path="best")`.
    """

    updates: int | None = None
    """Those behind the checkpoint that is evaluated, where it is not the last one of the training."""

    def _forget(self) -> None:
        """Drop the samples: an evaluation begins, or they were drawn."""
        raise NotImplementedError

    def _keep(self, outputs: Any, batch: Any, batch_idx: int, batches: Sequence[float], dataloader_idx: int) -> None:
        """Keep samples of a batch; `batches` is the number of batches of each loader."""
        raise NotImplementedError

    def _figures(self, pl_module: pl.LightningModule, stage: str) -> dict[str, Any]:
        """Figures of matplotlib or arrays of pixels, by name; `stage` is "val" or "test"."""
        raise NotImplementedError

    def _draw(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        writers = tensorboards(trainer)
        if not trainer.is_global_zero or not writers:
            return
        with best_effort("images in TensorBoard"):
            for name, image in self._figures(pl_module, stage).items():
                for writer in writers:
                    writer.add_image(name, rendered(image), self._step(trainer), dataformats="HWC")
                    writer.flush()
        self._forget()

    def _step(self, trainer: pl.Trainer) -> int:
        """The updates behind the weights that are evaluated."""
        return trainer.global_step if self.updates is None else self.updates

    def _on_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._forget()

    def _on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero:
            batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
            self._keep(outputs, batch, batch_idx, batches, dataloader_idx)

    on_validation_start = on_test_start = _on_start
    on_validation_batch_end = on_test_batch_end = _on_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._draw(trainer, pl_module, "val")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not any(getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks):
            self._draw(trainer, pl_module, "val")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, pl_module, "test")
