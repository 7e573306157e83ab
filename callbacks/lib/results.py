"""Results of `self.log` that all ranks share, and that are exact after a resume within an epoch.

Lightning reduces the numbers of an epoch one by one, in the order in which a rank logged them: another order mixes
them, and a name that one rank lacks keeps the others waiting. It weighs means by whole numbers of samples per rank, and
all-reduces ``log(on_step=True, sync_dist=True)`` in each micro-batch, of which ranks may have unequal numbers. Here the
ranks exchange what they logged by name, once per epoch, and reduce the values of a step once per update.

Lightning also starts the means of an epoch again when a run resumes within it (#20652). `UpdateResults` are the results
of training, and `SharedEvaluationLoop` is Lightning's loop of an evaluation with such results.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from callbacks.lib.ranks import check_decision, deciders, gather
from datamodules.errors import RunFailedError
from datamodules.lightning import _EvaluationLoop, _ResultCollection, _ResultMetric, _Sync, call, pl
from datamodules.notes import warn

_NEUTRAL = {"max": -math.inf, "min": math.inf}
"""Neutral element of each reduction; 0 for sums and means."""


class _Logged(NamedTuple):
    """What the other ranks need of a number or a torchmetrics object that this rank has logged in the epoch."""

    meta: Any
    is_number: bool
    is_synced: bool
    total: float = 0.0
    weight: float = 0.0
    value: float = 0.0
    dtype: torch.dtype = torch.float32


def _reduce(meta: Any, totals: Tensor, weights: Tensor) -> Tensor:
    """Return the mean, sum, maximum or minimum over what was logged.

    Args:
        meta: Lightning's description of the number.
        totals: sum or extreme of each part, float64 of shape (parts,); for a mean the sum times `weights`.
    """
    if meta.is_mean_reduction:
        return totals.sum() / weights.sum()
    reduction: Any = getattr(torch, meta.reduce_fx.__name__)
    return reduction(totals)  # type: ignore[no-any-return]


def _waits(metric: _ResultMetric) -> bool:
    """Whether a logged torchmetrics object waits for all ranks when it is computed."""
    return not metric.is_tensor and metric.value.sync_on_compute and metric.value.process_group is None


class SharedResults(_ResultCollection):
    """Result collection of Lightning whose ranks reduce what they logged in an epoch by its names.

    ``sync_dist=True`` works as in Lightning, except that a mean is weighted by the samples of each rank, which may have
    unequal numbers of them, or none. A number that a callback or a scheduler monitors is reduced in any case.

    Args:
        training: whether the results belong to a training loop.
    """

    def __init__(self, trainer: pl.Trainer, training: bool) -> None:
        super().__init__(training=training)
        self.trainer = trainer
        self._is_distributed = trainer.world_size > 1 and dist.is_available() and dist.is_initialized()
        self._logs_synced = False
        """Whether the running call of `log` has ``sync_dist=True``."""
        self._synced: set[str] = set()
        """Keys that were logged with ``sync_dist=True``."""
        self._noted: set[str] = set()

    @override
    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._logs_synced = False
        # A group of some ranks only is left to Lightning.
        if self._is_distributed and kwargs.get("sync_dist_group") is None:
            self._logs_synced = kwargs.pop("sync_dist", False) and not kwargs.get("rank_zero_only", False)
            kwargs["sync_dist_fn"] = _Sync.no_op
        super().log(fx, name, value, *args, **kwargs)

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if self._logs_synced:
            self._synced.add(key)
        is_empty = type(batch_size) is int and batch_size == 0
        if is_empty and isinstance(value, Tensor) and self[key].meta.is_mean_reduction:
            value = torch.zeros_like(value)  # The mean of no sample may be NaN, and 0 times NaN is NaN.
        super().update_metrics(key, value, batch_size)

    @override
    def metrics(self, on_step: bool) -> Any:
        # What a hook of the epoch's end has logged is shared when it is first read.
        if not on_step and self._is_distributed and self._unshared(deciders(self.trainer)):
            self.share()
        return super().metrics(on_step)

    def share(self) -> None:
        """Reduce over the ranks what they logged in this epoch since the last call; a collective call.

        Raises:
            RunFailedError: on all ranks, if one of them lacks a torchmetrics object, or has another value of one that
                decides.
        """
        if not self._is_distributed:
            return
        monitored = deciders(self.trainer)
        by_rank: list[dict[str, _Logged]] = gather(self._to_exchange(self._unshared(monitored)))
        for key in sorted(set().union(*by_rank)):
            ranks = [rank for rank, logged in enumerate(by_rank) if key in logged]
            entries = [by_rank[rank][key] for rank in ranks]
            if entries[0].is_number:
                self._share_number(key, ranks, entries, monitored)
            else:
                self._share_metric(key, ranks, entries, monitored)

    def _unshared(self, monitored: Mapping[str, str]) -> dict[str, _ResultMetric]:
        """Return what is shared with the other ranks and has changed since."""
        unshared = {}
        for key, metric in self.valid_items():
            if not metric.meta.on_epoch or metric._computed is not None or metric.meta.sync.should:
                continue
            if _waits(metric) or key in self._synced or self._decider(metric.meta, monitored):
                unshared[key] = metric
        return unshared

    @staticmethod
    def _decider(meta: Any, monitored: Mapping[str, str]) -> str | None:
        """Return what decides by the value of an epoch, if anything does."""
        suffix = ""
        if meta.add_dataloader_idx and meta.dataloader_idx is not None:
            suffix = _ResultCollection.DATALOADER_SUFFIX.format(meta.dataloader_idx)
        return monitored.get(meta.name + suffix) or monitored.get(meta.forked_name(on_step=False) + suffix)

    def _to_exchange(self, unshared: Mapping[str, _ResultMetric]) -> dict[str, _Logged]:
        logged = {
            key: _Logged(metric.meta, is_number=False, is_synced=_waits(metric))
            for key, metric in unshared.items()
            if not metric.is_tensor
        }
        numbers = {key: metric for key, metric in unshared.items() if metric.is_tensor}
        rows = []
        for metric in numbers.values():
            total = metric.value.detach()
            weight = metric.cumulated_batch_size if metric.meta.is_mean_reduction else torch.ones_like(total)
            values = torch.stack((total.double(), weight.double(), (total / weight).double()))
            rows.append(values.to(self.trainer.strategy.root_device))
        # Read in one transfer from the device.
        for (key, metric), row in zip(numbers.items(), torch.stack(rows).tolist() if rows else []):
            total, weight, value = row
            logged[key] = _Logged(metric.meta, True, key in self._synced, total, weight, value, metric.value.dtype)
        return logged

    def _share_number(
        self, key: str, ranks: Sequence[int], entries: Sequence[_Logged], monitored: Mapping[str, str]
    ) -> None:
        meta = entries[0].meta
        world_size = self.trainer.world_size
        if key not in self:
            # The callbacks of this rank read the value as well.
            self[key] = _ResultMetric(meta, is_tensor=True).to(self.trainer.strategy.root_device)
        is_everywhere = len(ranks) == world_size
        is_synced = any(entry.is_synced for entry in entries)
        if is_everywhere and not is_synced and len({repr(entry.value) for entry in entries}) == 1:
            value = entries[0].value  # The program has reduced it itself.
        else:
            totals = torch.tensor([entry.total for entry in entries], dtype=torch.float64)
            weights = torch.tensor([entry.weight for entry in entries], dtype=torch.float64)
            value = float(_reduce(meta, totals, weights))
            if not is_everywhere:
                names = ", ".join(map(str, ranks))
                self._note(
                    f"{meta.name} was logged on {len(ranks)} of {world_size} ranks ({names}): its value is over their"
                    " samples; log it on all ranks for one over all samples"
                )
            elif not is_synced:
                self._note_decider(meta.name, self._decider(meta, monitored))
        metric = self[key]
        metric._computed = torch.tensor(value, dtype=entries[0].dtype, device=metric.value.device)
        metric.has_reset = False

    def _share_metric(
        self, key: str, ranks: Sequence[int], entries: Sequence[_Logged], monitored: Mapping[str, str]
    ) -> None:
        name = entries[0].meta.name
        missing = sorted(set(range(self.trainer.world_size)) - set(ranks))
        if missing:
            raise RunFailedError(
                f"{name} is logged on rank {ranks[0]} and not on rank {missing[0]}, and a torchmetrics object waits for"
                " all ranks: log it on each rank, or log a number with sync_dist=True"
            )
        value = self[key].compute()
        decider = self._decider(entries[0].meta, monitored)
        if not entries[0].is_synced and decider is not None:
            check_decision(name, value, decider)

    def _note_decider(self, name: str, decider: str | None) -> None:
        self._note(
            f"{name} is logged without sync_dist=True, and {decider} decides by it: its value is that of all ranks, as"
            " with sync_dist=True"
        )

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            warn("note: %s", text)


class UpdateResults(SharedResults):
    """Results of a training loop whose steps are updates: it continues saved sums, and ignores stand-ins.

    The value of a step is over all micro-batches of the update, and with ``sync_dist=True`` over all ranks.
    The ranks reduce it once, at the update's end.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer, training=True)
        self._is_stand_in = False
        self._is_in_update = False
        self._steps: dict[str, list[tuple[Tensor, Any]]] = {}
        """Value and weight of what each micro-batch of this update has logged for a step, by key."""
        self._common_steps: set[tuple[str, ...]] = set()
        """Keys of an update that all ranks were found to have logged."""
        self._monitored: dict[str, str] = {}
        self._saved: list[dict[str, Any]] = []
        """Sums and weights of the checkpoint by key, that were not yet added to the epoch's results."""
        self._takes_sum = False
        """Whether this rank adds the saved sums; maxima and minima are taken over on every rank."""

    def begin_epoch(self) -> None:
        """Read which metrics decide."""
        self._monitored = deciders(self.trainer)

    @contextlib.contextmanager
    def stand_in(self) -> Iterator[None]:
        """Log neutral elements, which change no mean, sum or extreme, under the keys of the other ranks."""
        self._is_stand_in = True
        try:
            yield
        finally:
            self._is_stand_in = False

    def begin_update(self) -> None:
        """Collect what is logged for a step until `end_update`; called again where a closure repeats the update."""
        self._is_in_update = True
        self._steps = {}

    def end_update(self) -> None:
        """Reduce the values of the step over the micro-batches and, with ``sync_dist``, over the ranks."""
        self._is_in_update = False
        if self._steps or (self._is_distributed and not self._common_steps):
            self._finish_steps()

    def resume_from(self, trainer: pl.Trainer, by_rank: Sequence[Mapping[str, Any]]) -> None:
        """Continue the sums of this epoch from a checkpoint.

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
        metric = self[key]
        if metric.is_tensor and metric.meta.on_step and not metric.meta.sync.should:
            self._steps.setdefault(key, []).append((metric._forward_cache, batch_size))
            if not self._is_in_update:
                self._finish_steps()

    def _finish_steps(self) -> None:
        steps = self._steps
        self._steps = {}
        shared = self._shared_steps(steps) if self._is_distributed else ()
        sums = {}
        for key, logged in steps.items():
            if key in shared or len(logged) > 1:
                meta = self[key].meta
                factors = [weight if meta.is_mean_reduction else 1 for _, weight in logged]
                parts = torch.stack([value.detach().double() * factor for (value, _), factor in zip(logged, factors)])
                weight = torch.zeros_like(parts[0]) + sum(weight for _, weight in logged)
                total = parts.sum() if meta.is_mean_reduction else _reduce(meta, parts, weight)
                sums[key] = torch.stack((total, weight)).to(self.trainer.strategy.root_device)
        if shared:
            rows = torch.stack([sums[key] for key in shared])
            by_rank = [torch.empty_like(rows) for _ in range(self.trainer.world_size)]
            dist.all_gather(by_rank, rows)
            sums |= dict(zip(shared, torch.stack(by_rank).unbind(1)))
        for key, rows in sums.items():
            metric = self[key]
            totals, weights = rows.view(-1, 2).unbind(1)
            value = _reduce(metric.meta, totals, weights)
            metric._forward_cache = value.to(metric.value)
            if not metric.meta.on_epoch:
                metric.value = metric._forward_cache

    def _shared_steps(self, logged: Iterable[str]) -> tuple[str, ...]:
        """Return the keys of the steps that are reduced over the ranks.

        Raises:
            RunFailedError: on all ranks, if one has logged other keys in the first update.
        """
        keys = []
        for key in sorted(logged):
            meta = self[key].meta
            decider = self._monitored.get(meta.forked_name(on_step=True))
            if key in self._synced or decider is not None:
                keys.append(key)
            if key not in self._synced and decider is not None:
                self._note_decider(meta.name, decider)
        shared = tuple(keys)
        if shared in self._common_steps:
            return shared
        by_rank = gather(shared)
        for rank, keys_of_rank in enumerate(by_rank):
            differing = sorted(set(keys_of_rank) ^ set(by_rank[0]))
            if differing:
                name = differing[0].partition(".")[2]
                logging_rank, other_rank = (rank, 0) if differing[0] in keys_of_rank else (0, rank)
                raise RunFailedError(
                    f"self.log({name!r}, on_step=True, sync_dist=True) is called on rank {logging_rank} and not on rank"
                    f" {other_rank} in one update: call it on each rank, or pass on_step=False, on_epoch=True"
                )
        self._common_steps.add(shared)
        return shared

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
        if fx is not None:
            # Lightning clears the logs of a hook that it enters in the first batch of an epoch after another hook. An
            # update enters its hooks once per micro-batch, and the last epoch's end has cleared all logs.
            return
        if metrics is None:
            # The epoch has ended, and a key that was not logged since must not enter the next one.
            self._saved = []
            self._steps = {}
            self._is_in_update = False
        super().reset(metrics, fx)


class SharedEvaluationLoop(_EvaluationLoop):
    """Validation or test whose results are `SharedResults`.

    Args:
        stock: Lightning's loop, whose place it takes.
    """

    def __init__(self, stock: _EvaluationLoop) -> None:
        super().__init__(stock.trainer, stock._trainer_fn, stock._stage, stock.verbose, stock.inference_mode)
        vars(self).update(vars(stock))
        self._shared = SharedResults(stock.trainer, training=False)
        self._results = self._shared

    # A profiler's table has the name of Lightning's class.

    @override
    def _on_before_fetch(self) -> None:
        trainer: Any = self.trainer
        trainer.profiler.start(f"[{_EvaluationLoop.__name__}].{self._stage.dataloader_prefix}_next")

    @override
    def _on_after_fetch(self) -> None:
        trainer: Any = self.trainer
        trainer.profiler.stop(f"[{_EvaluationLoop.__name__}].{self._stage.dataloader_prefix}_next")

    @override
    def _store_dataloader_outputs(self) -> None:
        self._shared.share()
        super()._store_dataloader_outputs()

    @override
    def _on_evaluation_epoch_end(self) -> None:
        name = "on_test_epoch_end" if self.trainer.testing else "on_validation_epoch_end"
        call._call_callback_hooks(self.trainer, name)
        call._call_lightning_module_hook(self.trainer, name)
        self._shared.share()  # In the same place on all ranks, also on one whose hooks have logged nothing.
        self.trainer._logger_connector.on_epoch_end()


def share_evaluations(trainer: pl.Trainer) -> None:
    """Let the ranks share what `validate` and `test` of a Trainer log."""
    for name in ("validate_loop", "test_loop"):
        loop = getattr(trainer, name)
        if not isinstance(loop, SharedEvaluationLoop):
            setattr(trainer, name, SharedEvaluationLoop(loop))
