"""The reference of the table of combinations: plain PyTorch, without Trainer and callbacks.

One process; each update is one backward pass of the loss summed over the update's targets and divided by their number.
Only the statistics of batch normalization are those of a forward pass: the samples of one micro-batch, or those that
all processes see at once with `SyncBN`. So the update's forward pass is cut as the row's are.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from datamodules.loading.sampling import epoch_order, range_of_rank
from tests.support.combinations import (
    EPOCHS,
    EVEN_SAMPLES,
    GLOBAL_BATCH,
    OPTIMIZERS,
    SAMPLES,
    WARMUP,
    Cut,
    Settings,
    layers,
    samples,
    schedule_of,
)
from tests.support.tables import PADDING, loss_of

__all__ = ["Reference", "train_plainly"]


class Reference(NamedTuple):
    """What a run is to be.

    Attributes:
        after: parameters and buffers after each number of updates.
        rates: the learning rate of each update.
    """

    after: list[dict[str, Tensor]]
    rates: list[float]


def _order(settings: Settings, epoch: int) -> Tensor:
    """The samples of an epoch in their order; `DistributedSampler` documents its own."""
    if settings["loader"] == "DataLoader":
        return torch.arange(EVEN_SAMPLES)
    if settings["loader"] == "DataLoader with DistributedSampler":
        return torch.randperm(EVEN_SAMPLES, generator=torch.Generator().manual_seed(1 + epoch))
    return epoch_order(SAMPLES, seed=1, epoch=epoch)


def _forward_passes(settings: Settings, update: Tensor, cut: Cut) -> list[Tensor]:
    """The forward passes of an update in the order of their numbers."""
    numbered = update.split(GLOBAL_BATCH // cut.micro_batches // cut.processes)
    ranges = [range_of_rank(len(numbered), rank, cut.processes) for rank in range(cut.processes)]
    by_rank = [list(numbered[first:stop]) for first, stop in ranges]
    if settings["SyncBN"] == "on":
        return [torch.cat([part for part in at_once if part is not None]) for at_once in zip_longest(*by_rank)]
    return [part for parts in by_rank for part in parts if len(part)]


def train_plainly(settings: Settings, cut_at: Callable[[int], Cut]) -> Reference:
    """Train a row in one process.

    Args:
        cut_at: how the forward passes of an update are cut, by its number.
    """
    inputs, targets = samples(settings)
    backbone, head = layers(settings)
    network = nn.Sequential(OrderedDict(backbone=backbone, head=head))
    optimizer = OPTIMIZERS[settings["optimizer"]](network.parameters())
    scheduler, interval = schedule_of(settings["schedule"], optimizer)
    after, rates = [_state(network)], []

    def validate(epoch: int) -> float:
        network.eval()
        with torch.no_grad():
            loss = float(loss_of(network(inputs[-6:]), targets[-6:]))
        network.train()
        if epoch < 1 and settings["FreezeLayers"] == "on":
            backbone.eval()
        return loss

    loss = math.nan
    for epoch in range(EPOCHS):
        if settings["FreezeLayers"] == "on":
            backbone.train(epoch >= 1).requires_grad_(epoch >= 1)
        order = _order(settings, epoch)
        updates = order.split(GLOBAL_BATCH)
        for number, rows in enumerate(updates):
            cut = cut_at(len(rates))
            passes = _forward_passes(settings, rows, cut)
            count = sum((targets[part] != PADDING).sum() for part in passes)
            total = torch.zeros((), dtype=torch.float64)
            for part in passes:
                total = total + loss_of(network(inputs[part]), targets[part], reduction="sum")
            optimizer.zero_grad()
            (total / count).backward()
            if settings["clipping"] == "norm":
                nn.utils.clip_grad_norm_(network.parameters(), 0.3)
            rate = optimizer.param_groups[0]["lr"]
            if settings["WarmupLR"] == "on" and len(rates) < WARMUP:
                optimizer.param_groups[0]["lr"] = rate * (0.01 + 0.99 * len(rates) / WARMUP)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
            if scheduler and interval == "step":
                scheduler.step()
            last = number + 1 == len(updates)
            if last or settings["stop"] == "EarlyStopping":
                loss = validate(epoch)
            after.append(_state(network))
        if scheduler and interval == "epoch":
            scheduler.step(*((loss,) if settings["schedule"] == "ReduceLROnPlateau" else ()))
    return Reference(after, rates)


def _state(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}
