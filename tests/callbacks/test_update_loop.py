"""A run whose updates are one micro-batch is Lightning's: hooks in their order, counters, logs, errors and bits."""

import copy
import functools
import gc
import inspect
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.lib.hook_calls import LeanCalls
from callbacks.lib.lightning_internals import RUNNING_HOOK, attached_trainer
from callbacks.update_loop import UpdateLoop, install_update_loop
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

pytestmark = pytest.mark.lightning


BATCHES = 6
SETS = 8
"""Random sets of hooks and settings."""


def hooks_of(kind: type) -> list[str]:
    """The names of its hooks: what starts with ``on_``, and `setup` and `teardown`."""
    names = [name for name in dir(kind) if name.startswith("on_") or name in ("setup", "teardown")]
    return [name for name in names if inspect.isfunction(getattr(kind, name))]


MODULE_HOOKS = [
    *hooks_of(pl.LightningModule),
    *("training_step", "validation_step", "backward", "optimizer_step", "optimizer_zero_grad"),
    *("configure_gradient_clipping", "lr_scheduler_step", "transfer_batch_to_device"),
]
STRATEGY_HOOKS = [
    *hooks_of(pl.strategies.Strategy)[1:],
    *("training_step", "validation_step", "backward", "optimizer_step", "batch_to_device"),
]
STEP_HOOKS = ["on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_validation_batch_start"]


# What is compared


class Transcript:
    """Everything that happens in a run, in its order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def note(self, owner: str, name: str, module: pl.LightningModule) -> None:
        trainer = attached_trainer(module)
        assert trainer is not None
        counters = repr(trainer.fit_loop.state_dict())
        self.events.append((owner, name, vars(module)[RUNNING_HOOK], trainer.global_step, counters))

    def recording(self, kind: type, names: list[str], owner: str, at: int = 0) -> type:
        """A subclass that notes each hook before it does what its parent does; `at` is the module's place in `args`."""

        def recorded(name: str) -> Callable[..., Any]:
            def hook(instance: Any, *args: Any, **kwargs: Any) -> Any:
                self.note(owner, name, (instance, *args)[at])
                return getattr(kind, name)(instance, *args, **kwargs)

            return hook

        return type(kind.__name__, (kind,), {name: recorded(name) for name in names})

    def wrap(self, instance: Any, names: list[str], owner: str) -> Any:
        """Wraps each hook on the instance, as a decorator does."""

        def wrapped(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(hook)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                modules = {"module": lambda: instance, "strategy": lambda: instance.lightning_module}
                self.note(owner, name, modules.get(owner, lambda: args[1])())
                return hook(*args, **kwargs)

            return wrapper

        for name in names:
            setattr(instance, name, wrapped(name, getattr(instance, name)))
        return instance


class Logged(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.rows.append((args, kwargs))


def equal(one: Any, other: Any) -> bool:
    """Whether two trees of tensors and values are equal, to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other) or (one != one and other != other)


# What runs


class Model(pl.LightningModule):
    """Batch normalization, dropout and a linear layer; its loss is logged in the step and over the epoch."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 3))
        self.make = functools.partial(optimizer, lr=0.1)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "count": len(batch[1])}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        config = {"scheduler": scheduler, "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": config}


def samples(n: int = 4 * BATCHES - 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator))


def loader() -> DataLoader[Any]:
    return PlainLoader(samples(), batch_size=4)


class Install(pl.Callback):
    """Has the steps of a Trainer be updates."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        install_update_loop(trainer)


class PlainLoader(DataLoader[Any]):
    """It is left alone, since it reads in its own way."""

    def __iter__(self) -> Any:
        return super().__iter__()


Case = Callable[[Transcript], dict[str, Any]]
"""Makes the arguments of a Trainer, and a `model`, `train` and `val` loaders and `callbacks`, all optional."""

CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


@contextmanager
def counted_steps() -> Iterator[list[int]]:
    """The updates that are made without Lightning's own functions around the hooks."""
    updates: list[int] = []

    def run_optimizer(calls: LeanCalls, *args: Any) -> None:
        updates.append(len(updates))
        make(calls, *args)

    make = LeanCalls._step_optimizer
    with patch.object(LeanCalls, "_step_optimizer", run_optimizer):
        yield updates


def fit(make: Case, lean: bool, folder: Path, in_plan: bool = True, **more: Any) -> dict[str, Any]:
    """One run: what happened in it, and what came of it; `in_plan`: whether its steps are lean."""
    transcript, logger = Transcript(), Logged()
    settings = make(transcript) | more
    settings.setdefault("model", Model())
    model, resume = settings.pop("model"), settings.pop("resume", None)
    loaders = (settings.pop("train", loader()), settings.pop("val", loader()))
    recorder = transcript.recording(pl.Callback, settings.pop("recorded", hooks_of(pl.Callback)), "callback", at=2)()
    called = [recorder, *settings.pop("callbacks", []), *([Install()] if lean else [])]
    trainer = quiet_trainer(*called, **({"max_epochs": 2, "log_every_n_steps": 2, "logger": logger} | settings))
    torch.manual_seed(4)
    error = None
    with counted_steps() as planned:
        try:
            trainer.fit(model, *loaders, ckpt_path=resume)
        except Exception as raised:
            error = (type(raised), str(raised))
    assert isinstance(trainer.fit_loop.epoch_loop, UpdateLoop) == lean
    assert bool(planned) == (lean and in_plan)
    result = {
        "events": transcript.events,
        "error": error,
        "rows": logger.rows,
        "metrics": dict(trainer.callback_metrics),
        "weights": model.state_dict(),
        "loop": trainer.fit_loop.state_dict(),
        "random numbers": torch.get_rng_state(),
    }
    if error is None:
        trainer.save_checkpoint(folder / "end.ckpt")
        result["checkpoint"] = torch.load(folder / "end.ckpt", weights_only=False)
    return result


def assert_equal_with_update_loop(make: Case, folder: Path, **more: Any) -> dict[str, Any]:
    """Returns what Lightning's own calls gave."""
    lean, stock = (fit(make, lean, folder, **more) for lean in (True, False))
    assert lean["events"] == stock["events"]
    for part, value in stock.items():
        assert equal(lean[part], value), part
    return stock


# The table


@case
def nothing_is_overridden(_: Transcript) -> dict[str, Any]:
    return {}


@case
def validations_are_counted_over_epochs(_: Transcript) -> dict[str, Any]:
    return {"check_val_every_n_epoch": None, "val_check_interval": 4}


@case
def all_hooks_are_overridden(transcript: Transcript) -> dict[str, Any]:
    model = transcript.recording(Model, MODULE_HOOKS, "module")()
    return {"model": model, "gradient_clip_val": 0.1, "val_check_interval": 3}


@case
def all_hooks_but_the_update_are_overridden(transcript: Transcript) -> dict[str, Any]:
    kind = transcript.recording(Model, [name for name in MODULE_HOOKS if name != "optimizer_step"], "module")
    return {"model": kind(), "gradient_clip_val": 0.1, "val_check_interval": 3}


@case
def all_hooks_are_wrapped_on_the_instances(transcript: Transcript) -> dict[str, Any]:
    model = transcript.wrap(Model(), MODULE_HOOKS, "module")
    callback = transcript.wrap(pl.Callback(), hooks_of(pl.Callback), "wrapped callback")
    strategy = transcript.wrap(SingleDeviceStrategy("cpu"), STRATEGY_HOOKS, "strategy")
    clipping = {"gradient_clip_val": 0.1}
    return {"model": model, "callbacks": [callback], "strategy": strategy, **clipping}


@case
def a_strategy_has_its_own_backward(transcript: Transcript) -> dict[str, Any]:
    class Own(SingleDeviceStrategy):
        def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            transcript.note("strategy", "backward", self.lightning_module)
            return super().backward(2 * closure_loss, *args, **kwargs)

        def on_train_batch_start(self, *args: Any) -> None:
            transcript.note("strategy", "on_train_batch_start", self.lightning_module)

    return {"strategy": Own("cpu")}


@case
def a_closure_is_called_many_times(_: Transcript) -> dict[str, Any]:
    return {"model": Model(functools.partial(torch.optim.LBFGS, max_iter=3))}


@case
def a_step_returns_none(_: Transcript) -> dict[str, Any]:
    class Skipping(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (2, 3) else super().training_step(batch, batch_idx)

    return {"model": Skipping()}


@case
def optimization_is_manual(_: Transcript) -> dict[str, Any]:
    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    return {"model": Manual()}


@case
def the_epoch_is_skipped_by_the_module(_: Transcript) -> dict[str, Any]:
    class Skipping(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    return {"model": Skipping()}


class Counting(SimpleProfiler):
    """Knows how often each action was measured, and no times."""

    def summary(self) -> str:
        return ""


@case
def a_profiler_is_set(transcript: Transcript) -> dict[str, Any]:
    class Measured(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            measured = {action: len(times) for action, times in profiler.recorded_durations.items()}
            transcript.events.append(
                {
                    action.replace("UpdateLoop", "_TrainingEpochLoop"): count
                    for action, count in measured.items()
                    if "Install" not in action
                }
            )

    profiler = Counting()
    return {"profiler": profiler, "callbacks": [Measured()]}


@case
def a_data_module_with_hooks(transcript: Transcript) -> dict[str, Any]:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            transcript.note("data module", "on_before_batch_transfer", self.trainer.lightning_module)
            return [2 * batch[0], batch[1]]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            transcript.note("data module", "on_after_batch_transfer", self.trainer.lightning_module)
            return batch

    return {"train": Data(), "val": None}


@case
def bf16(_: Transcript) -> dict[str, Any]:
    return {"precision": "bf16-mixed", "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}


@case
def fp16_with_skipped_updates(_: Transcript) -> dict[str, Any]:
    class Overflowing(Model):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (torch.inf if self.global_step == 2 and self.training else 1)

    return {"model": Overflowing(), "plugins": [MixedPrecision("16-mixed", "cpu")], "max_steps": 7, "max_epochs": -1}


@case
def it_ends_within_an_epoch(_: Transcript) -> dict[str, Any]:
    return {"max_steps": 5, "max_epochs": -1, "val_check_interval": 2}


@case
def callbacks_come_go_and_change(transcript: Transcript) -> dict[str, Any]:
    names = hooks_of(pl.Callback)
    guest = transcript.recording(pl.Callback, names, "guest", at=2)()
    wrapped = transcript.wrap(pl.Callback(), [], "wrapped callback")

    class Host(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            changes = {1: trainer.callbacks.append, 3: trainer.callbacks.remove}
            changes.get(batch_idx, lambda _: None)(guest)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            transcript.wrap(wrapped, names, "wrapped callback")

    class Passing(pl.Callback):
        def __getattribute__(self, name: str) -> Any:
            return getattr(others, name) if name == "on_after_backward" else super().__getattribute__(name)

    others = transcript.recording(pl.Callback, names, "passed to", at=2)()
    return {"callbacks": [wrapped, Host(), transcript.recording(pl.Callback, names, "behind", at=2)(), Passing()]}


@case
def idle_hooks_are_wrapped_in_an_epoch_and_the_step_takes_no_number(transcript: Transcript) -> dict[str, Any]:
    class Unnumbered(Model):
        def training_step(self, batch: Any) -> Any:
            return self.loss(batch)

        def on_after_backward(self) -> None:
            transcript.note("module", "on_after_backward", self)

    class Host(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and trainer.current_epoch == 1:
                transcript.wrap(module, ["on_before_zero_grad", "on_before_backward"], "module")

    return {"model": Unnumbered(), "recorded": ["on_train_batch_end"], "callbacks": [Host()]}


@case
def a_callback_is_a_mock(_: Transcript) -> dict[str, Any]:
    return {"callbacks": [Mock(spec=pl.Callback, **{"state_dict.return_value": {}})]}


LEFT_TO_LIGHTNING = {
    "all_hooks_are_overridden",
    "all_hooks_are_wrapped_on_the_instances",
    "a_strategy_has_its_own_backward",
    "optimization_is_manual",
    "a_profiler_is_set",
    "fp16_with_skipped_updates",
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_same_with_update_loop(name: str, tmp_path: Path) -> None:
    stock = assert_equal_with_update_loop(CASES[name], tmp_path, in_plan=name not in LEFT_TO_LIGHTNING)
    assert stock["error"] is None


def test_an_optimizer_that_ignores_its_closure_is_rejected() -> None:
    class Ignoring(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()

    with pytest.raises(MisconfigurationException, match=r"Ignoring.step\(\) has not called its closure"):
        quiet_trainer(Install()).fit(Model(Ignoring), loader())


@pytest.mark.parametrize(
    ("hook", "owner"), [*zip(STEP_HOOKS, ["callback", "module", "module", "callback"], strict=True)]
)
@pytest.mark.parametrize("what", ["stops", "raises"])
def test_a_hook_that_stops_or_raises_does_it_at_the_same_place(what, hook, owner, tmp_path) -> None:
    # A run validates after an update in which it is asked to stop, also between two intervals.
    place = 2 if "validation" in hook else 1

    def make(_: Transcript) -> dict[str, Any]:
        def act(instance: Any, *args: Any) -> None:
            module = instance if owner == "module" else args[1]
            if module.trainer.fit_loop.epoch_loop.total_batch_idx == place and what == "stops":
                module.trainer.should_stop = True
            elif module.trainer.fit_loop.epoch_loop.total_batch_idx == place:
                raise RuntimeError("in a hook")

        if owner == "module":
            return {"model": type("Acting", (Model,), {hook: act})()}
        return {"callbacks": [type("Acting", (pl.Callback,), {hook: act})()]}

    options = {"max_epochs": 1, "val_check_interval": 3, "limit_val_batches": 1}
    assert_equal_with_update_loop(make, tmp_path, **options)


def test_a_trainer_inside_a_hook_leaves_the_outer_results() -> None:
    class Inner(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            quiet_trainer(Install(), max_steps=1).fit(Model(), loader())

    def weights(*called: pl.Callback) -> dict[str, Tensor]:
        model = Model()
        model.network[1].p = 0
        quiet_trainer(*called).fit(model, loader())
        return model.state_dict()

    assert equal(weights(Install(), Inner()), weights())


def test_a_copy_of_a_trainer_has_a_step_of_its_own() -> None:
    class Copying(pl.Callback):
        def on_fit_start(self, trainer: Any, *_: Any) -> None:
            self.copied = copy.deepcopy(trainer)

    callback = Copying()
    quiet_trainer(Install(), callback, max_steps=1).fit(Model(), loader())
    loop = callback.copied.fit_loop.epoch_loop
    assert loop.trainer is callback.copied
    assert loop.calls.trainer is callback.copied
    assert loop.source.dataloader.__self__ is loop


@pytest.mark.parametrize("seed", range(SETS))
def test_any_set_of_hooks_is_called_in_lightnings_order(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)

    def some(names: list[str]) -> list[str]:
        return choose.sample(names, choose.randrange(len(names) + 1))

    of_module, of_callbacks = some([n for n in MODULE_HOOKS if n != "optimizer_step"]), some(hooks_of(pl.Callback))
    options = {
        "gradient_clip_val": choose.choice([None, 0.1]),
        "precision": choose.choice(["32-true", "bf16-mixed", "64-true"]),
        "val_check_interval": choose.choice([1, 3, 6]),
        "limit_train_batches": choose.choice([1, 5, 6]),
        "max_steps": choose.choice([-1, 3]),
    }

    def make(transcript: Transcript) -> dict[str, Any]:
        callback = transcript.recording(pl.Callback, of_callbacks, "own", at=2)()
        return {"model": transcript.recording(Model, of_module, "module")(), "callbacks": [callback], **options}

    options["val_check_interval"] = min(options["val_check_interval"], options["limit_train_batches"])
    assert_equal_with_update_loop(make, tmp_path)


def test_nothing_of_a_run_is_kept() -> None:
    class Wrapped(Model):
        def __init__(self) -> None:
            super().__init__()
            self.training_step = lambda batch, *_: self.loss(batch)  # type: ignore[method-assign]

    model = Wrapped()
    quiet_trainer(Install()).fit(model, loader())
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def _rank(folder: str) -> dict[str, Tensor]:
    def make(_: Transcript) -> dict[str, Any]:
        return {"devices": 2, "strategy": "ddp", "use_distributed_sampler": True}

    return assert_equal_with_update_loop(make, Path(folder))["weights"]


def test_two_ranks_run_as_in_lightnings_loop(tmp_path: Path) -> None:
    one, other = run_ranks(_rank, 2, str(tmp_path))
    assert equal(one["network.2.weight"], other["network.2.weight"])
