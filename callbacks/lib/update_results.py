"""What is logged in training, where a run resumes within an epoch or ranks have unequal numbers of micro-batches."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError

_NEUTRAL = {"max": -math.inf, "min": math.inf}
"""What changes no result of a reduction; 0 for others."""


class UpdateResults(_ResultCollection):
    """Lightning's collection of the training loop, of which `log` and each sum of an epoch pass here."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self._is_uneven = False
        self._is_stand_in = False
        self._saved: list[dict[str, Any]] = []
        """Sums from which those of this epoch have yet to go on, each with its weight by key."""
        self._takes_sum = False
        """Whether this rank takes over the sums of all, beside the extremes."""

    @contextlib.contextmanager
    def uneven(self, is_stand_in: bool) -> Iterator[None]:
        """Surrounds a micro-batch of an update of which some ranks have one more than others.

        No rank waits for another one's logs. A stand-in logs what changes no mean, sum or extreme: at the epoch's end
        all ranks compute the same ones.
        """
        self._is_uneven = True
        self._is_stand_in = is_stand_in
        try:
            yield
        finally:
            self._is_uneven = False
            self._is_stand_in = False

    def go_on_from(self, trainer: pl.Trainer, by_rank: Sequence[Mapping[str, Any]]) -> None:
        """Let each sum of this epoch go on from those of a checkpoint.

        Args:
            by_rank: what `epoch_sums` gave on each rank; on another number of ranks, rank 0 takes over the sums of all.
        """
        rank = trainer.global_rank
        has_own = len(by_rank) == trainer.world_size
        self._saved = [dict(sums) for sums in (by_rank[rank : rank + 1] if has_own else by_rank)]
        self._takes_sum = has_own or rank == 0

    @override
    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._is_uneven and kwargs.get("sync_dist") and kwargs.get("on_step"):
            raise UserError(
                "self.log(on_step=True, sync_dist=True) waits for all devices at each micro-batch, and this update"
                " has one more on some: log with on_step=False, on_epoch=True, or in on_train_batch_end"
            )
        if self._is_stand_in and isinstance(value, Tensor):
            reduction = kwargs.get("reduce_fx")
            neutral = _NEUTRAL.get(getattr(reduction, "__name__", str(reduction)), 0.0)
            value = torch.full_like(value + 0.0, neutral)
            kwargs["batch_size"] = 0
        super().log(fx, name, value, *args, **kwargs)

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        saved = [sums.pop(key, None) for sums in self._saved]
        self._add_saved(self[key], [part for part in saved if part])
        super().update_metrics(key, value, batch_size)

    def _add_saved(self, metric: Any, saved: list[Any]) -> None:
        if not saved:
            return
        device = metric.value.device
        values, weights = (torch.stack(part).to(device) for part in zip(*saved, strict=True))
        if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
            metric.value = metric.meta.reduce_fx(values)
        elif self._takes_sum:
            metric.value = values.sum()
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = weights.sum()

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        if metrics is None and fx is None:
            self._saved = []  # The epoch has ended.
        super().reset(metrics, fx)
