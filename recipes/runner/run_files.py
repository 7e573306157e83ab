"""Write files of a run while it trains: pictures as ``figures/NAME.png``, and the page of an interrupted run."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from callbacks.lib.hooks import callbacks_of
from callbacks.lib.writing import atomic_write, best_effort
from datamodules.lightning import pl
from recipes.figures.images import Picture
from recipes.runner.loggers import LoggedImage, log_images
from recipes.runner.results import RESULTS, Stopwatch
from recipes.tables import ResultTable

FIGURES = "figures"


def figures_of(trainer: pl.Trainer) -> dict[str, Picture]:
    """Return the ``figures`` of the recipe and of the callbacks, by name."""
    return _collected(trainer, "figures")


def tables_of(trainer: pl.Trainer) -> dict[str, ResultTable]:
    """Return the ``tables`` of the recipe and of the callbacks, by the name of their file."""
    return _collected(trainer, "tables")


def _collected(trainer: pl.Trainer, name: str) -> dict[str, Any]:
    collected: dict[str, Any] = {}
    for owner in (trainer.lightning_module, *callbacks_of(trainer)):
        items_of_owner = getattr(owner, name, None)
        if isinstance(items_of_owner, Mapping):
            collected |= items_of_owner
    return collected


def save_pictures(folder: Path, pictures: Mapping[str, Picture], trainer: pl.Trainer) -> None:
    """Write pictures into the folder of a run as PNG, and log them; the loggers have the curves already."""
    images = {}
    for name, picture in pictures.items():
        with best_effort(f"{FIGURES}/{name}.png"):
            image = picture.image()
            file = io.BytesIO()
            # Higher levels take twice as long, and save a fifth of the bytes.
            image.save(file, "png", compress_level=1)
            with atomic_write(folder / FIGURES / f"{name}.png") as temporary:
                temporary.write_bytes(file.getvalue())
            if not name.startswith("curve_"):
                images[name] = LoggedImage(image, file.getvalue())
    log_images(trainer.loggers, images, trainer.global_step)


class RunFiles(Stopwatch):
    """Callback that saves pictures of the first training batch, and the page of an interrupted run.

    `figures` has these pictures. The callback measures the run as `Stopwatch` does.

    Runs on: the start and the first batch of training, and `on_exception`; on rank 0.

    Args:
        started_at: `time.monotonic` when the program was started.
        folder: the run's folder.
        write_page: writes the page of a run that has not finished, given the Trainer, this object, and how it ended.
    """

    def __init__(self, started_at: float, folder: Path, write_page: Callable[[pl.Trainer, Any, str], None]) -> None:
        super().__init__(started_at)
        self.folder = folder
        self.figures: dict[str, Picture] = {}
        self._write_page = write_page
        self._has_batch = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._has_batch = not trainer.is_global_zero
        # Moved away, since a folder has results.json if and only if its run has finished.
        if trainer.is_global_zero and (self.folder / RESULTS).is_file():
            with best_effort("the results of the shorter training"):
                (self.folder / RESULTS).replace(self.folder / "results-before.json")

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._has_batch:
            return
        self._has_batch = True
        with best_effort("pictures of the training data"):
            self.figures = pl_module.training_figures(batch)
            save_pictures(self.folder, self.figures, trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero and trainer.state.fn == "fit":
            name = getattr(exception, "signal_name", None) or type(exception).__name__
            for logger in trainer.loggers:
                logger.save()  # The page draws its curves from metrics.csv.
            with best_effort("report.html"):
                self._write_page(trainer, self, f"interrupted by {name} after {trainer.global_step:,} updates")
