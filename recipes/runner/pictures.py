"""The pictures of a run as files, ``figures/NAME.png``, and in the loggers that take images."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from callbacks.lib.writing import best_effort, whole_or_nothing
from datamodules.loading.updates import micro_batches
from recipes.figures.images import Picture
from recipes.runner.loggers import LoggedImage, log_images

FIGURES = "figures"


def save_pictures(folder: Path, pictures: Mapping[str, Picture], trainer: pl.Trainer) -> None:
    """Write pictures into the folder of a run as PNG, and give them to its loggers; curves are in these already."""
    images = {}
    for name, picture in pictures.items():
        with best_effort(f"{FIGURES}/{name}.png"):
            image = picture.image()
            file = io.BytesIO()
            image.save(file, "png", compress_level=1)  # Higher levels take twice as long, and save a fifth.
            with whole_or_nothing(folder / FIGURES / f"{name}.png") as part:
                part.write_bytes(file.getvalue())
            if not name.startswith("curve_"):
                images[name] = LoggedImage(image, file.getvalue())
    log_images(trainer.loggers, images, trainer.global_step)


class RunPictures(pl.Callback):
    """Saves pictures of the first batch of training at once, and writes the page of a run that is interrupted.

    Runs on: the first batch of training, and `on_exception`; on rank 0.

    Args:
        folder: of the run.
        write_page: writes the page of a run that has not finished, given how it ended.
    """

    def __init__(self, folder: Path, write_page: Callable[[pl.Trainer, str], None]) -> None:
        self.folder = folder
        self.write_page = write_page
        self._has_batch = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_batch = not trainer.is_global_zero

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._has_batch:
            return
        self._has_batch = True
        with best_effort("pictures of the training data"):
            pictures = pl_module.training_figures(micro_batches(batch)[0])
            pl_module.figures_of_training = pictures
            save_pictures(self.folder, pictures, trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero and trainer.state.fn == "fit":
            name = getattr(exception, "signal_name", None) or type(exception).__name__
            for logger in trainer.loggers:
                logger.save()  # The curves are in metrics.csv.
            with best_effort("report.html"):
                self.write_page(trainer, f"interrupted by {name} after {trainer.global_step:,} updates")
