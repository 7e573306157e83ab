"""A batch that runs out of memory is computed in pieces: the weights against runs that never ran out."""

import os
import signal
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

from callbacks import (
    AutoMicroBatch,
    ExactCheckpoint,
    GradientAccumulation,
    LeanLoop,
    Preemption,
    SeedControl,
    SyncBN,
    TrainLoss,
    WarmupLR,
    WeightAveraging,
    stateless_dropout,
)
from callbacks.lib.signals import Preempted
from datamodules.errors import RunFailedError
from tests.support.out_of_memory import PHASES, OutOfMemoryPlant, Phase, data_limit
from tests.support.ranks import run_ranks
from tests.support.tables import (
    CLASSES,
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
    ckpt_path: str | Path | None = None,
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
    loaders = DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH)
    trainer.fit(model, *loaders, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
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


class Sometimes(Tiny):
    """A layer that no rank uses in every second step, and one rank in the others."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.network.append(nn.Linear(CLASSES, CLASSES).double())

    def forward(self, inputs: Tensor) -> Tensor:
        used = self.global_rank == 1 and self.trainer.global_step % 2 == 0
        return self.network(inputs) if used else self.network[:-1](inputs)


def differences_to_ddp() -> tuple[float, float, list[Tensor]]:
    """Of a network with an unused layer from the run of DDP, which looks for such; of BatchNorm; and its buffers."""
    results = []
    for auto in (AutoMicroBatch(), pl.Callback()):
        unused = {"strategy": "ddp_find_unused_parameters_true", "max_epochs": 3}
        torch.manual_seed(1)
        first = fit(
            None, 2, lambda: Sometimes(sentence_network().double(), torch.optim.AdamW, lr=0.1), auto=auto, **unused
        )
        second = fit(None, 2, images, data=noisy_images(16), auto=auto)
        results.append((first[0], second[0]))
    (weights, norms), (expected, expected_norms) = results
    here = int(os.environ["RANK"])
    left, right = (
        {k: v for k, v in each.items() if not here or "running" not in k} for each in (norms, expected_norms)
    )
    buffers = [value for name, value in norms.items() if "running" in name]
    return largest_difference(weights, expected), largest_difference(left, right), buffers


def test_without_any_error_unused_layers_and_buffers_are_as_in_ddp() -> None:
    first, second = run_ranks(differences_to_ddp, 2)
    assert max(first[:2] + second[:2]) <= 1e-12
    assert all(map(torch.equal, first[2], second[2])), "those of rank 0"


def images() -> Tiny:
    """BatchNorm, torch's dropout, a metric and a logged loss: all that an attempt may leave traces in."""
    return Scored(image_network(dropout=0.3).double(), torch.optim.SGD, lr=0.1, momentum=0.9)


class Scored(Tiny):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.total = SumMetric()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.total.update(len(batch[0]))
        self.seen = self.seen + len(batch[0])  # Another tensor, where BatchNorm changes its own.
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


def unequal_batches() -> tuple[float, dict[str, Any]]:
    """Ranks with batches of 6 and of 3 samples, of which one cuts its own."""
    rank = int(os.environ["RANK"])
    results = []
    for plant in (None, OutOfMemoryPlant("backward", {0: 2})):
        silence()
        pl.seed_everything(1)
        model, size = tagger(), (6, 3)[rank]
        inputs, targets = sentences(18)
        data = TensorDataset(inputs[rank * 12 : rank * 12 + 2 * size], targets[rank * 12 : rank * 12 + 2 * size])
        callbacks = [AutoMicroBatch(larger_after=1), *([plant] if plant else [])]
        trainer = pl.Trainer(callbacks=callbacks, **QUIET_FIT, max_epochs=2, **on_ranks(2))
        model.network[2].p = 0.0
        trainer.fit(model, DataLoader(data, size))
        results.append(model.state_dict())
    return largest_difference(*results), callbacks[0].state_dict()


def test_ranks_with_unequal_batches_make_the_same_update() -> None:
    (first, state), (second, other) = run_ranks(unequal_batches, 2)
    assert max(first, second) <= 1e-12
    # Cut to 3 and 2, and at each update a larger size is tried, as far as the largest batch of any rank goes.
    assert state == other
    assert (state["size"], state["wait"]) == (2, 4)


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


@pytest.mark.parametrize("phase", ["optimizer", "midway"])
def test_a_step_that_fails_again_after_a_larger_size_was_tried_is_made_and_the_size_goes_back(phase: Phase) -> None:
    sizes: list[int | None] = []
    auto = AutoMicroBatch(larger_after=2)
    foreach: list[bool | None] = []
    note = LambdaCallback(
        on_train_batch_end=lambda *_: sizes.append(auto.size),
        on_train_end=lambda trainer, _: foreach.append(trainer.optimizers[0].param_groups[0]["foreach"]),
    )
    first, then = OutOfMemoryPlant("forward", FITS, updates=[0]), OutOfMemoryPlant(phase, FITS, updates=[2], times=2)
    weights, _, _ = fit(first, others=(then, note), auto=auto, data=sentences(16))
    assert (first.failed, then.failed) == ([4], [4, 4])
    # Whole batches at update 2, whose step fails twice; pieces again for 4 updates.
    assert sizes == [2] * 7 + [None]
    assert foreach == [False]
    expected, _, _ = fit(None, data=sentences(16))
    assert largest_difference(weights, expected) <= 1e-12


def test_a_step_that_never_fits_ends_the_run_with_one_line() -> None:
    plant = OutOfMemoryPlant("optimizer", FITS)
    with pytest.raises(RunFailedError, match=r"optimizer's step, 3 times \(CUDA out of memory. Planted at optimizer"):
        fit(plant)
    assert plant.failed == [4] * 3


class Communicating(Tiny):
    """Reduces in each step of training, or of validation."""

    reduces_training = True

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if self.reduces_training:
            self.log("train_loss", output["loss"], on_step=True, sync_dist=True, batch_size=1)
        return output

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        output = super().validation_step(batch, batch_idx)
        if not self.reduces_training:
            self.log("logits", output["logits"].mean(), on_step=True, sync_dist=True, batch_size=1)
        return output


def steps_that_communicate() -> tuple[list[str], float, list[str]]:
    def module(reduces_training: bool = True) -> Tiny:
        made = Communicating(sentence_network().double(), torch.optim.SGD, lr=0.1)
        made.reduces_training = reduces_training
        return made

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        others = GradientAccumulation(2)
        weights, _, _ = fit(None, 2, module=module, others=(others,), data=sentences(24))
    texts = [str(warning.message).partition(", ")[0] for warning in found if "AutoMicroBatch" in str(warning.message)]
    expected, _, _ = fit(
        None, 2, module=module, others=(GradientAccumulation(2),), auto=pl.Callback(), data=sentences(24)
    )
    refused = []
    for part in ("size", "evaluation_size"):
        setattr(auto := AutoMicroBatch(), part, FITS)
        with pytest.raises(RunFailedError) as error:
            fit(None, 2, module=lambda part=part: module(part == "size"), auto=auto)
        refused.append(str(error.value).partition(", ")[0])
    rank = int(os.environ["RANK"])
    # The other rank waits in the update's collective calls until this one has ended.
    with pytest.raises(torch.OutOfMemoryError if rank == 1 else RuntimeError):
        fit(OutOfMemoryPlant("backward", {1: FITS}), 2, module=module)
    return texts, largest_difference(weights, expected), refused


def test_a_step_that_communicates_is_left_to_lightning_and_never_cut() -> None:
    first, second = run_ranks(steps_that_communicate, 2)
    step = "training_step communicates with the other ranks"
    assert first[0] == [f"AutoMicroBatch does nothing in training: {step}"]
    assert second[0] == []
    for _, difference, refused in (first, second):
        assert difference <= 1e-15
        assert refused == [f"a batch cannot be cut where {each}" for each in (step, "an evaluation step" + step[13:])]


class Signal(OutOfMemoryPlant):
    """Runs out of memory once, and gets SIGTERM in the attempt that follows."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sent = False

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self.failed and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


COMPANY: dict[str, Callable[[], tuple[pl.Callback, ...]]] = {
    "LeanLoop": lambda: (LeanLoop(),),
    "GradientAccumulation, 3 and 2 batches": lambda: (GradientAccumulation({0: 3, "1 epochs": 2}),),
    "WeightAveraging": lambda: (WeightAveraging(ema=0.5),),
    "all of them": lambda: (LeanLoop(), GradientAccumulation(2), WarmupLR("50%"), WeightAveraging(lawa=2)),
}


def rows_of_company(world_size: int, folder: Path) -> list[tuple[str, str, float]]:
    """The largest differences of final weights from those of runs that neither failed nor stopped."""
    rows = []
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", 0))
    data = sentences(22 * world_size)
    for name, company in COMPANY.items():

        def life(
            plant: pl.Callback | None, kept: pl.Callback, company: Any = company, **more: Any
        ) -> dict[str, Tensor]:
            others = (*company(), Preemption(), kept)
            return fit(plant, world_size, data=data, others=others, enable_checkpointing=True, **more)[0]

        def checkpoint(kind: str, name: str = name) -> ExactCheckpoint:
            place = folder / f"{name}, {kind}"
            return ExactCheckpoint(place, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True)

        expected = life(None, checkpoint("whole"))
        for phase in ("forward", "backward"):
            plant = OutOfMemoryPlant(phase, {world_size - 1: FITS}, updates=[1, 2, 4])
            cut = checkpoint(phase)
            rows.append((name, phase, largest_difference(life(plant, cut), expected)))
            assert bool(plant.failed) == (rank == world_size - 1)
        middle = next(Path(cut.dirpath or "").glob("step=3*.ckpt"))
        weights = life(None, checkpoint("resumed"), ckpt_path=middle)
        rows.append((name, "resumed in mid-epoch", largest_difference(weights, expected)))
        stopping, kept = Signal("backward", {world_size - 1: FITS}, updates=[1]), checkpoint("stopped")
        with pytest.raises(Preempted):
            life(stopping, kept)
        assert stopping.sent == (rank == world_size - 1)
        weights = life(None, checkpoint("again"), ckpt_path=kept.last_model_path)
        rows.append((name, "SIGTERM in the repeated attempt, resumed", largest_difference(weights, expected)))
    return rows


@pytest.mark.parametrize("world_size", [1, 2])
def test_with_other_callbacks_and_after_an_interruption_the_weights_are_those_without_an_error(
    world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rows in run_ranks(rows_of_company, world_size, world_size, tmp_path):
        with capsys.disabled():
            print(f"\n{world_size} device(s)\n| beside | run | weights |\n|---|---|--:|")
            for name, run, difference in rows:
                print(f"| {name} | {run} | {difference:.1e} |")
        for row in rows:
            assert row[2] <= 1e-12, row


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
