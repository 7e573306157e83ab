"""A rank without a micro-batch in an update computes the first one, and nothing of it counts."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, R2Score
from torchmetrics.classification import BinaryPrecision, BinaryRecall

from callbacks import GradientAccumulation, SeedControl, SyncBN
from callbacks.lib.update_step import weighted_gradients
from datamodules.loading.loaders import TrainLoader
from tests.callbacks.test_updates import LR, Line, Logging, Normalized, samples, weights
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer


def _epoch_mean(world_size: int) -> float:
    """The mean loss of an epoch of 5 micro-batches in updates of 2, which ends with a stand-in on one rank."""
    inputs, targets = samples(10)
    model = Logging(on_epoch=True, on_step=False, sync_dist=True)
    nn.init.zeros_(model.network.weight)  # type: ignore[arg-type]
    nn.init.zeros_(model.network.bias)  # type: ignore[arg-type]
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.0)  # type: ignore[method-assign]
    trainer = quiet_trainer(GradientAccumulation(global_batch_size=4), world_size=world_size)
    loader = TrainLoader(inputs, targets, torch.arange(10), 2, 1, trainer.global_rank, world_size)
    trainer.fit(model, loader)
    return float(trainer.callback_metrics["loss"])


def test_what_a_stand_in_logs_does_not_count() -> None:
    wanted = float((samples(10)[1] ** 2).mean())
    for found in [_epoch_mean(1), *run_ranks(_epoch_mean, 2, 2)]:
        assert found == pytest.approx(wanted, rel=1e-9)


def _log_of_stand_ins(world_size: int) -> float:
    """Two epochs of one micro-batch, in which a rank computes nothing else than a stand-in."""
    model = Logging(on_epoch=True, on_step=False, sync_dist=True)
    trainer = quiet_trainer(GradientAccumulation(global_batch_size=4), world_size=world_size, max_epochs=2)
    loader = TrainLoader(*samples(2), torch.arange(2), 2, 1, trainer.global_rank, world_size)
    trainer.fit(model, loader)
    return float(trainer.callback_metrics["loss"])


def test_a_rank_of_stand_ins_only_keeps_no_other_waiting() -> None:
    wanted = pytest.approx(_log_of_stand_ins(1), rel=1e-12)
    assert run_ranks(_log_of_stand_ins, 2, 2, timeout=60) == [wanted, wanted]


class AtTheEnd(Line):
    """Logs and measures in a hook of the update."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for output in outputs.get("micro_batches", [outputs]) or [{"loss": torch.tensor(100.0)}]:
            self.mean.update(output["loss"])
            self.log("sum", output["loss"], on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("mean", self.mean, on_step=False, on_epoch=True)


def _at_the_end(world_size: int) -> dict[str, float]:
    """Of an epoch of 4 micro-batches in updates of 3: two of three ranks end it with a stand-in."""
    trainer = quiet_trainer(GradientAccumulation(global_batch_size=6), world_size=world_size)
    loader = TrainLoader(*samples(8), torch.arange(8), 2, 1, trainer.global_rank, world_size, shuffle=False)
    trainer.fit(AtTheEnd(), loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_stand_in_counts_in_no_hook_after_the_update() -> None:
    assert run_ranks(_at_the_end, 3, 3) == [pytest.approx(_at_the_end(1), rel=1e-6)] * 3


class Explained(Line):
    """Computes a metric at an epoch's end, whose state has another shape before its first update."""

    def __init__(self) -> None:
        super().__init__()
        self.score = R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.score.update(self.network(batch[0]).flatten(), batch[1].flatten())
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("score", self.score.compute())


def _explained(world_size: int) -> float:
    """Of an epoch of one update of two micro-batches: the last of three ranks computes a stand-in only."""
    trainer = quiet_trainer(GradientAccumulation(global_batch_size=6), world_size=world_size)
    loader = TrainLoader(*samples(4), torch.arange(4), 2, 1, trainer.global_rank, world_size, shuffle=False)
    trainer.fit(Explained(), loader)
    return float(trainer.callback_metrics["score"])


def test_a_rank_of_stand_ins_takes_part_in_a_metric_of_its_shape() -> None:
    assert run_ranks(_explained, 3, 3, timeout=300) == [pytest.approx(_explained(1), rel=1e-6)] * 3


class InPlace(Metric):
    """The sum of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")

    def update(self, values: Tensor) -> None:
        self.total += values.sum()

    def compute(self) -> Tensor:
        return self.total


class Measured(Line):
    """Logs metrics of torchmetrics of what it has trained on; the last two share a state."""

    def __init__(self) -> None:
        super().__init__()
        self.total = InPlace()
        self.all = CatMetric()
        self.both = MetricCollection([BinaryPrecision(), BinaryRecall()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        targets = batch[1]
        self.total.update(targets)
        self.all.update(targets)
        self.both.update(batch[0][:, :1].sigmoid(), targets > 0)
        self.log("total", self.total, on_step=False, on_epoch=True)
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        both = self.both.compute()
        self.log("all", self.all.compute().sum())
        self.log_dict(both)


def _metrics(world_size: int, rank_count: int) -> dict[str, float]:
    """Of an epoch of 5 micro-batches in updates of 4."""
    model = Measured()
    trainer = quiet_trainer(GradientAccumulation(global_batch_size=8), world_size=world_size)
    loader = TrainLoader(*samples(10), torch.arange(10), 2, 1, trainer.global_rank, world_size)
    trainer.fit(model, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_metrics_count_no_prediction_of_a_stand_in() -> None:
    wanted = pytest.approx(_metrics(1, 1), rel=1e-6)
    assert run_ranks(_metrics, 2, 2, 2) == [wanted, wanted]


class Manual(Line):
    """Optimizes manually; its parameters learn within its `training_step` only, as those of a GAN's discriminator."""

    automatic_optimization = False

    def on_train_start(self) -> None:
        self.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.requires_grad_(True)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.requires_grad_(False)


def _without_accumulation(world_size: int, rank_count: int, kind: type[Line]) -> list[Tensor]:
    """An update of each rank's micro-batch; the last one of the epoch has fewer micro-batches than ranks."""
    model = kind()
    callbacks: list[pl.Callback] = [SyncBN()] if kind is Normalized else [SeedControl(1)]
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=LR)  # type: ignore[method-assign]
    trainer = quiet_trainer(*callbacks, world_size=world_size)
    rows = torch.arange(4 * (rank_count - 1))
    loader = TrainLoader(*samples(12), rows, 4, 1, trainer.global_rank, world_size, shuffle=False)
    trainer.fit(model, loader)
    return weights(model)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", [Line, Normalized, Manual])
def test_a_stand_in_counts_for_nothing_without_accumulation(ranks: int, kind: type[Line]) -> None:
    model = kind()
    inputs, targets = samples(12)
    model.loss((inputs[: 4 * (ranks - 1)], targets[: 4 * (ranks - 1)])).backward()
    wanted = [parameter.detach() - LR * parameter.grad for parameter in model.parameters()]  # type: ignore[operator]
    for found in run_ranks(_without_accumulation, ranks, ranks, ranks, kind):
        for mine, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)


def test_gradients_of_complex_parameters_are_weighted() -> None:
    model = nn.ParameterList([torch.ones(2), torch.ones(2, dtype=torch.complex64)])
    with weighted_gradients(model, 0.25):
        sum(parameter.abs().sum() for parameter in model).backward()  # type: ignore[union-attr]
    assert [parameter.grad.abs().tolist() for parameter in model] == [[0.25, 0.25]] * 2
