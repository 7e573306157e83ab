"""Optimizers that wrap others, set their own rates or keep unusual states are used rightly, or rejected."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ExactCheckpoint, GradientAccumulation, SeedControl, WarmupLR, WeightAveraging
from callbacks.lib.optimizers import optimizer_layers, stepping_optimizer
from datamodules import UserError
from tests.callbacks.test_updates import Line, samples
from tests.support.optimizers import Forgetful
from tests.support.tables import equal, quiet_trainer

Make = Callable[[Any], Optimizer]


class Wrapper(Optimizer):
    """Steps towards slow weights every second step, as timm's `Lookahead`: it has the groups of another optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        # As there, without super().__init__(): its step calls no hooks.
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = self.inner.step(closure)  # type: ignore[arg-type]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                state = self.inner.state[parameter]
                slow = state.setdefault("slow", parameter.clone())
                if group["steps"] % 2 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Packed(Tensor):
    """A tensor of a class of its own, as the states of 8-bit optimizers are."""


class PackedStates(torch.optim.SGD):
    """Keeps its momentum in such a tensor."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)  # type: ignore[arg-type]
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].as_subclass(Packed)
        return loss


WRAPPED: dict[str, Make] = {
    "around SGD": lambda parameters: Wrapper(torch.optim.SGD(parameters, lr=0.05, momentum=0.9)),
    "around NAdam": lambda parameters: Wrapper(torch.optim.NAdam(parameters, lr=0.05)),
}


class Model(Line):
    """Trained by an optimizer of the test's."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make
        self.moved: list[float] = []

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters())

    def on_train_batch_start(self, *args: Any) -> None:
        self.before = self.network.weight.detach().clone()

    def on_train_batch_end(self, *args: Any) -> None:
        self.moved.append(float((self.network.weight.detach() - self.before).abs().max()))


def fit(make: Make, *callbacks: Any, resume: Path | None = None) -> Model:
    model = Model(make)
    trainer = quiet_trainer(*callbacks, max_epochs=2)
    loader = DataLoader(TensorDataset(*samples(8)), 1, shuffle=True)
    trainer.fit(model, loader, ckpt_path=resume, weights_only=True)
    return model


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_optimizer_resumes_exactly(name: str, tmp_path: Path) -> None:
    def run(folder: Path, resume: Path | None = None) -> dict[str, Tensor]:
        saves = ExactCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        callbacks = SeedControl(1), GradientAccumulation(2), WarmupLR("3 steps"), WeightAveraging(ema=0.9), saves
        return fit(WRAPPED[name], *callbacks, resume=resume).state_dict()

    whole = run(tmp_path / "a")
    for step in (1, 5):
        assert equal(run(tmp_path / "b", tmp_path / f"a/step={step}.ckpt"), whole)


def test_hooks_run_from_the_first_step_of_a_wrapper_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch has the step of the class call hooks once an optimizer of it has zeroed gradients.
    monkeypatch.setattr(Wrapper, "step", torch.no_grad()(inspect.unwrap(Wrapper.step)))
    average = WeightAveraging(ema=0.9)
    slow = fit(WRAPPED["around SGD"], WarmupLR("10 steps"), average)
    plain = fit(WRAPPED["around SGD"])
    assert slow.moved[0] == pytest.approx(0.01 * plain.moved[0], rel=1e-9)
    assert average.samples == 16


def test_the_first_zeroing_has_a_step_call_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrapper, "step", torch.no_grad()(inspect.unwrap(Wrapper.step)))
    steps = []

    def make(parameters: Any) -> Optimizer:
        optimizer = Wrapper(torch.optim.SGD(parameters, lr=0.05))
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return optimizer

    fit(make, SeedControl(1))
    assert len(steps) == 15  # The first step has begun when it zeroes gradients.


def test_the_innermost_optimizer_steps() -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert [*optimizer_layers(sgd)] == [sgd]
    outer = Wrapper(inner := Wrapper(sgd))
    assert [*optimizer_layers(outer)] == [outer, inner, sgd]
    assert stepping_optimizer(outer) is sgd


class Decaying(torch.optim.SGD):
    """Keeps half of each gradient for the next update, in place of zeroing it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad *= 0.5


def decaying_by_assignment(parameters: Any) -> Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    optimizer.zero_grad = Decaying.zero_grad.__get__(optimizer)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("make", [lambda parameters: Decaying(parameters, lr=0.05), decaying_by_assignment])
def test_the_zeroing_of_an_optimizer_is_its_own(make: Make) -> None:
    batches = []
    model = fit(make, SeedControl(1), LambdaCallback(on_train_batch_start=lambda *args: batches.append(args[2])))
    expected = Model(make)
    optimizer = expected.configure_optimizers()
    for batch in batches:
        loss = expected.loss(batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert len(batches) == 16
    assert equal(model.state_dict(), expected.state_dict())


class WithoutHooks(Optimizer):
    """Its constructor is not torch's, and it wraps nothing."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": [*params], "lr": 0.1}]
        self.state = {}  # type: ignore[assignment]
        self.defaults = {"foreach": False}
        self._optimizer_step_pre_hooks = {}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return closure()

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class OwnRate(torch.optim.SGD):
    """Computes its rate, as `Adafactor(lr=None)` does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None


@pytest.mark.parametrize("callback", [lambda: WarmupLR("3 steps"), lambda: WeightAveraging(ema=0.9)])
def test_a_step_without_hooks_is_rejected(callback: Any) -> None:
    with pytest.raises(UserError, match=r"WithoutHooks.step\(\) calls no hooks"):
        fit(WithoutHooks, callback())


@pytest.mark.parametrize("settings", [{"duration": "3 steps"}, {"scale": "linear", "base_batch_size": 4}])
def test_an_optimizer_without_a_rate_cannot_be_warmed_up(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="OwnRate has no rate, as where lr=None"):
        fit(OwnRate, WarmupLR(**settings))


def test_a_state_that_no_checkpoint_brings_back_is_rejected(tmp_path: Path) -> None:
    for make, message in (
        (lambda parameters: Forgetful(parameters, lr=0.1, momentum=0.9), "leaves out momentum_buffer of the SGD"),
        (lambda parameters: PackedStates(parameters, lr=0.1, momentum=0.9), "the state of PackedStates is of Packed"),
    ):
        with pytest.raises(UserError, match=message):
            fit(make, ExactCheckpoint(tmp_path))
    fit(lambda parameters: Forgetful(parameters, lr=0.1), ExactCheckpoint(tmp_path))
