"""Hold the result of a run: `recipes.fit` returns it, and the closing table and report.html show it."""

import html
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from datamodules.lightning import pl
from recipes.base import Recipe
from recipes.figures.images import Picture
from recipes.runner.curves import run_curves
from recipes.runner.notebook import framed, plots, table
from recipes.runner.results import read_results
from recipes.tables import Headline, ResultTable


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run.

    Args:
        model: the recipe with the weights of the best checkpoint; `fit` returns it in evaluation mode on the CPU.
        scores: the scores of that checkpoint, such as "val/accuracy" and "test/loss".
        folder: the run's folder with checkpoints, curves and ``results.json``; None where nothing was saved.
        checkpoint: the checkpoint with the weights; None where none was saved.
        data: the data module of the training; None where the run had finished before.
        epochs: all completed epochs, those before a resume included.
        stopped_early: the reason of early stopping; else empty.
        weights_sha256: the hash of the weights and buffers at the end of the training, see
            `recipes.runner.verify.weights_hash`; None where the run has not ended.
        tables: tables of the validation and the test after training, by the name of their file.
        figures: the pictures of ``report.html`` except the curves, by name.
    """

    model: Recipe
    scores: dict[str, float]
    folder: Path | None
    checkpoint: Path | None
    data: pl.LightningDataModule | None = None
    epochs: int = 0
    stopped_early: str = ""
    weights_sha256: str | None = None
    tables: dict[str, ResultTable] = field(default_factory=dict)
    figures: dict[str, Picture] = field(default_factory=dict)

    @override
    def __repr__(self) -> str:
        scores = ", ".join(f"{row.title} {row.value}" for row in self.headline)
        return f"<RunResult {self.model.title}: {scores or 'no score'}; {self.folder or 'not saved'}>"

    @property
    def headline(self) -> list[Headline]:
        """The main scores."""
        return self.model.headline(self.scores)

    def _repr_html_(self) -> str:
        """Return the scores and the curves, for notebooks."""
        figures = run_curves(self.folder, self.model.monitor) if self.folder else {}
        report_link = f"<p>The whole run: {html.escape(str(self.folder / 'report.html'))}</p>" if self.folder else ""
        return framed(table([{row.title: row.text for row in self.headline}]), plots(figures), report_link)


def read_result(folder: Path, recipe: type[Recipe]) -> RunResult:
    """Read the result of a finished run from its folder.

    Args:
        folder: the run's folder, which may have moved.
        recipe: the class of the run's recipe.
    """
    results = read_results(folder)
    saved = results["best"]["checkpoint"] if results["best"] else "last.ckpt"
    # Only the name of the saved path: the folder may have moved.
    best = folder / "checkpoints" / Path(saved).name
    return RunResult(
        model=recipe.load_from_checkpoint(best, map_location="cpu", weights_only=True),
        scores=results["scores"],
        folder=folder,
        checkpoint=best,
        epochs=results["epochs"],
        stopped_early=results["stopped_early"] or "",
        weights_sha256=results.get("weights_sha256"),  # None in a file of an earlier version.
    )
