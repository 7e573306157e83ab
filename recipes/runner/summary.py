"""``summary.csv``: a row for each epoch, from the rows of metrics.csv, which are for each moment at which one logs."""

from collections.abc import Iterable, Mapping
from typing import Any

SUMMARY = "summary.csv"


class EpochSummary:
    """What each epoch has ended with, without the test and single classes.

    Example:
        >>> summary = EpochSummary([{"epoch": 0, "step": 4, "train/loss": 2.0}])
        >>> summary.add({"epoch": 0, "step": 9, "val/loss": 1.0})
        >>> summary.add({"epoch": 0, "step": 9, "train/loss_epoch": 1.5})
        >>> summary.rows()
        [{'epoch': 1, 'updates': 10, 'train/loss': 1.5, 'val/loss': 1.0}]
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._epochs: dict[int, dict[str, Any]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add what was logged together; values that come later count, and those of an epoch before all others."""
        logged = {name: value for name, value in row.items() if value != ""}
        values = {n: value for n, value in logged.items() if not n.startswith("test/") and "_class_" not in n}
        epoch, step = values.pop("epoch", None), values.pop("step", None)
        if epoch is None or step is None or not values:
            return
        kept = self._epochs.setdefault(int(epoch), {})
        kept.update(values)
        kept["updates"] = int(step) + 1

    def columns(self) -> list[str]:
        """Of all epochs: the epoch, from 1, and the updates made at its end, then all others by name."""
        names = {name.removesuffix("_epoch") for values in self._epochs.values() for name in values}
        return ["epoch", "updates", *sorted(names - {"updates"})]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each epoch; nan stands for what was not measured in it, such as the scores of a validation."""
        columns = self.columns()
        rows = []
        for epoch, values in sorted(self._epochs.items()):
            row = {"epoch": epoch + 1}
            for name in columns[1:]:
                row[name] = values.get(f"{name}_epoch", values.get(name, "nan"))
            rows.append(row)
        return rows
