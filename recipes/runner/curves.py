"""The curves of a run, from what it has logged into metrics.csv, over all its resumes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.figures.drawing import Figure
from recipes.figures.plots import curve_plot
from recipes.runner.loggers import METRICS, read_metrics

Row = Mapping[str, str]

_TITLES = {"bleu": "BLEU", "chrf": "chrF", "macro_f1": "macro-F1"}


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan


def series(rows: Sequence[Row], column: str) -> list[tuple[float, float]]:
    """What was logged in a column: (updates made, value) in the order of updates, the last value of each.

    Example:
        >>> series([{"step": "4", "val/loss": "0.5"}, {"step": "9", "val/loss": ""}], "val/loss")
        [(5.0, 0.5)]
    """
    values = {_number(row.get("step")) + 1: _number(row[column]) for row in rows if row.get(column)}
    return sorted((update, value) for update, value in values.items() if math.isfinite(update + value))


def _both_parts(rows: Sequence[Row], name: str) -> dict[str, list[tuple[float, float]]]:
    """A quantity in training and in validation: of training between the epochs, else of whole epochs."""
    trained = series(rows, f"train/{name}")
    of_epochs = series(rows, f"train/{name}_epoch")
    parts = {
        "training": trained if len(trained) > len(of_epochs) else of_epochs,
        "validation": series(rows, f"val/{name}"),
    }
    return {part: points for part, points in parts.items() if points}


def curves(rows: Sequence[Row], monitor: str | None) -> dict[str, Figure]:
    """Plots of the loss, of the score that chooses the best checkpoint, and of the learning rate, by name.

    Args:
        rows: of metrics.csv.
        monitor: the score, such as "val/accuracy"; None shows no other than the loss.
    """
    plots = {"curve_loss": curve_plot("loss", _both_parts(rows, "loss"))}
    if monitor and monitor.rpartition("/")[2] != "loss":
        part, _, name = monitor.rpartition("/")
        parts = _both_parts(rows, name) if part == "val" else {"": series(rows, monitor)}
        plots["curve_score"] = curve_plot(_TITLES.get(name, name.replace("_", " ")), parts)
    rates = sorted(name for row in rows[:1] for name in row if name == "lr" or name.startswith("lr/"))
    if rates:
        plots["curve_rate"] = curve_plot("learning rate", {rates[0]: series(rows, rates[0])}, may_be_log=False)
    return {name: plot for name, plot in plots.items() if plot is not None}


def run_curves(folder: Path, monitor: str | None) -> dict[str, Figure]:
    """The curves of the run in a folder; none where it has logged no metrics.csv."""
    return curves(read_metrics(folder / METRICS)[1], monitor)
