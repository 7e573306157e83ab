"""Summarise metrics.csv as ``summary.csv``, with one row for each epoch."""

from collections.abc import Iterable, Mapping
from typing import Any

SUMMARY = "summary.csv"


class EpochSummary:
    """The last values of each epoch, without those of the test and of single classes.

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
        """Add values that were logged together; later values count, and those of a whole epoch before others."""
        logged = {name: value for name, value in row.items() if value != ""}
        values = {n: value for n, value in logged.items() if not n.startswith("test/") and "_class_" not in n}
        epoch = values.pop("epoch", None)
        step = values.pop("step", None)
        if epoch is None or step is None or not values:
            return
        values_of_epoch = self._epochs.setdefault(int(epoch), {})
        values_of_epoch.update(values)
        values_of_epoch["updates"] = int(step) + 1  # Lightning counts steps from 0.

    def columns(self) -> list[str]:
        """Return the columns of all epochs: the epoch, the updates made at its end, and the values by name."""
        names = {name.removesuffix("_epoch") for values in self._epochs.values() for name in values}
        return ["epoch", "updates", *sorted(names - {"updates"})]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each epoch; values that were not measured in it are nan."""
        columns = self.columns()
        rows = []
        for epoch, values in sorted(self._epochs.items()):
            row = {"epoch": epoch + 1}
            for name in columns[1:]:
                row[name] = values.get(f"{name}_epoch", values.get(name, "nan"))
            rows.append(row)
        return rows
