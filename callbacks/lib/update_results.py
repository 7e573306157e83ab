"""Results of `self.log` in training that are exact after a resume within an epoch and on ranks of unequal updates.

Lightning starts the means of an epoch again when a run resumes within it (#20652), and an all-reduce in each step hangs
if the ranks have unequal numbers of steps.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError
from datamodules.lightning import _ResultCollection, pl

_NEUTRAL = {"max": -math.inf, "min": math.inf}
"""Neutral element of each reduction; 0 for sums and means."""


class UpdateResults(_ResultCollection):
    """Result collection of Lightning's training loop that continues saved sums and ignores stand-ins."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self._is_uneven = False
        self._is_stand_in = False
        self._saved: list[dict[str, Any]] = []
        """Sums and weights of the checkpoint by key, that were not yet added to the epoch's results."""
        self._takes_sum = False
        """Whether this rank adds the saved sums; maxima and minima are taken over on every rank."""

    @contextlib.contextmanager
    def uneven(self, is_stand_in: bool) -> Iterator[None]:
        """Run a micro-batch of an update of which some ranks have one micro-batch more than others.

        A stand-in logs neutral elements, which change no mean, sum or extreme. It logs them under the same keys as
        the other ranks, because at the epoch's end all ranks reduce the same keys.
        """
        self._is_uneven = True
        self._is_stand_in = is_stand_in
        try:
            yield
        finally:
            self._is_uneven = False
            self._is_stand_in = False

    def go_on_from(self, trainer: pl.Trainer, by_rank: Sequence[Mapping[str, Any]]) -> None:
        """Continue the sums of this epoch from those of a checkpoint.

        Args:
            by_rank: result of `epoch_sums` on each rank. On another number of ranks, rank 0 takes the sums of all.
        """
        rank = trainer.global_rank
        is_same_world = len(by_rank) == trainer.world_size
        if is_same_world:
            by_rank = by_rank[rank : rank + 1]
        self._saved = [dict(sums) for sums in by_rank]
        self._takes_sum = is_same_world or rank == 0

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
        # A metric exists only once it is logged, so its saved sums wait until then.
        saved_sums = [sums.pop(key, None) for sums in self._saved]
        self._add_saved(self[key], [pair for pair in saved_sums if pair])
        super().update_metrics(key, value, batch_size)

    def _add_saved(self, metric: Any, pairs: list[Any]) -> None:
        if not pairs:
            return
        device = metric.value.device
        values = torch.stack([value for value, _ in pairs]).to(device)
        weights = torch.stack([weight for _, weight in pairs]).to(device)
        if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
            metric.value = metric.meta.reduce_fx(values)
        elif self._takes_sum:
            metric.value = values.sum()
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = weights.sum()

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        if metrics is None and fx is None:
            self._saved = []  # The epoch has ended, and a key that was not logged since must not enter the next one.
        super().reset(metrics, fx)
