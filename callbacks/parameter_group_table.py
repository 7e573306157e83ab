"""A table of an optimiser's parameter groups, printed before training begins.

It shows a layer that was left out, a learning rate that is too high, and a trunk that trains where it should not.
"""

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from callbacks.drawing.evaluation_samples import tensorboards

__all__ = ["ParameterGroupTable", "group_rows", "markdown_table", "merged_rows", "text_table"]

log = logging.getLogger("lightning_recipes")

_COLUMNS = ("group", "parameters", "trainable", "rate", "decay")


class _Group(NamedTuple):
    name: str
    total: int
    trainable: int
    rate: str
    decay: str

    @property
    def stage(self) -> str:
        """The name without what tells the groups of a stage apart."""
        return self.name.removesuffix(".no_decay").removesuffix(".decay")

    @property
    def kind(self) -> tuple[str, str]:
        trains = "all" if self.trainable == self.total else "some" if self.trainable else "none"
        return self.rate, self.stage if trains == "some" else trains

    def row(self) -> tuple[str, ...]:
        return self.name, f"{self.total:,}", f"{self.trainable:,}", self.rate, self.decay


def _groups(groups: Sequence[dict[str, Any]]) -> list[_Group]:
    found = []
    for number, group in enumerate(groups):
        sizes = [(p.numel(), p.requires_grad) for p in group["params"]]
        total, trainable = sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)
        rate, decay = group.get("initial_lr", group["lr"]), group.get("weight_decay", 0.0)
        name = str(group.get("name", number))
        found.append(_Group(name, total, trainable, f"{float(rate):.3g}", f"{float(decay):.3g}"))
    return found


def group_rows(groups: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """For each group its name, parameters, those that train, rate before warm-up and scaling, and weight decay."""
    return [group.row() for group in _groups(groups)]


def merged_rows(groups: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The same in fewer rows: one for neighbours of the same rate that train, or that are frozen.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.zeros(3))
        >>> groups = [{"name": name, "params": [parameter], "lr": 0.1} for name in ("fc1.decay", "fc1.no_decay", "fc2")]
        >>> groups[1]["weight_decay"], groups[0]["weight_decay"] = 0, 0.01
        >>> merged_rows(groups)
        [('fc1 to fc2', '9', '9', '0.1', '0.01, 0')]
    """
    rows = []
    for _, neighbours in groupby(_groups(groups), key=lambda group: group.kind):
        several = list(neighbours)
        first, last = several[0].stage, several[-1].stage
        merged = _Group(
            first if first == last else f"{first} to {last}",
            sum(group.total for group in several),
            sum(group.trainable for group in several),
            several[0].rate,
            ", ".join(dict.fromkeys(group.decay for group in several)),
        )
        rows.append(merged.row() if len(several) > 1 else several[0].row())
    return rows


def text_table(rows: Sequence[Sequence[str]], columns: Sequence[str] = _COLUMNS) -> str:
    """A table for a terminal: the first column to the left, numbers to the right.

    Example:
        >>> print(text_table([("fc", "1,026", "1,026", "0.003", "0.01")]))
        group  parameters  trainable   rate  decay
        fc          1,026      1,026  0.003   0.01
    """
    cells = [tuple(columns), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))] for row in cells]
    return "\n".join("  ".join(line) for line in lines)


def markdown_table(rows: Sequence[Sequence[str]], columns: Sequence[str] = _COLUMNS) -> str:
    """The same for TensorBoard."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows))


class ParameterGroupTable(pl.Callback):
    """Prints the parameter groups of each optimiser once, and logs them as text to TensorBoard.

    Neighbours of the same rate that train, or that are frozen, are printed in one row.

    Runs on: `on_train_start`, when everything is frozen that will be. The table goes to the logger
    ``"lightning_recipes"``, level INFO.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.zeros(3))
        >>> group_rows(torch.optim.AdamW([{"params": [parameter], "name": "bias"}], lr=0.1).param_groups)
        [('bias', '3', '3', '0.1', '0.01')]
    """

    @override
    @rank_zero_only
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            log.info("%s", text_table(merged_rows(optimizer.param_groups)))
            for writer in tensorboards(trainer):
                text = markdown_table(group_rows(optimizer.param_groups))
                writer.add_text("parameter groups", text, trainer.global_step)
