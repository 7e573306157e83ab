"""The arithmetic of a run that is cut into processes and micro-batches: a table beside plain torch.

Each row trains two epochs with 16 samples to an update, from one global order (`TrainLoader`), as processes and
micro-batches of an update. What it is compared with is written out by hand: one process, no Trainer, no callback, each
update one backward pass of the loss summed over the update's targets and divided by their number.

Batch normalisation leaves one freedom: a layer sees one forward pass at a time ("ghost batches": Hoffer et al., 2017).
For the network with BatchNorm the loop by hand therefore makes one forward pass for each micro-batch, and with SyncBN
one for those that all processes hold in the same step. The token model has no such layer: every row is compared with
the single batch.

Both data sets are uneven. Of 101 pictures 5 are left for the last update, whose last micro-batch of four has one
sample, so that of three processes one has none. Of 65 sentences of 1 to 20 words one is left.

That rows of equal micro-batches have equal bits is shown elsewhere; here is that each of them is right.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.sync_bn import SyncBN
from datamodules.loading.loaders import TrainLoader
from datamodules.loading.sampling import epoch_order, range_of_rank
from tests.support.ranks import run_ranks
from tests.support.tables import (
    PADDING,
    QUIET,
    Tiny,
    image_network,
    loss_of,
    noisy_images,
    on_ranks,
    sentence_network,
    sentences,
    silence,
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
    "BatchNorm": Task(noisy_images(101), image_network, "micro-batch"),
    "SyncBN": Task(noisy_images(101), image_network, "step"),
    "token model": Task(sentences(65), sentence_network, "update"),
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


def train(task: Task, dtype: torch.dtype, world_size: int, micro_batches: int, ours: bool) -> dict[str, Tensor]:
    """The same run in a Trainer, with our callbacks or with what Lightning has."""
    options: dict[str, Any] = {"accumulate_grad_batches": -(-micro_batches // world_size)}
    if ours:
        synchronised = [SyncBN()] if task.passes == "step" else []
        options = {"callbacks": [GradientAccumulation(global_batch_size=GLOBAL_BATCH), *synchronised]}
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **on_ranks(world_size),
        **QUIET,
        **options,
    )
    inputs, targets = data_of(task, dtype)
    rows, batch_size = torch.arange(len(inputs)), GLOBAL_BATCH // micro_batches
    loader = TrainLoader(inputs, targets, rows, batch_size, 1, trainer.global_rank, world_size)
    model = Tiny(task.network().to(dtype), torch.optim.SGD, **SGD)
    trainer.fit(model, loader)
    return {name: tensor.clone() for name, tensor in model.network.state_dict().items()}


Key = tuple[str, torch.dtype, int, bool]


def train_all(world_size: int) -> dict[Key, dict[str, Tensor]]:
    """Every row of one number of processes: they start once."""
    silence()
    return {
        (name, dtype, micro_batches, ours): train(task, dtype, world_size, micro_batches, ours)
        for name, task in TASKS.items()
        for dtype in BOUNDS
        for micro_batches in (m for processes, m in SPLITS if processes == world_size)
        for ours in (True, False)
        if ours or task.passes != "step"  # Lightning has the same without it.
    }


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight or buffer, relative to the largest value of its tensor."""
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


Row = tuple[str, int, int, torch.dtype]


def measure() -> dict[Row, tuple[float, float | None]]:
    """The errors of our runs and of stock Lightning's, by task, processes, micro-batches and type."""
    runs = {world_size: run_ranks(train_all, world_size, world_size) for world_size in {split[0] for split in SPLITS}}
    errors: dict[Row, tuple[float, float | None]] = {}
    for name, task in TASKS.items():
        for world_size, micro_batches in SPLITS:
            for dtype in BOUNDS:
                expected = by_hand(task, dtype, world_size, micro_batches)
                ranks = [run[name, dtype, micro_batches, True] for run in runs[world_size]]
                assert all(torch.equal(ranks[0][key], rank[key]) for rank in ranks for key in expected), "ranks differ"
                stock = runs[world_size][0].get((name, dtype, micro_batches, False))
                stock_error = None if stock is None else error(stock, expected)
                errors[name, world_size, micro_batches, dtype] = error(ranks[0], expected), stock_error
    return errors


def test_a_run_cut_into_processes_and_micro_batches_equals_plain_torch_where_stock_lightning_does_not() -> None:
    errors = measure()
    print("\nLargest relative error of a final weight or buffer, by processes and micro-batches of an update")
    print(f"{'':26}{'float32':>22}{'float64':>24}\n{'':26}" + f"{'ours':>12}{'stock':>12}" * 2)
    for name in TASKS:
        for split in SPLITS:
            found = [errors[name, *split, dtype] for dtype in BOUNDS]
            values = "".join(f"{value:12.0e}" if value is not None else " " * 12 for pair in found for value in pair)
            print(f"{name:20}{split[0]}, {split[1]}  {values}")
    for (name, world_size, micro_batches, dtype), (ours, stock_error) in errors.items():
        row = f"{name}, {world_size} processes, {micro_batches} micro-batches, {dtype}"
        assert ours <= BOUNDS[dtype], row
        if stock_error is None:
            continue
        if (world_size, micro_batches) == (1, 1):
            assert stock_error <= BOUNDS[dtype], "uncut, stock Lightning is right"
        else:
            assert stock_error > 1e-3, row
