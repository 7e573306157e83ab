"""Averages are those of the weights that a run without them has; what is evaluated and saved is the average."""

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.callbacks import WeightAveraging as LightningWeightAveraging
from torch import Tensor, nn

from callbacks import FreezeLayers
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.replay import RAW_WEIGHTS
from callbacks.weight_averaging import WeightAveraging
from datamodules.errors import UserError
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.support.devices import precision_on
from tests.support.tables import Tiny, equal, image_network, loss_of, noisy_images, quiet_trainer

INPUTS, TARGETS = noisy_images(27)
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


class Watch(pl.Callback):
    """Copies the module's state after each update, and as each validation runs."""

    def __init__(self) -> None:
        self.after: dict[int, State] = {}
        self.validated: dict[int, State] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.after[trainer.global_step] = copy.deepcopy(pl_module.state_dict())

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.validated[trainer.global_step] = copy.deepcopy(pl_module.state_dict())


def module(kind: type[Tiny] = Tiny) -> Tiny:
    torch.manual_seed(3)
    return kind(Tied().double(), torch.optim.SGD, lr=0.1, momentum=0.9)


def train(
    model: pl.LightningModule, *callbacks: pl.Callback, resume: Path | None = None, **options: Any
) -> tuple[pl.Trainer, Watch]:
    """Fit on 20 samples in 5 updates an epoch, and validate 7 after each."""
    trainer = quiet_trainer(*callbacks, watch := Watch(), **{"max_epochs": EPOCHS} | options)
    inputs = INPUTS.to(next(model.parameters()).dtype)
    training = TrainLoader(inputs, TARGETS, torch.arange(20), 4, 1)
    validation = EvaluationLoader(inputs[20:], TARGETS[20:], torch.arange(7), 7)
    trainer.fit(model, training, validation, ckpt_path=resume, weights_only=True)
    return trainer, watch


def saves(folder: Path, **options: Any) -> ExactCheckpoint:
    """Saves each update."""
    return ExactCheckpoint(folder, save_last=True, every_n_train_steps=1, **options)


def learnt(state: State) -> State:
    """Without the statistics of BatchNorm, which belong to the weights they stand with."""
    return {name: value for name, value in state.items() if "running_" not in name and "num_batches" not in name}


def saved(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def expected_average(after: dict[int, State], update: int) -> State:
    """From the weights and running statistics after each update, by the definition."""
    average = after[1]
    for number in range(1, update):
        weight = max(0.2, 9 / (9 + number))
        average = {name: a + weight * (after[number + 1][name] - a) for name, a in average.items()}
    return average | {name: value for name, value in after[update].items() if "num_batches" in name}


def close(one: State, other: State) -> bool:
    return all(
        torch.allclose(one[name].double(), value.double(), rtol=1e-12, atol=1e-14) for name, value in other.items()
    )


def test_the_average_is_validated_while_raw_weights_train(tmp_path: Path) -> None:
    unfreeze, averaged = {"body.1.bias": "1 epochs"}, module()
    _, without = train(module(), FreezeLayers(unfreeze=unfreeze), val_check_interval=1)
    ours = FreezeLayers(unfreeze=unfreeze), WeightAveraging(ema=0.8), saves(tmp_path, save_top_k=-1, filename="{step}")
    _, found = train(averaged, *ours, val_check_interval=1)
    assert list(without.after) == list(range(1, UPDATES + 1))
    assert not equal(learnt(without.after[5]), learnt(without.after[15]))
    for update, state in without.after.items():
        assert equal(found.after[update], state), "with its running statistics"
        assert close(found.validated[update], expected_average(without.after, update))
    for update in range(2, UPDATES, 2):
        checkpoint = saved(tmp_path / f"step={update}.ckpt")
        assert equal(checkpoint["state_dict"], found.validated[update])
        assert equal(checkpoint[RAW_WEIGHTS], without.after[update])
    assert equal(averaged.state_dict(), found.validated[UPDATES]), "the module keeps the average"


def test_a_run_without_averaging_resumes_from_raw_weights(tmp_path: Path) -> None:
    for name, average in {"ours": WeightAveraging(ema=0.9), "Lightning's": EMAWeightAveraging(decay=0.9)}.items():
        _, first = train(module(), average, saves(tmp_path / name), max_steps=7)
        _, rest = train(module(), saves(tmp_path / name), resume=tmp_path / name / "last.ckpt")
        _, without = train(module())
        assert equal(learnt(first.after[7]), learnt(without.after[7]))
        assert equal(learnt(rest.after[15]), learnt(without.after[15])), name


class Renamed(Tiny):
    """Writes other names into its checkpoints, and leaves a constant out of them."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        values = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {f"saved.{name}": value for name, value in values if "scale" not in name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        values = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {name.removeprefix("saved."): value for name, value in values}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", loss_of(self(batch[0]), batch[1]))


def test_both_copies_go_through_the_modules_checkpoint_hooks(tmp_path: Path) -> None:
    _, whole = train(module(Renamed), WeightAveraging(ema=0.9))
    train(module(Renamed), WeightAveraging(ema=0.9), saves(tmp_path), max_steps=7)
    for name in ("state_dict", RAW_WEIGHTS):
        assert all(key.startswith("saved.") and "scale" not in key for key in saved(tmp_path / "last.ckpt")[name])
    for callbacks in ([WeightAveraging(ema=0.9)], []):
        _, rest = train(module(Renamed), *callbacks, saves(tmp_path / "rest"), resume=tmp_path / "last.ckpt")
        assert equal(learnt(rest.after[15]), learnt(whole.after[15]))


@pytest.mark.parametrize("tested", ["module", "checkpoint", "checkpoint elsewhere"])
def test_a_checkpoint_saved_after_a_test_holds_what_trains_on(tmp_path: Path, tested: str) -> None:
    _, whole = train(module(Renamed), WeightAveraging(ema=0.9))
    model = module(Renamed)
    trainer, _ = train(model, WeightAveraging(ema=0.9), max_epochs=2)
    loader, first = EvaluationLoader(INPUTS[20:], TARGETS[20:], torch.arange(7), 7), tmp_path / "first.ckpt"
    trainer.save_checkpoint(first)
    if tested == "checkpoint elsewhere":
        model, other = module(Renamed), WeightAveraging(ema=0.9)
        trainer = quiet_trainer(other)
    trainer.test(model, loader, ckpt_path=None if tested == "module" else first, verbose=False, weights_only=True)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    before, after = saved(first), saved(tmp_path / "last.ckpt")
    assert all(equal(after[name], before[name]) for name in ("state_dict", RAW_WEIGHTS))
    if tested != "checkpoint elsewhere":  # There is no optimizer.
        _, rest = train(module(Renamed), WeightAveraging(ema=0.9), resume=tmp_path / "last.ckpt")
        assert equal(rest.after[15], whole.after[15])


def test_a_test_of_weights_without_an_average_leaves_none(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain.ckpt", tmp_path / "last.ckpt"
    train(module(Renamed), max_epochs=1)[0].save_checkpoint(plain)
    model = module(Renamed)
    trainer, _ = train(model, WeightAveraging(ema=0.9), max_epochs=1)
    loader = EvaluationLoader(INPUTS[20:], TARGETS[20:], torch.arange(7), 7)
    trainer.test(model, loader, ckpt_path=plain, verbose=False, weights_only=True)
    trainer.save_checkpoint(path)
    assert RAW_WEIGHTS not in saved(path)
    assert equal(saved(path)["state_dict"], saved(plain)["state_dict"])


def test_an_average_without_its_raw_weights_is_not_resumed(tmp_path: Path) -> None:
    trainer, _ = train(module(), WeightAveraging(ema=0.9), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    checkpoint = saved(tmp_path / "end.ckpt")
    del checkpoint[RAW_WEIGHTS]
    torch.save(checkpoint, tmp_path / "end.ckpt")
    with pytest.raises(UserError, match="an average of 5 updates and not the weights that train"):
        train(module(), WeightAveraging(ema=0.9), resume=tmp_path / "end.ckpt")


def test_a_run_that_began_without_averages_from_where_it_resumes(tmp_path: Path) -> None:
    train(module(), saves(tmp_path), max_steps=7)
    _, rest = train(module(), WeightAveraging(ema=0.9), saves(tmp_path), resume=tmp_path / "last.ckpt")
    assert saved(tmp_path / "last.ckpt")["callbacks"]["AveragedWeights"]["samples"] == 8
    _, without = train(module())
    assert equal(rest.after[15], without.after[15])


def test_an_update_that_float16_skipped_is_no_sample() -> None:
    class Overflows(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * math.inf if self.global_step < 2 else loss

    model, average = Overflows(image_network().float(), torch.optim.SGD, lr=0.1), WeightAveraging(ema=0.9)
    trainer, _ = train(model, average, max_epochs=1, **precision_on("cpu", "16-mixed"))
    assert (trainer.global_step, average.samples) == (5, 3)


def test_a_fit_of_nothing_keeps_the_weights(tmp_path: Path) -> None:
    model = module()
    before = copy.deepcopy(model.state_dict())
    train(model, WeightAveraging(ema=0.9), ExactCheckpoint(tmp_path, save_last=True), max_epochs=0)
    assert equal(model.state_dict(), before)


@pytest.mark.parametrize("ema", [1.5, 0])
def test_a_decay_outside_0_to_1_is_rejected(ema: float) -> None:
    with pytest.raises(UserError, match=f"ema={ema}: expected above 0 and below 1"):
        WeightAveraging(ema)


@pytest.mark.parametrize(
    ("others", "options", "message"),
    [
        ([], {"precision": "bf16-true"}, "is in half precision"),
        ([EMAWeightAveraging()], {}, "another EMAWeightAveraging"),
        ([LightningWeightAveraging()], {}, "another WeightAveraging"),
        ([ModelCheckpoint(save_weights_only=True)], {}, "save_weights_only"),
    ],
)
def test_runs_that_cannot_be_averaged_are_rejected_early(others, options, message) -> None:
    with pytest.raises(UserError, match=message):
        train(module(), WeightAveraging(ema=0.9), *others, **options)


class Clipped(Tiny):
    """Keeps its weights in a range after each update, in its own hook."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)


def test_the_average_follows_what_the_modules_hook_leaves(tmp_path: Path) -> None:
    model, average = module(Clipped), WeightAveraging(ema=0.9)
    _, whole = train(model, average, saves(tmp_path, save_top_k=-1, filename="{step}"), val_check_interval=2)
    assert max(parameter.abs().max().item() for parameter in model.parameters()) <= 0.1
    validated = [value for state in whole.validated.values() for name, value in state.items() if "weight" in name]
    assert all(value.abs().max() <= 0.1 for value in validated)
    assert average.samples == UPDATES
    for step in (1, 4, 7):
        resumed = module(Clipped)
        train(resumed, WeightAveraging(ema=0.9), saves(tmp_path / "r"), resume=tmp_path / f"step={step}.ckpt")
        assert equal(resumed.state_dict(), model.state_dict()), "saved before and after a sample is due"


class ChangesInEpoch(Tiny):
    """Makes other weights for a validation, as for a schedule-free optimizer, and the trained ones after it."""

    def _scale(self, factor: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(factor)

    def on_validation_epoch_start(self) -> None:
        self._scale(0.5)

    def on_validation_epoch_end(self) -> None:
        self._scale(2.0)


class ChangesAround(ChangesInEpoch):
    on_validation_start = ChangesInEpoch.on_validation_epoch_start
    on_validation_end = ChangesInEpoch.on_validation_epoch_end
    on_validation_epoch_start = Tiny.on_validation_epoch_start
    on_validation_epoch_end = Tiny.on_validation_epoch_end


class Exchanges(pl.Callback):
    """Exchanges weights like the module, where callbacks do."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ChangesInEpoch._scale(pl_module, 0.5)  # type: ignore[arg-type]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ChangesInEpoch._scale(pl_module, 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ChangesInEpoch, ChangesAround, Exchanges])
def test_another_exchange_of_weights_in_a_validation_is_rejected(kind: Any, tmp_path: Path) -> None:
    is_callback = issubclass(kind, pl.Callback)
    model, others = (module(), [kind()]) if is_callback else (module(kind), [])
    best = ModelCheckpoint(tmp_path, monitor="val_loss", save_on_train_epoch_end=False)
    with pytest.raises(UserError, match="another hook of the validation changed the weights"):
        train(model, *others, WeightAveraging(ema=0.9), best)
    assert is_callback or not [*tmp_path.iterdir()], "no checkpoint is the best by a score of other weights"


class ScheduleFree(ChangesInEpoch):
    """Exchanges weights before the start of a validation and after its end, around the exchange for the average."""

    on_validation_epoch_start = Tiny.on_validation_epoch_start
    on_validation_epoch_end = Tiny.on_validation_epoch_end

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self._scale(0.5)

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self._scale(2.0)


def test_an_exchange_around_validation_leaves_the_average() -> None:
    model, plain = module(ScheduleFree), module()
    _, found = train(model, WeightAveraging(ema=0.9), val_check_interval=1)
    _, expected = train(plain, WeightAveraging(ema=0.9), val_check_interval=1)
    for step, state in expected.validated.items():
        assert equal(learnt(found.validated[step]), learnt(state))
    assert equal(model.state_dict(), plain.state_dict())


def test_complex_parameters_are_averaged() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(25, 5)
            self.phases = nn.ParameterList([torch.randn(5, 5, dtype=torch.complex128)])

        def forward(self, inputs: Tensor) -> Tensor:
            return (self.layer(inputs.flatten(1)).to(torch.complex128) @ self.phases[0]).abs()

    torch.manual_seed(3)
    model = Tiny(Complex().double(), torch.optim.SGD, lr=0.1)
    _, watch = train(model, WeightAveraging(ema=0.8))
    average = watch.after[1]["network.phases.0"]
    for number in range(1, UPDATES):
        average = average + max(0.2, 9 / (9 + number)) * (watch.after[number + 1]["network.phases.0"] - average)
    torch.testing.assert_close(model.network.phases[0].detach(), average, rtol=1e-12, atol=1e-14)
