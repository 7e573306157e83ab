"""Comparison of the ranks' weights, which stops a run whose ranks train different models.

If a gradient is not reduced, as of a layer unfrozen without wrapping the module in DDP again, or after a forward pass
that bypasses DDP, each rank trains its own model. The loss looks good, and rank 0's model is saved.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.lib.exchange import gather
from callbacks.lib.one_lightning import OneLightningCallback
from callbacks.lib.training_loaders import numbered_loaders
from datamodules.errors import RunFailedError, UserError
from datamodules.lightning import pl
from datamodules.notes import warn

# Elements of 8 bytes are read as halves. As one int64, the bits of 2.0 and 4.0 differ by 2**52, so that exchanging them
# could leave the weighted sum modulo 2**64 unchanged.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_BLOCK = 1 << 20


@lru_cache(maxsize=2)
def _odd_numbers(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _BLOCK, 2, device=device)


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, read as integers, times 1, 3, 5, ... modulo 2**64.

    It changes with any single bit, if two elements of up to 4 bytes change places, and between 0.0 and -0.0. Two NaN
    with the same bits are equal.

    Example:
        >>> a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
        >>> bool(checksum(a) == checksum(a.clone())), bool(checksum(a) == checksum(b))
        (True, False)
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    # As integers shorter than int64, and in blocks: the products then need 16 MiB, not four times the largest tensor.
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, block in enumerate(bits.split(_BLOCK)):
        weighted = (block * _odd_numbers(tensor.device)[: len(block)]).sum()
        total += weighted + 2 * _BLOCK * number * block.sum(dtype=torch.int64)
    return total


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the checksum of each tensor, int64 of shape (tensors,), on one device."""
    return torch.stack([checksum(tensor).to(device) for tensor in tensors])


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


class RankConsistency(OneLightningCallback):
    """Stops a run whose ranks hold different weights, and names the first parameter that differs.

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
                ' part of the weights; pass strategy="ddp", or remove the callback'
            )

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._active or trainer.global_step == self._checked_step:
            return
        self._checked_step = trainer.global_step
        names, parameters = zip(*pl_module.named_parameters(), strict=True)
        rank_checksums = checksums(parameters, pl_module.device)
        by_rank: list[Any] = [torch.empty_like(rank_checksums) for _ in range(trainer.world_size)]
        dist.all_gather(by_rank, rank_checksums)
        difference = describe_difference(torch.stack(by_rank).cpu(), names)
        if difference:
            raise RunFailedError(
                f"the ranks hold different weights after update {trainer.global_step}: {difference} agree among"
                " themselves. Its gradient was not reduced, or it was changed outside the optimiser: look for"
                " layers unfrozen without FreezeLayers, for a network called otherwise than in training_step, and for"
                " code that writes to weights; expected were the same bits on every rank"
            )

    on_train_epoch_end = on_train_end = _compare
