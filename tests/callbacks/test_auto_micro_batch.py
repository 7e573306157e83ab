"""A batch that runs out of memory is computed in pieces: the weights against runs that never ran out."""

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from callbacks import AutoMicroBatch, GradientAccumulation, SeedControl, SyncBN, TrainLoss, WarmupLR, stateless_dropout
from datamodules.errors import RunFailedError
from tests.support.out_of_memory import PHASES, OutOfMemoryPlant, Phase, data_limit
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

BATCH = 4
FITS = 2
QUIET_FIT: dict[str, Any] = {**QUIET, "enable_progress_bar": False, "enable_checkpointing": False}


class Tagger(Tiny):
    """Logs a mean over tokens, weighted by their number."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        logits = self.network(inputs)
        self.log("val_loss", loss_of(logits, targets), batch_size=int((targets != PADDING).sum()))
        return {"logits": logits}


def tagger() -> Tiny:
    """A network in float64 whose dropout draws by sample; batches hold unequal numbers of targets."""
    network = sentence_network().double()
    network.insert(2, nn.Dropout(0.3))
    return Tagger(stateless_dropout(network), torch.optim.AdamW, lr=0.02)


def fit(
    plant: pl.Callback | None,
    world_size: int = 1,
    module: Callable[[], Tiny] = tagger,
    data: tuple[Tensor, Tensor] | None = None,
    others: tuple[pl.Callback, ...] = (),
    auto: Any = None,
    **settings: Any,
) -> tuple[dict[str, Tensor], float, Any]:
    """Final weights and buffers, the last validation loss, and the callback, after two epochs."""
    silence()
    auto = auto or AutoMicroBatch()
    seeds = SeedControl(1)
    model, data = module(), TensorDataset(*(data if data is not None else sentences(14)))
    callbacks = [auto, seeds, *others, *([plant] if plant is not None else [])]
    given = {**QUIET_FIT, "use_distributed_sampler": True, "max_epochs": 2}
    trainer = pl.Trainer(callbacks=callbacks, **{**given, **on_ranks(world_size), **settings})
    trainer.fit(model, DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH))
    return dict(model.state_dict()), float(trainer.callback_metrics["val_loss"]), auto


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def rows_of_table(world_size: int) -> list[tuple[str, int, float, float, int | None, int | None]]:
    """Each phase and failing rank: the largest differences of weights and of the validation loss, and the pieces kept.

    The first row is of no failure, against a run without the callback.
    """

    def others() -> tuple[pl.Callback, ...]:
        return GradientAccumulation(2), WarmupLR("50%"), TrainLoss()

    expected, loss, _ = fit(None, world_size, others=others())
    plain, found, auto = fit(None, world_size, others=others(), auto=pl.Callback())
    rows: list[Any] = [("none", 0, largest_difference(plain, expected), abs(found - loss), None, None)]
    for phase in PHASES:
        for rank in range(world_size):
            plant = OutOfMemoryPlant(phase, {rank: FITS}, times=1 if phase in ("optimizer", "midway") else None)
            weights, found, auto = fit(plant, world_size, others=others())
            here = torch.distributed.get_rank() if world_size > 1 else 0
            assert bool(plant.failed) == (here == rank), (phase, rank)
            difference = largest_difference(weights, expected)
            rows.append((phase, rank, difference, abs(found - loss), auto.size, auto.evaluation_size))
    return rows


@pytest.mark.parametrize("world_size", [1, pytest.param(2), pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_at_any_phase_of_any_rank_leaves_the_weights_as_they_were_without_it(
    world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    by_rank = [rows_of_table(1)] if world_size == 1 else run_ranks(rows_of_table, world_size, world_size)
    with capsys.disabled():
        print(
            f"\n{world_size} device(s)\n| phase | failing rank | weights | validation | pieces |\n|---|--:|--:|--:|--:|"
        )
        for phase, rank, weights, loss, size, evaluation_size in by_rank[0]:
            print(f"| {phase} | {rank} | {weights:.1e} | {loss:.1e} | {size or evaluation_size or 'whole'} |")
    for rows in by_rank:
        for phase, _, weights, loss, size, evaluation_size in rows:
            cut = phase in ("forward", "backward")
            assert weights <= (1e-12 if cut or phase == "none" else 0.0)
            assert loss <= 1e-12
            assert size == (FITS if cut else None)
            assert evaluation_size in ((None, FITS) if phase == "validation" else (None,))


def images() -> Tiny:
    """BatchNorm, torch's dropout, a metric and a logged loss: all that an attempt may leave traces in."""
    return Scored(image_network(dropout=0.3).double(), torch.optim.SGD, lr=0.1, momentum=0.9)


class Scored(Tiny):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.total = SumMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.total.update(len(batch[0]))
        self.log("train_loss", loss := super().training_step(batch, batch_idx), on_epoch=True)
        self.log("sizes", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_attempt_that_failed_leaves_no_trace(phase: Phase) -> None:
    """Not in BatchNorm, random numbers, metrics or logs: all as where the batch was cut from the start, to the bit."""
    found = []
    for plant, size in ((OutOfMemoryPlant(phase, FITS), None), (None, FITS)):
        auto, sums = AutoMicroBatch(), []
        auto.size = size
        note = LambdaCallback(
            on_train_epoch_end=lambda trainer, module, sums=sums: sums.append(
                (float(module.total.compute()), {k: float(v) for k, v in trainer.callback_metrics.items()})
            )
        )
        with pytest.warns(UserWarning, match="BatchNorm normalises over the pieces") if plant else nullcontext():
            weights, _, _ = fit(plant, module=images, data=noisy_images(22), others=(note,), auto=auto)
        found.append((weights, sums))
    assert found[0][1] == found[1][1]
    assert found[0][1][0][0] == 22
    assert largest_difference(found[0][0], found[1][0]) == 0.0


def rank_with_large_samples() -> list[str]:
    plant = OutOfMemoryPlant("forward", {1: 0})
    with pytest.raises(RunFailedError) as error:
        fit(plant, 2, others=(GradientAccumulation(2),))
    return str(error.value).splitlines()


def test_a_sample_that_does_not_fit_ends_every_rank_with_one_line() -> None:
    first, second = run_ranks(rank_with_large_samples, 2)
    assert len(first) == len(second) == 1
    assert "out of memory with a single sample on another rank: pass a smaller network" in first[0]
    assert "Planted at forward" in second[0]


def unequal_batches() -> float:
    """Ranks with batches of 6 and of 3 samples, of which one cuts its own."""
    rank = int(os.environ["RANK"])
    results = []
    for plant in (None, OutOfMemoryPlant("backward", {0: 2})):
        silence()
        pl.seed_everything(1)
        model, size = tagger(), (6, 3)[rank]
        inputs, targets = sentences(18)
        data = TensorDataset(inputs[rank * 12 : rank * 12 + 2 * size], targets[rank * 12 : rank * 12 + 2 * size])
        callbacks = [AutoMicroBatch(), *([plant] if plant else [])]
        trainer = pl.Trainer(callbacks=callbacks, **QUIET_FIT, max_epochs=2, **on_ranks(2))
        model.network[2].p = 0.0
        trainer.fit(model, DataLoader(data, size))
        results.append(model.state_dict())
    return largest_difference(*results)


def test_ranks_with_unequal_batches_make_the_same_update() -> None:
    assert max(run_ranks(unequal_batches, 2)) <= 1e-12


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "midway"])
def test_a_scaler_of_float16_goes_on_as_without_the_error(phase: Phase) -> None:
    """Batches are powers of 2 in size, without accumulation: only float16's rounding differs."""
    scales, found = [], []
    for plant in (None, OutOfMemoryPlant(phase, FITS, times=1)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        weights, _, _ = fit(plant, module=lambda: tagger().float(), data=sentences(16), plugins=[plugin])
        found.append(weights)
        scales.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert scales[0] == scales[1]
    assert largest_difference(*found) <= (2e-2 if phase in ("forward", "backward") else 0.0)


def test_a_larger_size_is_tried_again_and_less_often_after_each_failure(caplog: pytest.LogCaptureFixture) -> None:
    sizes: list[int | None] = []
    note = LambdaCallback(on_train_batch_end=lambda *_: sizes.append(auto.size))
    auto = AutoMicroBatch(larger_after=2)
    plant = OutOfMemoryPlant("forward", FITS, updates=range(8))
    fit(plant, others=(note,), auto=auto, data=sentences(32), max_epochs=2)
    # Fails at updates 0, 2 and 6 (after 2 and 4); at update 14, after 8, the whole batch fits again.
    assert plant.failed == [4, 4, 4]
    assert sizes == [2] * 14 + [None] * 2
    assert [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()][1:] == [
        f"out of memory at update {update} with 4 samples at once: it was repeated in pieces of 2, as are the next"
        f" {wait} updates"
        for update, wait in ((3, 4), (7, 8))
    ]


def test_a_run_resumes_to_the_bit_after_its_batches_were_cut(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)

    def run(**more: Any) -> dict[str, Tensor]:
        auto = AutoMicroBatch()
        plant = OutOfMemoryPlant("backward", FITS, updates=[2])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fit_and_resume(plant, auto, checkpoint, **more)

    def fit_and_resume(plant: pl.Callback, auto: AutoMicroBatch, *callbacks: pl.Callback, **more: Any) -> Any:
        silence()
        seeds = SeedControl(1)
        module = images()
        trainer = pl.Trainer(
            callbacks=[auto, plant, seeds, *callbacks], **{**QUIET_FIT, "enable_checkpointing": True}, max_epochs=2
        )
        trainer.fit(module, DataLoader(TensorDataset(*noisy_images(16)), BATCH), **more)
        assert auto.size == FITS
        return dict(module.state_dict())

    expected = run()
    assert largest_difference(run(ckpt_path=tmp_path / "step=4.ckpt"), expected) == 0.0


class Wide(Tiny):
    """Needs 10 MB of activations for each sample."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        inputs, targets = batch
        widened = torch.tanh(self.network[0](inputs.flatten(1))).repeat(1, 125_000)
        return loss_of(self.network[1](widened[:, :10] + widened.mean(1, keepdim=True)), targets)


def train_within_a_limit() -> tuple[float, int | None]:
    found, sizes = [], []
    for limit in (None, 120_000_000):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(25, 10), nn.Linear(10, 5)).double()
        model, auto = Wide(network, torch.optim.SGD, lr=0.1), AutoMicroBatch()
        trainer = pl.Trainer(callbacks=[auto], **QUIET_FIT, max_epochs=1, devices=1)
        loader = DataLoader(TensorDataset(*noisy_images(16)), 8)
        with data_limit(limit) if limit else nullcontext():
            trainer.fit(model, loader)
        found.append(model.state_dict())
        sizes.append(auto.size)
    assert sizes[0] is None
    return largest_difference(*found), sizes[1]


def test_a_limit_of_the_kernel_is_kept_within() -> None:
    ((difference, size),) = run_ranks(train_within_a_limit, 1)
    assert size in (1, 2, 4)
    assert difference <= 1e-12


def test_synchronised_batch_norm_on_several_ranks_is_left_alone() -> None:
    assert run_ranks(warnings_with_sync_bn, 2) == [
        ["AutoMicroBatch does nothing in training: BatchNorm is synchronised"],
        [],
    ]


def warnings_with_sync_bn() -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(None, 2, module=images, data=noisy_images(16), others=(SyncBN(),))
    texts = (str(warning.message) for warning in found)
    return [text.partition(",")[0] for text in texts if "AutoMicroBatch" in text]
