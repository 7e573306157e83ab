"""What a run is combined of in the table of combinations: its factors, and a Trainer for each row of it.

The data are 29 samples (28 where a stock sampler would pad them), 8 to an update, so that an epoch has three updates
and a short one. A stop falls into the second update of the second epoch, and into the middle of its window.
"""

import contextlib
import copy
import itertools
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.freezing import FreezeLayers
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.signals import Preempted
from callbacks.preemption import Preemption
from callbacks.rank_consistency import RankConsistency
from callbacks.seed_control import SeedControl
from callbacks.step_metrics import FiniteWeights, TrainLoss
from callbacks.sync_bn import SyncBN
from callbacks.warmup_lr import WarmupLR
from datamodules.errors import UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.tables import CLASSES, PADDING, loss_of, noisy_images, quiet_trainer, sentences

GLOBAL_BATCH, EPOCHS, WARMUP = 8, 3, 5
SAMPLES, EVEN_SAMPLES = 29, 28
UPDATES = 4
"""In an epoch; the last one is short."""
STOP_EPOCH, STOP_UPDATE = 1, 1
STOP_STEPS = STOP_EPOCH * UPDATES + STOP_UPDATE + 1

ON_OFF = ("off", "on")
FACTORS: dict[str, tuple[str, ...]] = {
    "split": ("1x1", "1x4", "2x1", "2x2"),
    "stop": ("to the end", "max_steps", "EarlyStopping", "SIGTERM to one rank", "an exception"),
    "resumed": ("no", "as before", "on another split"),
    "optimizer": ("SGD", "AdamW fused"),
    "schedule": ("none", "StepLR", "OneCycleLR", "ReduceLROnPlateau"),
    "clipping": ("none", "norm"),
    "loader": ("TrainLoader", "DataLoader with DistributedSampler", "DataLoader"),
    "network": ("BatchNorm", "tokens"),
    "accumulate": ("steps", "global_batch_size"),
    "WarmupLR": ON_OFF,
    "SyncBN": ON_OFF,
    "SeedControl": ON_OFF,
    "FreezeLayers": ON_OFF,
    "Preemption": ON_OFF,
    "watchers": ON_OFF,  # TrainLoss, RankConsistency, FiniteWeights.
}
"""The values of each factor, the simplest one first."""

PLAIN = {factor: values[0] for factor, values in FACTORS.items()} | {"dtype": "float64"}
OTHER_SPLIT = {"1x4": "2x2", "2x1": "1x2", "2x2": "1x4"}

Settings = Mapping[str, str]


class Cut(NamedTuple):
    """Into how many processes and micro-batches an update is cut."""

    processes: int
    micro_batches: int


def cut_of(settings: Settings, resumed: bool = False) -> Cut:
    """The split of the first life of a run, or of the second."""
    split = settings["split"]
    if resumed and settings["resumed"] == "on another split":
        split = OTHER_SPLIT.get(split, split)
    processes, micro_batches = map(int, split.split("x"))
    return Cut(processes, micro_batches)


# What a user writes: a network, a data set, an optimizer, a schedule


def dtype_of(settings: Settings) -> torch.dtype:
    """That of weights and inputs; float64 unless a row says otherwise."""
    return getattr(torch, settings.get("dtype", "float64"))


def layers(settings: Settings) -> tuple[nn.Module, nn.Module]:
    """A backbone and a head. The convolution has no bias, since BatchNorm takes it out again."""
    torch.manual_seed(3)
    dtype = dtype_of(settings)
    if settings["network"] == "BatchNorm":
        backbone = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten())
        return backbone.to(dtype), nn.Linear(4 * 3 * 3, CLASSES).to(dtype)
    backbone = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh())
    return backbone.to(dtype), nn.Linear(8, CLASSES).to(dtype)


def samples(settings: Settings) -> tuple[Tensor, Tensor]:
    """Inputs and targets: those to train on, then those to validate."""
    if settings["network"] == "tokens":
        return sentences(SAMPLES + 6)
    inputs, targets = noisy_images(SAMPLES + 6)
    return inputs.to(dtype_of(settings)), targets


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, fused=True),
}


def schedule_of(name: str, optimizer: torch.optim.Optimizer) -> tuple[Any, str]:
    """A schedule and its interval; None where there is none."""
    if name == "StepLR":
        return lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "epoch"
    if name == "OneCycleLR":
        peak = 2 * optimizer.param_groups[0]["lr"]
        return lr_scheduler.OneCycleLR(optimizer, peak, total_steps=EPOCHS * UPDATES, cycle_momentum=False), "step"
    if name == "ReduceLROnPlateau":
        # The loss falls, so that waiting for it to rise ends at once, after each validation but the first.
        return lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0), "epoch"
    return None, "step"


class Learner(pl.LightningModule):
    """The mean loss over a batch, and the number of targets; `stops_at`: where its metric asks for the end."""

    def __init__(self, settings: Settings, stops_at: tuple[int, int] | None) -> None:
        super().__init__()
        self.settings, self.stops_at = settings, stops_at
        self.backbone, self.head = layers(settings)

    @override
    def forward(self, inputs: Any) -> Tensor:
        return self.head(self.backbone(inputs))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        loss = loss_of(self(inputs), targets)
        return {"loss": loss, "count": (targets != PADDING).sum()} if targets.dim() > 1 else loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", loss_of(self(inputs), targets), sync_dist=True)
        place = self.current_epoch, self.trainer.fit_loop.batch_idx
        self.log("stop", float(self.stops_at is not None and place >= self.stops_at), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.settings["optimizer"]](self.parameters())
        scheduler, interval = schedule_of(self.settings["schedule"], optimizer)
        if scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval, "monitor": "val_loss"},
        }


def loader_of(settings: Settings, cut: Cut, rank: int) -> Any:
    """The training loader of a rank."""
    inputs, targets = samples(settings)
    batch_size = GLOBAL_BATCH // cut.processes // cut.micro_batches
    even = inputs[:EVEN_SAMPLES], targets[:EVEN_SAMPLES]
    name = settings["loader"]
    if name == "DataLoader with DistributedSampler":
        sampler: Any = DistributedSampler(TensorDataset(*even), cut.processes, rank, seed=1)
        return DataLoader(TensorDataset(*even), batch_size, sampler=sampler)
    if name == "DataLoader":
        return DataLoader(TensorDataset(*even), batch_size)
    return TrainLoader(inputs, targets, torch.arange(SAMPLES), batch_size, 1, rank, cut.processes)


def validation_loader(settings: Settings) -> DataLoader:
    """A batch that every rank validates, so that they find the same."""
    inputs, targets = samples(settings)
    return DataLoader(TensorDataset(inputs[-6:], targets[-6:]), 6)


# How a run ends, and what is recorded of it


class Watch(pl.Callback):
    """Ends a run at a place, and records the learning rate of each update, as the optimizer used it."""

    def __init__(self, stop: str, stops_at: tuple[int, int] | None) -> None:
        self.stop, self.stops_at = stop, stops_at
        self.rates: dict[int, float] = {}

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) != self.stops_at:
            return
        if self.stop == "SIGTERM to one rank" and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.stop == "an exception":
            raise ZeroDivisionError

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.rates[trainer.global_step] = float(optimizer.param_groups[0]["lr"])


def callbacks_of_row(settings: Settings, cut: Cut, folder: Path, resumed: bool) -> list[pl.Callback]:
    """All but `SeedControl`, which is built before the module; what `EarlyStopping` has ended goes on without it."""
    steps, global_batch_size = (cut.micro_batches, None) if settings["accumulate"] == "steps" else (1, GLOBAL_BATCH)
    ours: dict[str, Callable[[], pl.Callback]] = {
        "WarmupLR": lambda: WarmupLR(f"{WARMUP} steps"),
        "SyncBN": SyncBN,
        "FreezeLayers": lambda: FreezeLayers(until="head", unfreeze={"backbone": "1 epochs"}),
        "Preemption": Preemption,
    }
    found: list[pl.Callback] = [GradientAccumulation(steps, global_batch_size)]
    found += [make() for name, make in ours.items() if settings[name] == "on"]
    if settings["watchers"] == "on":
        found += [TrainLoss(), RankConsistency(), FiniteWeights()]
    if settings["stop"] == "EarlyStopping" and not resumed:
        threshold: dict[str, Any] = {"mode": "max", "stopping_threshold": 0.5, "patience": 10**6}
        found.append(EarlyStopping("stop", check_on_train_epoch_end=False, **threshold))
    if settings["resumed"] != "no":
        found.append(ExactCheckpoint(folder, save_last=True, every_n_train_steps=1))
    return found


class Life(NamedTuple):
    """What is left of a run, or of a part of it.

    Attributes:
        rejected: why it was rejected; empty if it was not.
        failed: any other exception, and where it was raised.
        updates: how many have been made when it ended.
        weights: its parameters and buffers then.
        rates: the learning rate of each update.
    """

    rejected: str
    failed: str
    updates: int
    weights: dict[str, Tensor]
    rates: dict[int, float]


def live(settings: Settings, folder: Path, resumed: bool = False, on: Mapping[str, Any] | None = None) -> Life:
    """Train a row, in each process, until it stops; or resume it to its end; `on` are a Trainer's for a device."""
    cut = cut_of(settings, resumed)
    stopping = not resumed and settings["stop"] != "to the end"
    stops_at = (STOP_EPOCH, STOP_UPDATE) if stopping else None
    watch = Watch(settings["stop"], stops_at)
    model: Learner | None = None
    trainer: pl.Trainer | None = None
    rejected = failed = ""
    try:
        seeds = [SeedControl(seed=1)] if settings["SeedControl"] == "on" else []
        model = Learner(settings, stops_at)
        trainer = quiet_trainer(
            *seeds,
            *callbacks_of_row(settings, cut, folder, resumed),
            watch,
            world_size=cut.processes,
            max_epochs=EPOCHS,
            max_steps=STOP_STEPS if stopping and settings["stop"] == "max_steps" else -1,
            val_check_interval=1 if settings["stop"] == "EarlyStopping" else None,
            gradient_clip_val=0.3 if settings["clipping"] == "norm" else None,
            **copy.deepcopy(dict(on or {}))  # A Trainer changes its strategy.
            | {"use_distributed_sampler": settings["loader"] == "DataLoader"},
        )
        with contextlib.suppress(Preempted, ZeroDivisionError):
            trainer.fit(
                model,
                loader_of(settings, cut, trainer.global_rank),
                validation_loader(settings),
                ckpt_path=str(folder / "last.ckpt") if resumed else None,
                weights_only=True,
            )
    except UserError as error:
        rejected = f"{type(error).__name__}: {error}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        failed = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()} if model else {}
    return Life(rejected, failed, trainer.global_step if trainer else 0, weights, watch.rates)


def live_all(rows: Mapping[int, Settings], folder: Path, *options: Any) -> dict[int, Life]:
    """The first or second lives of rows by their numbers, in processes that start once; see `live`."""
    return {number: live(settings, folder / str(number), *options) for number, settings in rows.items()}


def groups(rows: Mapping[int, Settings], resumed: bool = False) -> Iterator[tuple[int, dict[int, Settings]]]:
    """Rows by their number of processes."""
    key = lambda item: cut_of(item[1], resumed).processes  # noqa: E731
    for processes, found in itertools.groupby(sorted(rows.items(), key=key), key):
        yield processes, dict(found)
