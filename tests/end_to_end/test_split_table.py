"""A run learns the same however it is cut into processes and micro-batches: a table beside plain torch.

Each row trains two epochs with 16 samples to an update, from one global order (`TrainLoader`), as processes x
micro-batches. What it is compared with is written out by hand: one process, no Trainer, no callback, each update one
backward pass of the loss summed over the update's targets and divided by their number.

Batch normalisation leaves one freedom. A layer sees one forward pass at a time, so no accumulation, and no callback,
can give it the statistics of samples that are in another micro-batch ("ghost batches": Hoffer et al., 2017). For the
network with BatchNorm, the loop by hand therefore makes one forward pass for each micro-batch of the row, over the
samples that all processes hold in it: all 16 in 1x1, 2x1 and 4x1, 8 in 2x2, 4 in 1x4 and 2x4. So rows with
micro-batches of one size are shown to be equal. The token model has no such layer: every row is compared with the
single batch.

Both data sets are uneven. Of 101 pictures 5 are left for the last update: a short window, whose last micro-batch
has one sample, so that in 2x4 a process has none. Of 65 sentences of 1 to 20 words one is left.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.sync_bn import SyncBN
from datamodules.loading.loaders import TrainLoader
from datamodules.loading.sampling import epoch_order
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
SPLITS = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1)]
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


class Task(NamedTuple):
    data: tuple[Tensor, Tensor]
    network: Callable[[], nn.Module]
    has_batch_norm: bool


TASKS = {
    "CNN with BatchNorm": Task(noisy_images(101), image_network, True),
    "token model": Task(sentences(65), sentence_network, False),
}
SGD: dict[str, Any] = {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-3}


def data_of(task: Task, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs, targets = task.data
    return inputs.to(dtype) if inputs.is_floating_point() else inputs, targets


def by_hand(task: Task, dtype: torch.dtype, micro_batches: int) -> dict[str, Tensor]:
    """Plain torch: the weights and buffers after updates that each see 16 samples at once.

    Args:
        micro_batches: into how many forward passes an update is cut; they matter to batch normalisation alone.
    """
    inputs, targets = data_of(task, dtype)
    network = task.network().to(dtype)
    optimizer = torch.optim.SGD(network.parameters(), **SGD)
    for epoch in range(EPOCHS):
        for update in epoch_order(len(inputs), seed=1, epoch=epoch).split(GLOBAL_BATCH):
            loss = torch.zeros((), dtype=dtype)
            for rows in update.split(GLOBAL_BATCH // micro_batches):
                loss = loss + loss_of(network(inputs[rows]), targets[rows], reduction="sum")
            optimizer.zero_grad()
            (loss / (targets[update] != PADDING).sum()).backward()
            optimizer.step()
    return network.state_dict()


def train(task: Task, dtype: torch.dtype, world_size: int, micro_batches: int, ours: bool) -> dict[str, Tensor]:
    """The same run in a Trainer, with our callbacks or with what Lightning has."""
    batch_size = GLOBAL_BATCH // world_size // micro_batches
    options: dict[str, Any] = {"accumulate_grad_batches": micro_batches}
    if ours:
        options = {"callbacks": [GradientAccumulation(global_batch_size=GLOBAL_BATCH), SyncBN()]}
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **on_ranks(world_size),
        **QUIET,
        **options,
    )
    inputs, targets = data_of(task, dtype)
    rows = torch.arange(len(inputs))
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
    }


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight or buffer, relative to the largest value of its tensor."""
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


Row = tuple[str, int, int, torch.dtype]


def measure() -> dict[Row, tuple[float, float]]:
    """The errors of our runs and of stock Lightning's, by task, processes, micro-batches and type."""
    runs = {world_size: run_ranks(train_all, world_size, world_size) for world_size in (1, 2, 4)}
    errors: dict[Row, tuple[float, float]] = {}
    for name, task in TASKS.items():
        for world_size, micro_batches in SPLITS:
            for dtype in BOUNDS:
                expected = by_hand(task, dtype, micro_batches if task.has_batch_norm else 1)
                ranks = [run[name, dtype, micro_batches, True] for run in runs[world_size]]
                assert all(torch.equal(ranks[0][key], rank[key]) for rank in ranks for key in expected), "ranks differ"
                stock = runs[world_size][0][name, dtype, micro_batches, False]
                errors[name, world_size, micro_batches, dtype] = error(ranks[0], expected), error(stock, expected)
    return errors


def test_a_run_cut_into_processes_and_micro_batches_equals_plain_torch_where_stock_lightning_does_not() -> None:
    errors = measure()
    print("\nLargest relative error of a final weight or buffer, by processes x micro-batches")
    print(f"{'':26}{'float32':>22}{'float64':>24}\n{'':26}" + f"{'ours':>12}{'stock':>12}" * 2)
    for name in TASKS:
        for split in SPLITS:
            found = [errors[name, *split, dtype] for dtype in BOUNDS]
            print(f"{name:20}{split[0]} x {split[1]} " + "".join(f"{value:12.0e}" for pair in found for value in pair))
    for (name, world_size, micro_batches, dtype), (ours, stock_error) in errors.items():
        row = f"{name}, {world_size} x {micro_batches}, {dtype}"
        assert ours <= BOUNDS[dtype], row
        if (world_size, micro_batches) == (1, 1):
            assert stock_error <= BOUNDS[dtype], "uncut, stock Lightning is right"
        else:
            assert stock_error > 1e-3, row
