"""A run on any number of devices equals, to the bit, the run on one device with the same micro-batches.

One SHA-256 of all weights and buffers for each row of the table: a task, a precision and a number of micro-batches in
an update, on 1 to 4 processes, undisturbed, and stopped in mid-epoch and resumed on another number of processes. Beside
it are the hashes of stock Lightning, which gives another one for each number of processes.

The tasks have what depends on a split elsewhere: BatchNorm, a user's `F.dropout` and `torch.randn`, layers that
unfreeze, a moving average with BatchNorm statistics of its own, clipping, warm-up, parameters that some micro-batches
do not use, sentences of unequal length, a fused optimizer, and an update whose last micro-batch is short.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.freezing import FreezeLayers
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl, micro_batch_seed, seed_generators
from callbacks.step_metrics import TrainLoss
from callbacks.warmup_lr import WarmupLR
from callbacks.weight_averaging import WeightAveraging
from datamodules.loading.loaders import TrainLoader
from tests.end_to_end.test_exact_resume import hash_of
from tests.support.ranks import run_ranks
from tests.support.tables import PADDING, image_network, loss_of, noisy_images, quiet_trainer, sentences

BATCH_SIZE, EPOCHS, SAMPLES = 4, 2, 90
UPDATES = {4: 16, 5: 18, 12: 48}
"""Samples of an update by the number of its micro-batches: the last one has 2 of 4 samples where there are 5."""
STOP = 3
"""Updates before a run is stopped, within an epoch."""


class Row(NamedTuple):
    task: str
    precision: Any
    micro_batches: int


ROWS = [Row(*each) for each in itertools.product(("images", "sentences"), ("32-true", "bf16-mixed"), UPDATES)]
FEW = [Row("images", "32-true", 5), Row("images", "bf16-mixed", 4), Row("sentences", "32-true", 12)]


class Images(pl.LightningModule):
    """BatchNorm, noise of functions, and a layer that every other micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.sometimes = image_network().float(), nn.Linear(1, 5)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        inputs, targets = batch
        logits = self(F.dropout(inputs, 0.1) + 0.1 * torch.randn_like(inputs))
        if len(targets) and int(targets[0]) % 2:
            logits = logits + self.sometimes(inputs.new_ones(1))
        loss = loss_of(logits, targets, reduction="sum") / max(len(targets), 1)
        return {"loss": loss, "count": len(targets), "correct": (logits.argmax(1) == targets).sum()}

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


class Sentences(pl.LightningModule):
    """A mean over tokens of sentences of unequal length, by a recurrent network with dropout between its layers."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.fused = fused
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(8, 5)
        self.network = nn.GRU(6, 8, num_layers=2, dropout=0.2, batch_first=True)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        tokens, targets = batch
        logits, count = self.head(self.network(self.embedding(tokens))[0]), (targets != PADDING).sum()
        return {"loss": loss_of(logits, targets, reduction="sum") / count.clamp(min=1), "count": count}

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=self.fused)


class Stop(pl.Callback):
    """Ends a run within an epoch, after the checkpoint of its update."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= STOP


class SeedBatches(pl.Callback):
    """The noise of `SeedControl`, in Lightning's own loop."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        seed_generators(1)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        number = batch_idx * trainer.world_size + trainer.global_rank
        seed_generators(micro_batch_seed(1, trainer.current_epoch, number))


def train(
    row: Row,
    world_size: int,
    *more: pl.Callback,
    ours: bool = True,
    ckpt_path: Path | None = None,
    on: Mapping[str, Any] | None = None,
) -> str:
    """A run of a row: the hash of its end, and what it has logged; `on` are the Trainer's arguments for a device."""
    options = dict(on or {})
    if world_size > 1:
        options["strategy"] = DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")
    size = UPDATES[row.micro_batches]
    callbacks: list[pl.Callback] = []
    if ours:
        callbacks += [SeedControl(1), GradientAccumulation(global_batch_size=size), WarmupLR("5 steps"), TrainLoss()]
        if row.task == "images":
            callbacks += [FreezeLayers("network.1", unfreeze={"network.0": "4 steps"}), WeightAveraging(ema=0.9)]
    else:
        options["accumulate_grad_batches"] = -(-row.micro_batches // world_size)
        callbacks.append(SeedBatches())
    # Lightning does not clip for a fused optimizer under automatic mixed precision.
    model = Images() if row.task == "images" else Sentences(fused=row.precision == "32-true")
    settings = {"max_epochs": EPOCHS, "precision": row.precision, "gradient_clip_val": 0.5} | options
    trainer = quiet_trainer(*callbacks, *more, world_size=world_size, **settings)
    inputs, targets = noisy_images(SAMPLES) if row.task == "images" else sentences(SAMPLES)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    loader = TrainLoader(inputs, targets, torch.arange(SAMPLES), BATCH_SIZE, 1, trainer.global_rank, world_size)
    trainer.fit(model, loader, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return f"{hash_of(model)[:16]} {float(trainer.callback_metrics.get('train/loss_epoch', 0.0)).hex()}"


def checkpoint_name(row: Row, world_size: int) -> str:
    return f"{row.task}-{row.precision}-{row.micro_batches}-{world_size}"


def set_threads(threads: int | None) -> None:
    """Set the number of threads as a program of a user does; None leaves the one thread of `run_ranks`."""
    if threads is not None:
        torch.set_num_threads(threads)


def first_life(world_size: int, rows: Sequence[Row], threads: int | None, folder: Path) -> dict[Row, tuple[str, str]]:
    """Each row undisturbed, by ours and of all rows by stock Lightning; and a part of it, which leaves a checkpoint."""
    set_threads(threads)
    found = {}
    for row in rows:
        found[row] = train(row, world_size), train(row, world_size, ours=False) if rows == ROWS else ""
        saves = ExactCheckpoint(folder, filename=checkpoint_name(row, world_size), every_n_train_steps=STOP)
        train(row, world_size, saves, Stop())
    return found


def second_life(world_size: int, before: int, rows: Sequence[Row], threads: int | None, folder: Path) -> dict[Row, str]:
    """Each row from the checkpoint of another number of processes."""
    set_threads(threads)
    saves = ExactCheckpoint(folder / "second")
    paths = {row: folder / f"{checkpoint_name(row, before)}.ckpt" for row in rows}
    return {row: train(row, world_size, saves, ckpt_path=path) for row, path in paths.items()}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("rows", "others", "threads"),
    [
        (FEW, {1: 2, 2: 4, 4: 1}, None),
        (FEW[:2], {1: 2, 2: 1}, 2),
        pytest.param(ROWS, {1: 3, 2: 4, 3: 2, 4: 1}, None, marks=pytest.mark.slow),
    ],
    ids=["few", "2 threads", "all"],
)
def test_a_run_has_one_hash_on_any_number_of_devices(rows, others, threads, tmp_path) -> None:
    """`others` has the number of processes of a first life by that of the second.

    Where the program sets the threads, OMP_NUM_THREADS does not exist, and Lightning's launcher would set others.
    """

    def run_each(life: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        return run_ranks(life, world, world, *args, rows, threads, tmp_path, timeout=600, sets_threads=threads is None)

    whole = {world: run_each(first_life, world) for world in others}
    resumed = {world: run_each(second_life, world, before) for world, before in others.items()}
    print(f"\nSHA-256 after {EPOCHS} epochs on 1 to 4 processes, resumed or not; then stock Lightning's on each")
    wrong = []
    for row in rows:
        ours = {rank[row][0] for world in others for rank in whole[world]}
        ours |= {rank[row] for world in others for rank in resumed[world]}
        stock = {world: whole[world][0][row][1].partition(" ")[0] for world in others}
        name = f"{row.task}, {row.precision}, {row.micro_batches} micro-batches"
        print(f"{name:42}{' | '.join(sorted(ours))}   {' '.join(value[:6] for value in stock.values())}")
        wrong += [name] * (len(ours) > 1 or (rows == ROWS and len({*stock.values()}) < 3))
    assert not wrong, wrong
