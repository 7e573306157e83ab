"""What `TrainingMonitor` logs are the norms of a plain computation, however the run is split, scaled or clipped."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.training_monitor import TrainingMonitor
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import CLASSES, QUIET, Tiny, loss_of, noisy_images, on_ranks, silence

SETTINGS = QUIET | {"max_epochs": 1, "enable_progress_bar": False, "enable_checkpointing": False}
IMAGES, TARGETS = noisy_images(16)
NAMES = ("gradient_norm", "gradient_norm_clipped", "update_to_weight_ratio")


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(25, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    layers[2].requires_grad_(False)
    return layers.double()


def sgd(parameters: Any, lr: float = 0.5, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr, **settings)


class Records(pl.Callback):
    """What the monitor has logged after each batch."""

    def __init__(self, monitor: TrainingMonitor) -> None:
        self.monitor, self.rows = monitor, [{}]

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        values = {name.removeprefix("monitor/"): value for name, value in self.monitor.values.items()}
        if values != self.rows[-1]:
            self.rows.append(values)


def fit(
    module: pl.LightningModule, loader: Any, *callbacks: pl.Callback, every: int = 1, **options: Any
) -> list[dict[str, float]]:
    """What is logged."""
    silence()
    monitor = TrainingMonitor(groups=True, every=every)
    records = Records(monitor)
    pl.Trainer(callbacks=[*callbacks, monitor, records], **SETTINGS | options).fit(module, loader)
    return records.rows[1:]


def batches(size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES, TARGETS), size)


def plain_norms(clip: Callable[[list[Tensor]], Any] | None = None, size: int = 8, lr: float = 0.5) -> list[list[float]]:
    """The three norms of each update of a plain PyTorch loop."""
    layers, rows = network(), []
    parameters = [p for p in layers.parameters() if p.requires_grad]
    for images, targets in zip(IMAGES.split(size), TARGETS.split(size), strict=True):
        gradients = list(torch.autograd.grad(loss_of(layers(images), targets), parameters))
        before, weights = norm(gradients), norm(parameters)
        if clip is not None:
            clip(gradients)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= lr * gradient
        rows.append([before, norm(gradients), lr * norm(gradients) / weights])
    return rows


def norm(tensors: list[Any]) -> float:
    return float(torch.cat([tensor.detach().flatten() for tensor in tensors]).norm())


def scale_to(length: float) -> Callable[[list[Tensor]], Any]:
    def clip(gradients: list[Tensor]) -> None:
        factor = min(1.0, length / norm(gradients))
        torch._foreach_mul_(gradients, factor)

    return clip


CLIPPING: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({}, None),
    "norm": ({"gradient_clip_val": 0.05}, scale_to(0.05)),
    "value": (
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        lambda gradients: torch._foreach_clamp_min_(torch._foreach_clamp_max_(gradients, 0.01) or gradients, -0.01),
    ),
}


@pytest.mark.parametrize("kind", CLIPPING)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_norms_are_those_of_a_plain_loop(kind: str, micro_batches: int) -> None:
    options, clip = CLIPPING[kind]
    rows = fit(Tiny(network(), sgd), batches(8 // micro_batches), GradientAccumulation(micro_batches), **options)
    expected = plain_norms(clip)
    assert len(rows) == len(expected) == 2
    for row, (before, after, ratio) in zip(rows, expected, strict=True):
        assert row["gradient_norm"] == pytest.approx(before, rel=1e-5)
        assert row.get("gradient_norm_clipped", after) == pytest.approx(after, rel=1e-5)
        assert ("gradient_norm_clipped" in row) == (kind != "none")
        assert row["update_to_weight_ratio"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_float16_are_logged_unscaled(fused: bool) -> None:
    def rows(plugins: list[Any]) -> list[dict[str, float]]:
        module = Tiny(network().float(), sgd, fused=fused)
        loader = DataLoader(TensorDataset(IMAGES.float(), TARGETS), 8)
        return fit(module, loader, plugins=plugins)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for with_scaler, without in zip(rows([MixedPrecision("16-mixed", "cpu", scaler)]), rows([]), strict=True):
        assert with_scaler["gradient_norm"] == pytest.approx(without["gradient_norm"], rel=0.01)
        assert with_scaler["update_to_weight_ratio"] == pytest.approx(without["update_to_weight_ratio"], rel=0.01)


def test_an_update_that_the_scaler_skips_changes_no_weight() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    loader = DataLoader(TensorDataset(IMAGES.float(), TARGETS), 8)
    first = fit(Tiny(network().float(), sgd), loader, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])[0]
    assert first["update_to_weight_ratio"] == 0


def test_norms_of_groups_add_up_and_have_their_names() -> None:
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        weights, biases = ([p for p in parameters if p.requires_grad][part::2] for part in (0, 1))
        return torch.optim.SGD([{"params": weights, "name": "weights"}, {"params": biases}], lr=0.1)

    class Groups(Tiny):
        def configure_optimizers(self) -> Any:
            return two_groups(list(self.parameters()))

    (row, _) = fit(Groups(network(), sgd), batches(8))
    both = row["gradient_norm/weights"] ** 2 + row["gradient_norm/1"] ** 2
    assert row["gradient_norm"] ** 2 == pytest.approx(both, rel=1e-5)


def test_lbfgs_and_sparse_gradients_are_measured() -> None:
    (row, _) = fit(Tiny(network(), torch.optim.LBFGS, max_iter=3), batches(8))
    assert min(row["gradient_norm"], row["update_to_weight_ratio"]) > 0
    tokens = torch.randint(11, (16, 4), generator=torch.Generator().manual_seed(1))
    rows = {}
    for sparse in (False, True):
        torch.manual_seed(1)
        embedding = nn.Sequential(nn.Embedding(11, 6, sparse=sparse), nn.Flatten(), nn.Linear(24, CLASSES))
        loader = DataLoader(TensorDataset(tokens, TARGETS), 8)
        rows[sparse] = [[row[name] for name in NAMES[::2]] for row in fit(Tiny(embedding, sgd), loader)]
    assert torch.allclose(torch.tensor(rows[True]), torch.tensor(rows[False]))


class Manual(Tiny):
    """Two optimisers that step in each batch, whose gradients are zeroed after the step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.manual_backward(loss_of(self.network(batch[0]), batch[1]))
            optimizer.step()
            self.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.network[i].parameters(), lr=0.1) for i in (1, 4)]


def test_all_optimisers_of_a_manual_step_are_measured() -> None:
    (row,) = fit(Manual(network(), sgd), batches(8), every=4)
    assert min(row["gradient_norm"], row["update_to_weight_ratio"]) > 0


@pytest.mark.parametrize(("every", "logged_after"), [(3, [3, 6, 9, 12, 15]), (10, [8, 10]), (20, [8, 16])])
def test_the_end_of_an_interval_or_of_an_epoch_without_one_is_logged(every: int, logged_after: list[int]) -> None:
    steps: list[int] = []

    class Steps(TrainingMonitor):
        def _log(self, trainer: pl.Trainer) -> None:
            steps.append(trainer.global_step)
            super()._log(trainer)

    silence()
    callbacks = [GradientAccumulation(2), Steps(every=every)]
    pl.Trainer(callbacks=callbacks, **SETTINGS | {"max_epochs": 2}).fit(Tiny(network(), sgd), batches(1))
    assert steps == logged_after


def on_rank(world_size: int, strategy: str) -> list[list[float]]:
    class Sharded(Tiny):
        def configure_model(self) -> None:
            if strategy == "fsdp2":
                fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    options = on_ranks(world_size)
    if strategy == "fsdp2":
        options["strategy"] = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    rank = int(os.environ.get("RANK", "0"))
    loader = TrainLoader(IMAGES, TARGETS, torch.arange(16), 8 // world_size, 1, rank, world_size, shuffle=False)
    rows = fit(Tiny(network(), sgd) if strategy == "ddp" else Sharded(network(), sgd), loader, **options)
    return [[row["gradient_norm"], row["update_to_weight_ratio"]] for row in rows]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_rank_logs_the_norms_of_the_whole_update(strategy: str) -> None:
    first, second = run_ranks(on_rank, 2, 2, strategy)
    assert first == second
    expected = torch.tensor(plain_norms())[:, ::2]
    assert torch.allclose(torch.tensor(first), expected.to(torch.float32), rtol=1e-4)


class Slow:
    """A loader that takes 10 ms for each batch."""

    def __iter__(self) -> Iterator[Any]:
        for batch in batches(2):
            time.sleep(0.01)
            yield batch


class SlowStep(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def test_the_share_of_the_peak_is_the_flops_of_all_batches_over_the_time_of_the_steps() -> None:
    class Peak(TrainingMonitor):
        def _log(self, trainer: pl.Trainer) -> None:
            super()._log(trainer)
            rows.append(self.values)

    rows: list[dict[str, float]] = []
    silence()
    module = SlowStep(network(), sgd)
    pl.Trainer(callbacks=[Peak(every=8, peak_flops=1e15)], **SETTINGS).fit(module, batches(2))
    # Two layers train: the first needs no gradient of its input, and the frozen one between them none of its weights.
    multiply_adds = 2 * (2 * 25 * 8 + 2 * 8 * 8 + 3 * 8 * CLASSES)
    seconds = 2 * multiply_adds * 8 / (rows[0]["monitor/mfu"] * 1e15)
    assert 8 * 0.01 < seconds < 8 * 0.1
    assert "monitor/mfu" not in fit(module, batches(2))[0]


def test_the_wait_for_data_is_told_from_the_step() -> None:
    (waits,), (computes,) = (
        fit(Tiny(network(), sgd), Slow(), every=8),
        fit(SlowStep(network(), sgd), batches(2), every=8),
    )
    assert computes["data_wait"] < 0.4 < 0.6 < waits["data_wait"] <= 1


def test_histograms_are_written_every_n_updates_and_change_nothing(tmp_path: Path) -> None:
    weights = []
    for monitors in ([], [TrainingMonitor(groups=True, histogram_every=3, every=1)]):
        module, logger = Tiny(network(), sgd), TensorBoardLogger(tmp_path, name=None, version=str(len(monitors)))
        settings = SETTINGS | {"logger": logger, "gradient_clip_val": 0.05}
        pl.Trainer(callbacks=monitors, **settings).fit(module, batches(2))
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    events = EventAccumulator(str(tmp_path / "1"), {"histograms": 0})
    events.Reload()
    names = {f"updates_{kind}/network.{name}" for kind in ("weights", "gradients") for name in ("1.weight", "4.bias")}
    assert names <= set(events.Tags()["histograms"])
    assert [event.step for event in events.Histograms("updates_weights/network.1.weight")] == [2, 5]
