"""Averages are those of the weights that a run without them has; what is evaluated and saved is the average."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.callbacks import WeightAveraging as LightningWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from callbacks import FreezeLayers, recalibrate
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.replay import RAW_WEIGHTS
from callbacks.weight_averaging import WeightAveraging, add_sample, ema_weight, mean_weight
from datamodules.errors import UserError
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.support.tables import QUIET, Tiny, image_network, loss_of, noisy_images, silence

INPUTS, TARGETS = noisy_images(27)
ROWS = torch.arange(20)
EPOCHS, UPDATES = 3, 15
State = dict[str, Tensor]


class Tied(nn.Module):
    """Two layers with one weight, BatchNorm, a head; the first bias is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(25, 25), nn.Tanh(), nn.Linear(25, 25), nn.BatchNorm1d(25))
        self.body[3].weight = self.body[1].weight
        self.head = nn.Linear(25, 5)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs)) * self.scale


class Stop(pl.Callback):
    """Asks for the end in the first micro-batch of an update."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == self.after - 1


class Watch(pl.Callback):
    """Copies the module's state after each update, and as each validation runs."""

    def __init__(self) -> None:
        self.after: dict[int, State] = {}
        self.validated: dict[int, State] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.after[trainer.global_step] = copy.deepcopy(pl_module.state_dict())

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.validated[trainer.global_step] = copy.deepcopy(pl_module.state_dict())


def module(network: Callable[[], nn.Module] = Tied) -> Tiny:
    torch.manual_seed(3)
    return Tiny(network().double(), torch.optim.SGD, lr=0.1, momentum=0.9)


def train(
    model: pl.LightningModule,
    *callbacks: pl.Callback,
    resume: Path | None = None,
    batch_size: int = 4,
    **options: Any,
) -> tuple[pl.Trainer, Watch]:
    """Fit on 20 samples in 5 updates an epoch, and validate 7 after each."""
    silence()
    watch = Watch()
    settings: dict[str, Any] = QUIET | {"devices": 1, "max_epochs": EPOCHS, "enable_progress_bar": False}
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        settings["enable_checkpointing"] = False
    trainer = pl.Trainer(callbacks=[*callbacks, watch], **(settings | options))
    validation = EvaluationLoader(INPUTS[20:], TARGETS[20:], torch.arange(7), 7)
    trainer.fit(
        model, TrainLoader(INPUTS, TARGETS, ROWS, batch_size, 1), validation, ckpt_path=resume, weights_only=True
    )
    return trainer, watch


def learnt(state: State) -> State:
    """Without the statistics of BatchNorm, which belong to the weights they stand with."""
    return {name: value for name, value in state.items() if "running_" not in name and "num_batches" not in name}


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def saved(folder: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(folder / "last.ckpt", weights_only=True)
    return checkpoint


@given(st.integers(0, 10**9), st.floats(0.01, 0.9999))
def test_the_weights_of_samples_are_shares_and_an_average_begins_with_its_first_sample(samples: int, decay: float):
    for weight in (ema_weight(samples, decay), mean_weight(samples)):
        assert 0 < weight <= 1
        assert (weight == 1) == (samples == 0)
    assert ema_weight(samples, decay) >= 1 - decay - 1e-12


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.floats(0.1, 0.9))
def test_averages_are_the_sums_that_their_weights_stand_for(values: list[float], decay: float):
    samples = [[torch.tensor([value], dtype=torch.float64), torch.full((2,), value)] for value in values]
    out = [tensor.clone() for tensor in samples[0]]
    for number, sample in enumerate(samples):
        add_sample(out, sample, mean_weight(number))
    assert out[0].item() == pytest.approx(sum(values) / len(values), abs=1e-12)
    average = [tensor.clone() for tensor in samples[0]]
    shares = [1.0]
    for number, sample in enumerate(samples[1:], 1):
        weight = ema_weight(number, decay)
        add_sample(average, sample, weight)
        shares = [share * (1 - weight) for share in shares] + [weight]
    assert average[0].item() == pytest.approx(sum(s * v for s, v in zip(shares, values, strict=True)), abs=1e-12)
    assert math.isclose(sum(shares), 1)


def expected_average(kind: str, after: dict[int, State], update: int) -> State | None:
    """From the weights after each update, by the definitions."""
    steps = {
        "ema": range(4, update + 1),
        "swa": range(9, update + 1),
    }[kind]
    average: State | None = None
    for number, step in enumerate(steps):
        weight = max(0.2, 9 / (9 + number)) if kind == "ema" else 1 / (number + 1)
        sample = learnt(after[step])
        average = sample if average is None else {n: a + weight * (sample[n] - a) for n, a in average.items()}
    return average


KINDS: dict[str, dict[str, Any]] = {
    "ema": {"ema": 0.8, "average_from": 4},
    "swa": {"swa": True, "average_from": "60%"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_validations_see_the_average_and_training_does_not(kind: str) -> None:
    freeze = lambda: FreezeLayers(patterns="body.1.bias", unfreeze={"body.1.bias": "1 epochs"})  # noqa: E731
    plain, averaged = module(), module()
    _, without = train(plain, freeze(), val_check_interval=1)
    _, found = train(averaged, freeze(), WeightAveraging(**KINDS[kind]), val_check_interval=1)
    assert list(without.after) == list(range(1, UPDATES + 1))
    assert not equal(learnt(without.after[5]), learnt(without.after[15]))
    for update, state in without.after.items():
        assert equal(found.after[update], state), "with its running statistics"
        average = expected_average(kind, without.after, update)
        if average is None:
            assert equal(found.validated[update], state)
            continue
        validated = learnt(found.validated[update])
        assert all(torch.allclose(validated[name], value, rtol=1e-12, atol=1e-14) for name, value in average.items())
        own = module()
        own.load_state_dict(found.validated[update])
        own.network.train()
        recalibrate(own, [INPUTS[:20]])
        assert all(
            torch.allclose(found.validated[update][name], value, rtol=1e-9, atol=1e-12)
            for name, value in own.state_dict().items()
        )
    assert equal(averaged.state_dict(), found.validated[UPDATES]), "the module keeps the average"


def test_every_checkpoint_holds_the_average_with_its_statistics_and_what_trains_on(tmp_path: Path) -> None:
    saves = ExactCheckpoint(tmp_path, save_last=True, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    _, watch = train(module(), WeightAveraging(ema=0.8, average_from=4), saves, check_val_every_n_epoch=2)
    for update in (2, 4, 8, 12, 14):
        checkpoint = torch.load(tmp_path / f"step={update}.ckpt", weights_only=True)
        raw = checkpoint.get(RAW_WEIGHTS, checkpoint["state_dict"])
        assert (RAW_WEIGHTS in checkpoint) == (update >= 4)
        assert equal(raw, watch.after[update])
        if update < 4:
            continue
        own = module()
        own.load_state_dict(checkpoint["state_dict"])
        own.network.train()
        recalibrate(own, [INPUTS[:20]])
        norms = [name for name in raw if "running_" in name]
        assert all(torch.allclose(checkpoint["state_dict"][name], own.state_dict()[name]) for name in norms)


def test_a_run_that_no_longer_averages_trains_on_from_its_raw_weights(tmp_path: Path) -> None:
    for name, average in {"ours": WeightAveraging(ema=0.9), "Lightning's": EMAWeightAveraging(decay=0.9)}.items():
        folder = tmp_path / name
        saves = lambda folder=folder: ExactCheckpoint(folder, save_last=True, every_n_train_steps=1)  # noqa: E731
        _, first = train(module(), average, saves(), max_steps=7)
        _, rest = train(module(), saves(), resume=folder / "last.ckpt")
        _, without = train(module())
        assert equal(learnt(first.after[7]), learnt(without.after[7]))
        assert equal(learnt(rest.after[15]), learnt(without.after[15])), name


class Renamed(Tiny):
    """Writes other names into its checkpoints, and leaves a constant out of them."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(Tied().double(), torch.optim.SGD, lr=0.1, momentum=0.9)
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        values = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {f"saved.{name}": value for name, value in values if "scale" not in name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        values = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {name.removeprefix("saved."): value for name, value in values}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", loss_of(self(batch[0]), batch[1]))


def test_both_copies_go_through_the_hooks_of_the_module_and_its_rule_of_loading(tmp_path: Path) -> None:
    _, whole = train(Renamed(), WeightAveraging(ema=0.9))
    saves = lambda folder: ExactCheckpoint(folder, save_last=True, every_n_train_steps=1)  # noqa: E731
    train(Renamed(), WeightAveraging(ema=0.9), saves(tmp_path), max_steps=7)
    for name in ("state_dict", RAW_WEIGHTS):
        assert all(key.startswith("saved.") and "scale" not in key for key in saved(tmp_path)[name])
    for callbacks in ([WeightAveraging(ema=0.9)], []):
        _, rest = train(Renamed(), *callbacks, saves(tmp_path / "rest"), resume=tmp_path / "last.ckpt")
        assert equal(learnt(rest.after[15]), learnt(whole.after[15]))


@pytest.mark.parametrize("tested", ["module", "checkpoint", "checkpoint elsewhere"])
def test_a_checkpoint_that_is_saved_after_a_test_holds_what_trains_on(tmp_path: Path, tested: str) -> None:
    _, whole = train(Renamed(), WeightAveraging(ema=0.9))
    model = Renamed()
    trainer, _ = train(model, WeightAveraging(ema=0.9), max_epochs=2)
    loader, first = EvaluationLoader(INPUTS[20:], TARGETS[20:], torch.arange(7), 7), tmp_path / "first.ckpt"
    trainer.save_checkpoint(first)
    if tested == "checkpoint elsewhere":
        model, other = Renamed(), WeightAveraging(ema=0.9)
        trainer = pl.Trainer(callbacks=[other], **QUIET, enable_progress_bar=False, devices=1)
    trainer.test(model, loader, ckpt_path=None if tested == "module" else first, verbose=False, weights_only=True)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    before, after = (torch.load(path, weights_only=True) for path in (first, tmp_path / "last.ckpt"))
    assert all(equal(after[name], before[name]) for name in ("state_dict", RAW_WEIGHTS))
    if tested != "checkpoint elsewhere":  # There is no optimiser.
        _, rest = train(Renamed(), WeightAveraging(ema=0.9), resume=tmp_path / "last.ckpt")
        assert equal(rest.after[15], whole.after[15])


def test_an_average_without_the_weights_that_train_is_not_resumed(tmp_path: Path) -> None:
    trainer, _ = train(module(), WeightAveraging(ema=0.9), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
    del checkpoint[RAW_WEIGHTS]
    torch.save(checkpoint, tmp_path / "end.ckpt")
    with pytest.raises(UserError, match="an average of 5 updates and not the weights that train"):
        train(module(), WeightAveraging(ema=0.9), resume=tmp_path / "end.ckpt")


def test_a_run_that_began_without_averages_from_where_it_resumes(tmp_path: Path) -> None:
    saves = lambda: ExactCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)  # noqa: E731
    train(module(), saves(), max_steps=7)
    _, rest = train(module(), WeightAveraging(swa=True, average_from=3), saves(), resume=tmp_path / "last.ckpt")
    assert saved(tmp_path)["callbacks"]["AveragedWeights"]["samples"] == 8
    _, without = train(module())
    assert equal(rest.after[15], without.after[15])


def test_an_update_that_float16_skipped_is_no_sample() -> None:
    class Overflows(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * math.inf if self.global_step < 2 else loss

    model = Overflows(image_network().float(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    average = WeightAveraging(swa=True, average_from=0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    loader = TrainLoader(INPUTS.float(), TARGETS, ROWS, 4, 1)
    silence()
    trainer = pl.Trainer(
        **QUIET, plugins=[plugin], callbacks=[average], max_epochs=1, enable_checkpointing=False, devices=1
    )
    trainer.fit(model, loader)
    assert (trainer.global_step, average.samples) == (5, 3)


def test_a_fit_of_nothing_and_one_that_ends_before_the_first_sample_keep_the_weights(tmp_path: Path) -> None:
    model = module()
    before = copy.deepcopy(model.state_dict())
    train(model, WeightAveraging(ema=0.9), ExactCheckpoint(tmp_path, save_last=True), max_epochs=0)
    assert equal(model.state_dict(), before)

    _, watch = train(model, Stop(6), WeightAveraging(swa=True), ExactCheckpoint(tmp_path, save_last=True))
    assert equal(model.state_dict(), watch.after[6])
    assert RAW_WEIGHTS not in saved(tmp_path)


def test_statistics_that_cannot_be_computed_are_refused_before_the_run() -> None:
    class WithoutForward(Tiny):
        forward = pl.LightningModule.forward

    model = WithoutForward(image_network().double(), torch.optim.SGD, lr=0.1)
    with pytest.raises(UserError, match="WithoutForward has none: write one"):
        train(model, WeightAveraging(ema=0.9))


def test_settings_that_cannot_be_are_refused_with_what_to_type() -> None:
    for settings, message in {
        "average_from=3": "`average_from` alone makes no average: pass one of ema=0.999 and swa=True",
        "ema=0.9,swa=True": "ema=0.9 and swa=True: pass one of",
        "ema=1.5": "ema=1.5: expected above 0 and below 1",
        "ema=0": "ema=0: expected above 0",
        "swa=True,average_from='soon'": "`average_from`: cannot read 'soon'",
    }.items():
        with pytest.raises(UserError) as refused:
            eval(f"WeightAveraging({settings})")
        assert message in str(refused.value)


@pytest.mark.parametrize(
    ("callbacks", "options", "message"),
    [
        ([lambda: WeightAveraging(swa=True, average_from="4 epochs")], {}, "after the end of the run, 15 updates"),
        ([lambda: WeightAveraging(ema=0.9)], {"precision": "bf16-true"}, "is in half precision"),
        ([lambda: WeightAveraging(ema=0.9), EMAWeightAveraging], {}, "another EMAWeightAveraging"),
        ([lambda: WeightAveraging(ema=0.9), LightningWeightAveraging], {}, "another WeightAveraging"),
        ([lambda: WeightAveraging(ema=0.9), lambda: ModelCheckpoint(save_weights_only=True)], {}, "save_weights_only"),
    ],
)
def test_runs_that_cannot_be_averaged_are_refused_before_they_train(
    callbacks: list[Callable[[], pl.Callback]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(module(), *(make() for make in callbacks), **options)
