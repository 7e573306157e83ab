"""What the orders and decisions of a run depend on: a resumed run has it, or is rejected; the page lists the same."""

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import MeanMetric

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl
from callbacks.step_metrics import TrainLoss
from datamodules.errors import UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.tables import quiet_trainer

PAGE = Path(__file__).parents[3] / "docs/scaling/proofs.md"
BATCHES, EPOCHS = 4, 4
SAMPLES = 2 * BATCHES
NUMBERS = torch.arange(SAMPLES)
SCORES = [3.0, 1.0, 2.0, 2.5, 0.5, 0.7, 0.6, 0.4]


class Sized:
    def __len__(self) -> int:
        return SAMPLES


class Augmented(Sized, Dataset):
    """Samples that are augmented by the global generators; in workers that would depend on their number."""

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        return number, number / SAMPLES + torch.rand(()) + random.random() + np.random.rand()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return ((number, torch.tensor(number / SAMPLES)) for number in range(SAMPLES))


class Chunks(Sized, Sampler[int]):
    """A user's sampler, which draws while it is read."""

    def __iter__(self) -> Iterator[int]:
        for start in range(0, SAMPLES, BATCHES):
            yield from (start + torch.randperm(BATCHES)).tolist()


class RandomBatches:
    """A user's batch sampler, which draws from torch's global generator."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(SAMPLES).view(BATCHES, 2).tolist())


class OwnLoader(DataLoader[Any]):
    """A user's loader, whose order nobody else knows."""

    def __iter__(self) -> Any:
        return super().__iter__()


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), 2, shuffle=True, **options)


def own_loader(batch_size: int = 2) -> TrainLoader:
    return TrainLoader(NUMBERS, NUMBERS / SAMPLES, NUMBERS, batch_size, 1)


def with_worker(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), 2, num_workers=1, multiprocessing_context="fork", **options)


class Model(pl.LightningModule):
    """Logs a training mean and the score of each validation; its loss has noise, and its hooks change a buffer."""

    def __init__(self, row: "Row") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(()))  # An optimizer has no state of it.
        self.register_buffer("moving", torch.zeros(()))
        self.optimizer, self.schedule, self.makes_loader = row.optimizer, row.schedule, row.makes_loader
        self.metric = MeanMetric() if row.metric else None
        self.seen: dict[int, Any] = {}
        self.scores: list[float] = []

    def on_train_epoch_start(self) -> None:
        torch.rand(3)  # Shall not move the order that is drawn after it.

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.seen[self.trainer.fit_loop.total_batch_idx] = [numbers.tolist() for numbers, _ in batches]
        values = torch.cat([part for _, part in batches])
        loss = (self.weight - values - torch.randn(())).square().mean()
        self.log("train", loss, on_step=False, on_epoch=True)
        if self.metric is not None:
            self.metric.update(loss)
            self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.moving.lerp_(self.weight.detach().float(), 0.1)
        self.log("moving", self.moving, on_step=False, on_epoch=True)

    def on_validation_end(self) -> None:
        self.moving += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scores.append(SCORES[self.global_step // 2 % len(SCORES)])
        self.log("score", torch.tensor(self.scores[-1]))
        self.log("weight", self.weight.detach())

    def configure_optimizers(self) -> Any:
        assert not self.makes_loader or self.trainer.estimated_stepping_batches == EPOCHS * BATCHES
        optimizer = self.optimizer(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)} if self.schedule else optimizer


class Log(DummyLogger):
    """Keeps what is logged, with its step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int = 0) -> None:
        self.rows.append(
            (step, {name: value for name, value in metrics.items() if name != "metric" and "per_second" not in name})
        )


class Kill(pl.Callback):
    """Ends a run before an update, as kill -9 does: nothing is saved."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.after:
            raise ZeroDivisionError


class Row(NamedTuple):
    """A run cut with the loader `saved_with`, and resumed; `rejected` is why not; `makes_loader` makes it early."""

    cuts: tuple[int, ...]
    loader: Callable[[], Any] = shuffled
    callbacks: Callable[[], list[pl.Callback]] = list
    options: Mapping[str, Any] = MappingProxyType({})
    optimizer: Any = partial(torch.optim.SGD, momentum=0.9)
    schedule: Any = None
    monitor: str = "score"
    metric: bool = False
    best_every: int | None = None
    seeded: bool = True
    rejected: str = ""
    saved_with: Callable[[], Any] | None = None
    makes_loader: bool = False


def plateau(optimizer: torch.optim.Optimizer, interval: str = "step", monitor: str = "score") -> dict[str, Any]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return {"scheduler": scheduler, "interval": interval, "monitor": monitor, "strict": False}


def stopping(monitor: str = "score", patience: int = 1, **options: Any) -> Callable[[], list[pl.Callback]]:
    return lambda: [EarlyStopping(monitor, patience=patience, **options)]


STOCK: list[Callable[[], Any]] = [
    shuffled,
    lambda: DataLoader(Augmented(), 2, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    lambda: DataLoader(Augmented(), 2, sampler=DistributedSampler(Augmented(), 1, 0)),
]
FOREIGN: list[Callable[[], Any]] = [
    lambda: DataLoader(Stream(), 2),
    lambda: DataLoader(Augmented(), 2, sampler=Chunks()),
    lambda: DataLoader(Augmented(), batch_sampler=RandomBatches()),  # type: ignore[arg-type]
    lambda: OwnLoader(Augmented(), 2),
    lambda: {"a": shuffled(), "b": DataLoader(Augmented(), 2)},
    lambda: {"a": own_loader(), "b": shuffled()},
    lambda: {"a": own_loader(), "b": own_loader()},
]
END_OF_EPOCH = "resume from an epoch's end"
EVERY_3 = {"val_check_interval": 3, "check_val_every_n_epoch": None}
SECOND_EPOCHS = {"check_val_every_n_epoch": 2}
SWA = [Row((9,), callbacks=lambda: [StochasticWeightAveraging(0.5, swa_epoch_start=1, annealing_epochs=2)])]
if not hasattr(SWALR, "_set_anneal_func"):
    SWA = []  # torch 2.9 keeps a function in the schedule's state, which no checkpoint of plain data holds.
ROWS: dict[str, list[Row]] = {
    "position in a loader with `state_dict`": [
        *(Row((4, 6), own_loader, makes_loader=made) for made in (False, True)),
        Row((6,), partial(own_loader, 4), rejected="add GradientAccumulation", saved_with=own_loader),
    ],
    "order of one `DataLoader` with torch's samplers": [
        *(Row(cuts, loader) for loader in STOCK for cuts in ((1,), (3, 5, 7, 8))),
        Row((6,), lambda: DataLoader(Augmented(), 4), rejected="add GradientAccumulation", saved_with=shuffled),
    ],
    "order of other loaders, samplers, data sets": [
        Row(cuts, loader, rejected=rejected)
        for loader in FOREIGN
        for cuts, rejected in (((4,), ""), ((5,), f"the order of .* cannot be repeated.*{END_OF_EPOCH}"))
    ],
    "generators of loaders, persistent workers": [
        *(Row((n,), lambda: shuffled(generator=torch.Generator()), rejected="leave it out") for n in (4, 6)),
        Row((6,), lambda: with_worker(generator=torch.Generator())),
        Row((6,), lambda: with_worker(persistent_workers=True)),
    ],
    "loaders that are made every n epochs": [
        Row((6,), options={"reload_dataloaders_every_n_epochs": 2}, rejected="those that were made for epoch 1"),
        Row((10,), options={"reload_dataloaders_every_n_epochs": 2}),
    ],
    "random numbers": [Row((8,))],
    "gradients within an update": [Row((4,), callbacks=lambda: [GradientAccumulation(2)], options=EVERY_3)],
    "scores": [Row((9,), callbacks=stopping(strict=False, check_on_train_epoch_end=True), options=SECOND_EPOCHS)],
    "means of an epoch by `self.log`": [
        Row((6,), callbacks=stopping("train", patience=0, min_delta=0.2), monitor="train")
    ],
    "means of an epoch by torchmetrics": [
        Row((6,), metric=True),
        Row((6,), monitor="metric", metric=True, rejected=END_OF_EPOCH),
    ],
    "state of optimizers": [Row((6,), optimizer=torch.optim.NAdam)],  # It multiplies in float32, which torch casts.
    "counters of callbacks": [
        Row((7,), callbacks=lambda: [*stopping(patience=2)(), Timer({"hours": 1})]),
        Row((12,), callbacks=stopping()),
        Row((8,), callbacks=stopping(patience=99, stopping_threshold=0.6)),
    ],
    "a stop before `min_epochs`": [Row((7,), callbacks=stopping(), options={"min_epochs": 2, "val_check_interval": 2})],
    "schedules": [
        Row((5,), options={"val_check_interval": 2}, schedule=plateau),
        *(Row((4, 6), schedule=partial(plateau, interval="epoch", monitor=monitor)) for monitor in ("score", "train")),
        Row((4, 6), callbacks=lambda: [TrainLoss()], schedule=partial(plateau, monitor="train/loss")),
        *SWA,
    ],
    "best scores and files": [
        Row((10,), options={"val_check_interval": 2}),
        Row((3, 4), options=EVERY_3, best_every=2),
    ],
    "steps of loggers": [
        Row((7,), callbacks=lambda: [LearningRateMonitor("step")], options={"log_every_n_steps": 2}, schedule=plateau)
    ],
    "times between saves and validations": [
        Row((3,), callbacks=lambda: [GradientAccumulation(2)], options={"val_check_interval": {"microseconds": 1}})
    ],
}


def fit(
    row: Row,
    folder: Path,
    *more: pl.Callback,
    resumed_from: Path | None = None,
    interval: int = 1,
    saved_by: type[ModelCheckpoint] = ExactCheckpoint,
) -> tuple[dict[int, Any], Any]:
    """The samples of each batch; and updates, epochs, weight, rate, scores, best files, and logs after the last cut."""
    every = saved_by(folder, filename="{step}", every_n_train_steps=interval, save_top_k=-1)
    best = ExactCheckpoint(folder / "best", filename="{step}", monitor=row.monitor, every_n_train_steps=row.best_every)
    settings = {"max_epochs": EPOCHS, "logger": (log := Log())} | row.options
    trainer = quiet_trainer(*[SeedControl(1)] * row.seeded, *row.callbacks(), *more, every, best, **settings)
    model, validation = Model(row), DataLoader(TensorDataset(NUMBERS[:1]))
    with contextlib.suppress(ZeroDivisionError):
        trainer.fit(model, row.loader(), validation, ckpt_path=resumed_from, weights_only=True)
    if row.monitor == "score" and resumed_from is None and model.scores and not row.best_every:
        assert best.best_model_score == pytest.approx(min(model.scores)), "each score's weights were saved if the best"
    logged = [(step, metrics) for step, metrics in log.rows if step >= row.cuts[-1]]
    scores = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "metric"}
    files = best.best_model_score, Path(best.best_model_path).name, sorted(file.name for file in folder.glob("best/*"))
    rate = [(optimizer.param_groups[0]["lr"], len(optimizer.state)) for optimizer in trainer.optimizers]
    weights = model.weight.item(), model.moving.item()
    decided = trainer.global_step, trainer.current_epoch, weights, rate, scores, files, logged
    return model.seen, decided


@pytest.mark.parametrize(("name", "number"), [(name, n) for name, rows in ROWS.items() for n in range(len(rows))])
def test_a_resumed_run_decides_as_the_whole_one_or_is_rejected(name: str, number: int, tmp_path: Path) -> None:
    row, path, seen = ROWS[name][number], None, {}
    # Workers are started where they are rejected only: what is saved does not depend on them.
    first = row._replace(loader=row.saved_with or row.loader)
    for cut in row.cuts:
        # Lightning's callback saves wherever it is told to.
        saved_by = ModelCheckpoint if row.rejected and cut % BATCHES else ExactCheckpoint
        batches, _ = fit(first, tmp_path / "cut", Kill(cut), resumed_from=path, saved_by=saved_by)
        path = tmp_path / "cut" / f"step={cut}.ckpt"
        seen |= batches
    if row.rejected:
        with pytest.raises(UserError, match=row.rejected):
            fit(row, tmp_path / "cut", resumed_from=path)
        return
    # At another interval Lightning gives this run's callback none of its state back.
    batches, decided = fit(row, tmp_path / "cut", resumed_from=path, interval=2)
    assert (seen | batches, decided) == fit(row, tmp_path / "whole")
    assert list(tmp_path.glob("whole/best/*.ckpt")), "there was a score"


def test_a_stale_score_saves_nothing_until_the_next_validation(tmp_path: Path) -> None:
    _, decided = fit(Row((0,), options=EVERY_3, monitor="weight", best_every=2), tmp_path)
    score, name, _ = decided[5]
    assert score == torch.load(tmp_path / "best" / name)["state_dict"]["weight"]


def steps_in(folder: Path) -> list[int]:
    """The updates of the checkpoints in a folder."""
    return sorted(int(path.stem.partition("=")[2]) for path in folder.glob("step=*.ckpt"))


WAIT = "warning: checkpoints wait for the end of the epoch, except the best weights by a score, since "
STREAM = Row((0,), FOREIGN[0], options={"val_check_interval": 2})
RELOADED = Row((0,), options={"reload_dataloaders_every_n_epochs": 2})


@pytest.mark.parametrize(
    ("row", "steps", "problem"),
    [
        pytest.param(Row((0,)), [3, 6, 9, 12, 15], "", id="no wait"),
        pytest.param(STREAM, [4, 8, 12, 16], "the order of this DataLoader cannot be repeated", id="a loader"),
        pytest.param(Row((0,), monitor="metric", metric=True), [4, 8, 12, 16], "no checkpoint holds", id="a metric"),
        pytest.param(RELOADED, [3, 8, 9, 12, 16], "with reload_dataloaders_every_n_epochs=2", id="an old loader"),
    ],
)
def test_a_save_waits_for_the_epochs_end_where_none_resumes(
    row: Row, steps: list[int], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"every_n_train_steps": 5, "save_top_k": -1, "save_weights_only": True}
    weights = ExactCheckpoint(tmp_path / "weights", "{step}", **options)
    fit(row, tmp_path / "run", weights, interval=3)
    assert steps_in(tmp_path / "run") == steps
    assert steps_in(tmp_path / "weights") == [5, 10, 15], "weights alone are not resumed"
    assert caplog.text.count(WAIT + problem) == bool(problem)


def test_the_best_weights_wait_only_as_last_checkpoint(tmp_path: Path) -> None:
    for name, killer in (("killed", [Kill(3)]), ("whole", [])):
        scored = ExactCheckpoint(tmp_path / name, "{step}", monitor="score", save_last=True)
        options = {"val_check_interval": 2, "max_epochs": 1}
        fit(STREAM._replace(options=options, best_every=9), tmp_path / f"{name}, each", *killer, scored)
        assert steps_in(tmp_path / name) == [2]
    assert not (tmp_path / "killed" / "last.ckpt").exists()
    assert torch.load(tmp_path / "whole" / "last.ckpt", weights_only=True)["global_step"] == 4


def test_an_end_where_none_resumes_is_saved_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(STREAM._replace(options={"max_steps": 6}), tmp_path, interval=6)
    assert steps_in(tmp_path) == [6]
    assert caplog.text.count("the run ends within an epoch, and no run resumes from there, since the order of") == 1


def test_the_page_lists_what_the_table_shows() -> None:
    section = PAGE.read_text().split("## State that a resume restores")[1].split("\n## ")[0]
    assert re.findall(r"^\| (.*?) \|", section, re.MULTILINE)[1:] == list(ROWS)
