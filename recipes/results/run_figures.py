"""The figures of a run's best checkpoint, in its folder."""

from pathlib import Path

import lightning.pytorch as pl
from typing_extensions import override

from callbacks.drawing.evaluation_samples import EvaluationSamples, FigureTarget
from callbacks.lib.best_effort import best_effort
from callbacks.lib.trainer_attributes import callbacks_of
from recipes.results.results_file import FIGURES

__all__ = ["RunFigures"]


class RunFigures(pl.Callback):
    """Has the callbacks that draw write PNG files into a run's folder, in place of those of an earlier checkpoint.

    Runs on: `setup` of the evaluation of that checkpoint, after the recipe's callbacks are there.

    Args:
        folder: of the run; None writes no files, and TensorBoard alone has the images.
        step: the updates behind the checkpoint.
    """

    def __init__(self, folder: Path | None, step: int) -> None:
        self.target = FigureTarget(folder / FIGURES if folder else None, step)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero and self.target.folder:
            with best_effort(FIGURES):
                for path in self.target.folder.glob(f"{stage.removesuffix('idate')}_*.png"):
                    path.unlink()
        for callback in callbacks_of(trainer):
            if isinstance(callback, EvaluationSamples):
                callback.target = self.target
