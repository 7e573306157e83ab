"""The arithmetic of a run that is cut into processes and micro-batches: a table beside plain torch.

Each row trains two epochs with 16 samples to an update, from one global order (`TrainLoader`), as processes and
micro-batches of an update. What it is compared with is written out by hand: one process, no Trainer, no callback, each
update one backward pass of the loss summed over the update's targets and divided by their number.

Batch normalisation leaves one freedom: a layer sees one forward pass at a time ("ghost batches": Hoffer et al., 2017).
For the network with BatchNorm the loop by hand therefore makes one forward pass for each micro-batch, and with SyncBN
one for those that all processes hold in the same step. The token model has no such layer: every row is compared with
the single batch.

Both data sets are uneven. Of 37 pictures 5 are left for the last update, whose last micro-batch of four has one
sample, so that of three processes one has none. Of 33 sentences of 1 to 20 words one is left.

That rows of equal micro-batches have equal bits is shown elsewhere; here is that each of them is right.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.sync_bn import SyncBN
from datamodules.loading.loaders import TrainLoader
from datamodules.loading.sampling import epoch_order, range_of_rank
from tests.support.ranks import run_ranks
from tests.support.tables import (
    PADDING,
    Tiny,
    equal,
    image_network,
    loss_of,
    noisy_images,
    quiet_trainer,
    sentence_network,
    sentences,
)

GLOBAL_BATCH = 16
EPOCHS = 2
SPLITS = [(1, 1), (1, 4), (2, 2), (3, 4)]
"""Processes, and micro-batches of an update."""
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


class Task(NamedTuple):
    data: tuple[Tensor, Tensor]
    network: Callable[[], nn.Module]
    passes: str
    """What a forward pass of the loop by hand holds: an update, a micro-batch, or a step of all processes."""


TASKS = {
    "BatchNorm": Task(noisy_images(37), image_network, "micro-batch"),
    "SyncBN": Task(noisy_images(37), image_network, "step"),
    "token model": Task(sentences(33), sentence_network, "update"),
}
SGD: dict[str, Any] = {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-3}


def data_of(task: Task, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs, targets = task.data
    return inputs.to(dtype) if inputs.is_floating_point() else inputs, targets


def forward_passes(task: Task, update: Tensor, world_size: int, micro_batches: int) -> Iterator[Tensor]:
    """The samples of each forward pass of an update."""
    parts = update.split(GLOBAL_BATCH // micro_batches)
    if task.passes == "update":
        yield update
    elif task.passes == "micro-batch":
        yield from parts
    else:
        ranges = [range(*range_of_rank(len(parts), rank, world_size)) for rank in range(world_size)]
        for step in range(len(ranges[0])):
            yield torch.cat([parts[of_rank[step]] for of_rank in ranges if step < len(of_rank)])


def by_hand(task: Task, dtype: torch.dtype, world_size: int, micro_batches: int) -> dict[str, Tensor]:
    """Plain torch: the weights and buffers after updates that each see 16 samples."""
    inputs, targets = data_of(task, dtype)
    network = task.network().to(dtype)
    optimizer = torch.optim.SGD(network.parameters(), **SGD)
    for epoch in range(EPOCHS):
        for update in epoch_order(len(inputs), seed=1, epoch=epoch).split(GLOBAL_BATCH):
            loss = torch.zeros((), dtype=dtype)
            for rows in forward_passes(task, update, world_size, micro_batches):
                loss = loss + loss_of(network(inputs[rows]), targets[rows], reduction="sum")
            optimizer.zero_grad()
            (loss / (targets[update] != PADDING).sum()).backward()
            optimizer.step()
    return network.state_dict()


def train(
    task: Task, dtype: torch.dtype, world_size: int, micro_batches: int, on: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """The same run in a Trainer; `on` are its arguments for a device."""
    synchronised = [SyncBN()] if task.passes == "step" else []
    accumulation, settings = GradientAccumulation(global_batch_size=GLOBAL_BATCH), {"max_epochs": EPOCHS} | (on or {})
    trainer = quiet_trainer(accumulation, *synchronised, world_size=world_size, **settings)
    inputs, targets = data_of(task, dtype)
    rows, batch_size = torch.arange(len(inputs)), GLOBAL_BATCH // micro_batches
    loader = TrainLoader(inputs, targets, rows, batch_size, 1, trainer.global_rank, world_size)
    model = Tiny(task.network().to(dtype), torch.optim.SGD, **SGD)
    trainer.fit(model, loader)
    assert trainer.world_size == world_size
    return {name: tensor.cpu().clone() for name, tensor in model.network.state_dict().items()}


Row = tuple[str, torch.dtype, int]


def train_all(world_size: int) -> dict[Row, dict[str, Tensor]]:
    """Every row of one number of processes: they start once."""
    return {
        (name, dtype, micro_batches): train(task, dtype, world_size, micro_batches)
        for name, task in TASKS.items()
        for dtype in BOUNDS
        for micro_batches in (m for processes, m in SPLITS if processes == world_size)
    }


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight or buffer, relative to the largest value of its tensor."""
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


def test_a_run_cut_into_processes_and_micro_batches_equals_plain_torch() -> None:
    print("\nLargest relative error of a final weight or buffer, by processes and micro-batches of an update")
    for world_size in sorted({split[0] for split in SPLITS}):
        ranks = run_ranks(train_all, world_size, world_size)
        for (name, dtype, micro_batches), found in ranks[0].items():
            row = name, dtype, micro_batches
            assert all(equal(rank[row], found) for rank in ranks), "ranks differ"
            gap = error(found, by_hand(TASKS[name], dtype, world_size, micro_batches))
            print(f"{name:12} {world_size} x {micro_batches}  {dtype!s:14} {gap:.0e}")
            assert gap <= BOUNDS[dtype], (world_size, row)
