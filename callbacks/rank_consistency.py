"""Comparison of the ranks' weights, which stops a run whose ranks train different models.

If a gradient is not reduced, as of a layer unfrozen without wrapping the module in DDP again, or after a forward pass
that bypasses DDP, each rank trains its own model. The loss looks good, and rank 0's model is saved.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.lib.lightning_internals import OneLightningCallback
from callbacks.lib.loaded_updates import numbered_loaders
from callbacks.lib.ranks import checksum, checksums, deciders, gather
from datamodules.errors import RunFailedError, UserError, spelled
from datamodules.lightning import pl
from datamodules.notes import warn


def describe_difference(by_rank: Tensor, names: Sequence[str]) -> str | None:
    """Describe the first tensor that differs, and on which ranks; None if all are equal.

    Args:
        by_rank: checksums of shape (ranks, tensors).

    Example:
        >>> describe_difference(torch.tensor([[1, 2, 3], [1, 7, 8], [1, 2, 3]]), ["a", "b", "c"])
        'b (the first of 2 of 3): ranks 0, 2 | 1'
    """
    differing = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
    if not differing:
        return None
    ranks_by_checksum: dict[int, list[int]] = {}
    for rank, value in enumerate(by_rank[:, differing[0]].tolist()):
        ranks_by_checksum.setdefault(value, []).append(rank)
    groups = " | ".join(", ".join(map(str, ranks)) for ranks in ranks_by_checksum.values())
    return f"{names[differing[0]]} (the first of {len(differing)} of {len(names)}): ranks {groups}"


class Evidence(NamedTuple):
    """What one rank knows of the first parameter that differs."""

    rates: list[float]
    """Learning rates of all groups of all optimizers."""
    metrics: dict[str, str]
    """Values of the metrics that callbacks and schedulers can read."""
    has_optimizer: bool
    """Whether an optimizer has the parameter."""
    requires_grad: bool
    gradient: int | None
    """Checksum of the gradient of the last update; None without a gradient."""


def first_differing(by_rank: Sequence[Any]) -> int:
    """Return the first rank whose value differs from rank 0; 0 if all are equal.

    Example:
        >>> first_differing(["a", "a", "b"])
        2
    """
    return next((rank for rank, value in enumerate(by_rank) if value != by_rank[0]), 0)


def describe_cause(evidence: Sequence[Evidence], monitored: Iterable[str] = ()) -> str:
    """Return why the ranks hold different weights, and what to change.

    Args:
        evidence: the evidence of each rank.
        monitored: names of the metrics that decide.
    """
    first = evidence[0]
    rank = first_differing([known.rates for known in evidence])
    if rank:
        rate, other_rate = next(pair for pair in zip(first.rates, evidence[rank].rates) if pair[0] != pair[1])
        differing = [name for name, value in first.metrics.items() if evidence[rank].metrics.get(name) != value]
        differing.sort(key=lambda name: name not in set(monitored))
        metric = ""
        if differing:
            name = differing[0]
            value = evidence[rank].metrics.get(name, "missing")
            metric = f", as {name} is {first.metrics[name]} on rank 0 and {value} on rank {rank}"
        return (
            f"The learning rate is {rate:g} on rank 0 and {other_rate:g} on rank {rank}: a schedule has decided by a"
            f" value of one rank{metric}; log what it reads with sync_dist=True"
        )
    rank = first_differing([known.requires_grad for known in evidence])
    if rank:
        frozen_rank, trained_rank = (rank, 0) if first.requires_grad else (0, rank)
        return (
            f"It is frozen on rank {frozen_rank} and not on rank {trained_rank}: freeze and unfreeze layers on all"
            " ranks in the same update, as FreezeLayers does"
        )
    if not first.has_optimizer:
        return "No optimizer has it, so other code writes to it: write the same values on each rank, once per update"
    if first_differing([known.gradient for known in evidence]):
        return (
            "Its gradient was not reduced over the ranks: look for layers unfrozen without FreezeLayers, and for a"
            " network called otherwise than in training_step"
        )
    return (
        "Its last gradient is the same on all ranks, so the optimizer or other code has changed it otherwise: look for"
        " code that writes to weights, and for random numbers in hooks or in the optimizer's step"
    )


class RankConsistency(OneLightningCallback):
    """Callback that stops a run whose ranks hold different weights, and names the first parameter that differs.

    It compares a checksum of the bits of each parameter: one pass over the weights and one all-gather of a number for
    each. It does not compare buffers: under plain DDP each rank has its own running statistics of BatchNorm. With
    strategies that split parameters it prints a note and compares no weights.

    Before the first batch it compares the data of the loaders of `datamodules`: labels, lengths and names of files.

    Runs on: `on_train_start`; `on_train_epoch_end`, before the checkpoints of that epoch are saved; `on_train_end`.

    Raises:
        UserError: on every rank, if one trains on other data.
        RunFailedError: on every rank, if one differs.

    Example:
        >>> trainer = pl.Trainer(callbacks=[RankConsistency()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        super().__init__()
        self._active = False
        self._checked_step = -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1:
            return
        data = gather([loader.data for loader in numbered_loaders(trainer.train_dataloader)])
        for rank, rank_data in enumerate(data):
            if rank_data != data[0]:
                counts = [loader["samples"] for loader in rank_data]
                expected = [loader["samples"] for loader in data[0]]
                raise UserError(
                    f"rank {rank} trains on other data than rank 0: {counts} samples and {expected}, others or in"
                    " another order; copy the same files to each node"
                )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        replicated = isinstance(trainer.strategy.model, DistributedDataParallel)
        self._active = replicated and trainer.world_size > 1
        self._checked_step = -1
        if trainer.world_size > 1 and not replicated:
            warn(
                f"warning: RankConsistency compares nothing: {type(trainer.strategy).__name__} gives each rank its own"
                f" part of the weights; pass {spelled('strategy', 'ddp')}, or remove the callback"
            )

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._active or trainer.global_step == self._checked_step:
            return
        self._checked_step = trainer.global_step
        names, parameters = zip(*pl_module.named_parameters(), strict=True)
        rank_checksums = checksums(parameters, pl_module.device)
        by_rank: list[Any] = [torch.empty_like(rank_checksums) for _ in range(trainer.world_size)]
        dist.all_gather(by_rank, rank_checksums)
        rank_checksums_on_cpu = torch.stack(by_rank).cpu()
        difference = describe_difference(rank_checksums_on_cpu, names)
        if difference:
            index = int((rank_checksums_on_cpu != rank_checksums_on_cpu[0]).any(0).nonzero()[0])
            evidence = gather(self._evidence(trainer, parameters[index]))
            raise RunFailedError(
                f"the ranks hold different weights after update {trainer.global_step}: {difference} agree among"
                f" themselves. {describe_cause(evidence, deciders(trainer))}"
            )

    @staticmethod
    def _evidence(trainer: pl.Trainer, parameter: Tensor) -> Evidence:
        metrics = {
            name: value for name, value in trainer.callback_metrics.items() if torch.as_tensor(value).numel() == 1
        }
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return Evidence(
            rates=[float(group["lr"]) for group in groups if "lr" in group],
            metrics={name: f"{float(value):.9g}" for name, value in metrics.items() if value.numel() == 1},
            has_optimizer=any(parameter is trained for group in groups for trained in group["params"]),
            requires_grad=parameter.requires_grad,
            gradient=None if parameter.grad is None else int(checksum(parameter.grad)),
        )

    on_train_epoch_end = on_train_end = _compare
