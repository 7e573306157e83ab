"""The short way through a step is Lightning's way: the same calls in the same order, and the same bits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import GradientAccumulation, LeanLoop
from callbacks.fast_path.lean_loop import unsupported
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, image_network, noisy_images

BATCHES = 10
MODULE_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "on_train_batch_end",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "lr_scheduler_step",
)
HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_") and "checkpoint" not in name]


class Recorder(pl.Callback):
    """Notes each hook, with what `log` and the counters know there, and which way the steps take."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.lean: set[bool] = set()

    def note(self, owner: str, name: str, trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        progress = (
            vars(loop.batch_progress.current),
            vars(loop.automatic_optimization.optim_progress.optimizer.step.total),
        )
        counted = [dict(part) for part in progress]
        self.events.append((owner, name, trainer.lightning_module._current_fx_name, trainer.global_step, counted))
        if name == "on_before_zero_grad":
            self.lean.add("advance" in vars(loop))


def _recorded(name: str) -> Callable[..., None]:
    def hook(self: Recorder, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        self.note("callback", name, trainer)

    return hook


for hook_name in HOOKS:
    setattr(Recorder, hook_name, _recorded(hook_name))


class Model(pl.LightningModule):
    """Logs in the step and after it; `skip` names a batch whose step returns nothing."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], skip: int | None = None) -> None:
        super().__init__()
        self.network, self.make, self.skip = image_network(), optimizer, skip
        self.outputs: list[Any] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if batch_idx == self.skip:
            return None
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "count": len(batch[1])}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Loud(Model):
    """Overrides every hook of the step that may be overridden, notes it, and logs where that is allowed."""

    recorder: Recorder


def _noted(name: str) -> Callable[..., Any]:
    def hook(self: Loud, *args: Any, **kwargs: Any) -> Any:
        self.recorder.note("module", name, self.trainer)
        if name == "on_train_batch_end":
            self.log("after", float(self.trainer.global_step))
            outputs = args[0]
            self.outputs.append({key: torch.as_tensor(value).clone() for key, value in (outputs or {}).items()})
        return getattr(Model, name)(self, *args, **kwargs)

    return hook


for hook_name in MODULE_HOOKS:
    setattr(Loud, hook_name, _noted(hook_name))


class Logged(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.rows.append((args, kwargs))


SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.AdamW, lr=0.01)


def fit(
    folder: Path, lean: bool, kind: type[Model] = Loud, optimizer: Any = SGD, skip: int | None = None, **options: Any
) -> tuple[Model, Recorder, list[Any], dict[str, Any]]:
    """One run: the module, what was called, what was logged, and its checkpoint."""
    torch.manual_seed(1)
    model, recorder, logger = kind(optimizer, skip), Recorder(), Logged()
    if isinstance(model, Loud):
        model.recorder = recorder
    images, targets = noisy_images(4 * BATCHES - 2)
    loader = DataLoader(TensorDataset(images.float(), targets), batch_size=4)
    callbacks = [recorder, *options.pop("callbacks", [])]
    settings = QUIET | {"logger": logger, "max_epochs": 2, "log_every_n_steps": 3, "enable_progress_bar": False}
    settings |= {"enable_checkpointing": False} | options
    trainer = pl.Trainer(callbacks=[*callbacks, *([LeanLoop()] if lean else [])], **settings)
    trainer.fit(model, loader, loader)
    path = folder / f"{lean}.ckpt"
    trainer.save_checkpoint(path)
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)
    return model, recorder, logger.rows, torch.load(path, weights_only=False)


def equal(one: Any, other: Any) -> bool:
    """Whether two trees of tensors and values are equal, to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other) or (one != one and other != other)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "Adam": {"optimizer": ADAM},
    "windows": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "bf16": {"precision": "bf16-mixed"},
    "validation in the epoch": {"val_check_interval": 4, "accumulate_grad_batches": 2},
    "a step that returns nothing": {"skip": 3},
    "several closures an update": {"optimizer": partial(torch.optim.LBFGS, lr=0.01, max_iter=3), "max_epochs": 1},
    "ended in mid-epoch": {"max_steps": 7, "max_epochs": -1},
    "few batches": {"limit_train_batches": 3, "accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("kind", [Loud, Model])
@pytest.mark.parametrize("name", CASES)
def test_calls_counters_logs_and_bits_are_those_of_the_stock_loop(name: str, kind: type[Model], tmp_path: Path) -> None:
    (model, recorder, rows, state), (expected, stock, stock_rows, stock_state) = (
        fit(tmp_path, lean, kind, **CASES[name]) for lean in (True, False)
    )
    assert (recorder.lean, stock.lean) == ({True}, {False})
    assert len(stock.events) > 20
    assert recorder.events == stock.events
    assert equal(model.outputs, expected.outputs)
    assert equal(rows, stock_rows)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch"):
        assert equal(state[part], stock_state[part]), part


class ItsOwnStep(Model):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class ItsOwnStart(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class Manual(Model):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.network(batch[0]), batch[1]))
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        (ItsOwnStep, {}, "its own optimizer_step"),
        (ItsOwnStart, {}, "its own on_train_batch_start"),
        (Manual, {}, "manual optimization"),
        (Model, {"profiler": "simple"}, "SimpleProfiler"),
        (Model, {"precision": "64-true"}, "DoublePrecision"),
    ],
)
def test_a_run_with_something_unsupported_uses_the_stock_loop(
    kind: type[Model], options: dict[str, Any], what: str, tmp_path: Path
) -> None:
    reasons = []

    class Asking(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            reasons.append(unsupported(trainer))

    model, recorder, *_ = fit(tmp_path, True, kind, callbacks=[Asking()], **options)
    assert set(reasons) == {what}
    assert True not in recorder.lean
    expected = fit(tmp_path, False, kind, **options)[0]
    assert equal(model.state_dict(), expected.state_dict())


def test_another_release_of_lightning_uses_the_stock_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning.__version__", "2.7.0")
    assert fit(tmp_path, True)[1].lean == {False}


def test_steps_that_only_measure_batch_norm_use_the_stock_loop(tmp_path: Path) -> None:
    def run(lean: bool) -> Model:
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
        return fit(tmp_path, lean, Model, max_epochs=3, callbacks=[averaging])[0]

    assert equal(run(True).state_dict(), run(False).state_dict())


def test_the_stock_step_is_restored_after_an_exception(tmp_path: Path) -> None:
    class Failing(pl.Callback):
        def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
            self.loop = trainer.fit_loop.epoch_loop
            assert "advance" in vars(self.loop)
            raise RuntimeError("in the step")

    failing = Failing()
    with pytest.raises(RuntimeError, match="in the step"):
        fit(tmp_path, True, callbacks=[failing])
    assert "advance" not in vars(failing.loop)


def _rank(folder: str) -> dict[str, Tensor]:
    states = []
    for lean in (True, False):
        options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": True}
        callbacks = [GradientAccumulation(3)]
        model, recorder, *_ = fit(Path(folder), lean, Model, callbacks=callbacks, **options)
        assert recorder.lean == {lean}
        states.append(model.state_dict())
    assert equal(*states)
    return states[0]


def test_two_ranks_learn_the_same_either_way(tmp_path: Path) -> None:
    one, other = run_ranks(_rank, 2, str(tmp_path))
    assert equal(one, other)
