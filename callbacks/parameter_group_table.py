"""A table of an optimiser's parameter groups, printed before training begins.

It shows a layer that was left out, a learning rate that is too high, and a trunk that trains where it should not.
"""

import logging
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from callbacks.drawing.evaluation_samples import tensorboards

__all__ = ["ParameterGroupTable", "group_rows", "markdown_table", "text_table"]

log = logging.getLogger("lightning_recipes")

_COLUMNS = ("group", "parameters", "trainable", "rate", "decay")


def group_rows(groups: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """For each group its name, parameters, those that train, rate before warm-up and scaling, and weight decay."""
    rows: list[tuple[str, ...]] = []
    for number, group in enumerate(groups):
        sizes = [(p.numel(), p.requires_grad) for p in group["params"]]
        total, trainable = sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)
        rate, decay = group.get("initial_lr", group["lr"]), group.get("weight_decay", 0.0)
        name = str(group.get("name", number))
        rows.append((name, f"{total:,}", f"{trainable:,}", f"{float(rate):.3g}", f"{float(decay):.3g}"))
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

    Runs on: `on_train_start`, when everything is frozen that will be. The line goes to the logger
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
            rows = group_rows(optimizer.param_groups)
            log.info("%s", text_table(rows))
            for writer in tensorboards(trainer):
                writer.add_text("parameter groups", markdown_table(rows), trainer.global_step)
