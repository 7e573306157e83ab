"""Plot the curves of a run from metrics.csv, over all its resumes."""

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
    """Return the values of a column as (updates made, value), in the order of updates; the last value of each counts.

    Example:
        >>> series([{"step": "4", "val/loss": "0.5"}, {"step": "9", "val/loss": ""}], "val/loss")
        [(5.0, 0.5)]
    """
    # Lightning logs the number of the step, from 0, so that one more update was made.
    values = {_number(row.get("step")) + 1: _number(row[column]) for row in rows if row.get(column)}
    return sorted((update, value) for update, value in values.items() if math.isfinite(update + value))


def _both_parts(rows: Sequence[Row], name: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of a quantity in training and in validation.

    Training has those between the epochs, or those of whole epochs where there are more of them.
    """
    between_epochs = series(rows, f"train/{name}")
    whole_epochs = series(rows, f"train/{name}_epoch")
    series_by_part = {
        "training": between_epochs if len(between_epochs) > len(whole_epochs) else whole_epochs,
        "validation": series(rows, f"val/{name}"),
    }
    return {part: points for part, points in series_by_part.items() if points}


def curves(rows: Sequence[Row], monitor: str | None) -> dict[str, Figure]:
    """Plot the loss, the score that chooses the best checkpoint, and the learning rate; returned by name.

    Args:
        rows: the rows of metrics.csv.
        monitor: the score, such as "val/accuracy"; None shows the loss only.
    """
    plots = {"curve_loss": curve_plot("loss", _both_parts(rows, "loss"))}
    if monitor and monitor.rpartition("/")[2] != "loss":
        part, _, name = monitor.rpartition("/")
        series_by_part = {"": series(rows, monitor)}
        if part == "val":
            series_by_part = _both_parts(rows, name)
        plots["curve_score"] = curve_plot(_TITLES.get(name, name.replace("_", " ")), series_by_part)
    rates = sorted(name for row in rows[:1] for name in row if name == "lr" or name.startswith("lr/"))
    if rates:
        plots["curve_rate"] = curve_plot("learning rate", {rates[0]: series(rows, rates[0])}, may_be_log=False)
    return {name: plot for name, plot in plots.items() if plot is not None}


def run_curves(folder: Path, monitor: str | None) -> dict[str, Figure]:
    """Return the curves of the run in a folder; none where the folder has no metrics.csv."""
    return curves(read_metrics(folder / METRICS)[1], monitor)
