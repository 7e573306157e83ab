"""What we rely on of Lightning's private names holds in the installed release, and one file alone relies on it."""

import ast
import functools
import hashlib
import inspect
import re
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.fabric as fabric
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch.utils.data import DataLoader, TensorDataset

from callbacks.lib import lightning_internals as internals
from callbacks.update_loop import install_update_loop
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer

pytestmark = pytest.mark.lightning

ROOT = Path(__file__).parents[3]
FENCE = [
    ROOT / "datamodules/lightning.py",
    ROOT / "datamodules/lightning_package.py",
    ROOT / "callbacks/lib/lightning_internals.py",
    ROOT / "callbacks/lib/hook_calls.py",
    ROOT / "callbacks/lib/loaded_updates.py",
    ROOT / "callbacks/lib/results.py",
    ROOT / "callbacks/lib/update_step.py",
    ROOT / "callbacks/update_loop.py",
]


def loader(samples: int = 16) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*noisy_images(samples)), batch_size=4)


def tiny() -> Tiny:
    return Tiny(image_network().double(), torch.optim.SGD, lr=0.1)


def test_the_attached_trainer_is_none_before_a_run() -> None:
    module, trainer = tiny(), quiet_trainer()
    assert internals.attached_trainer(module) is None
    trainer.fit(module, loader())
    assert internals.attached_trainer(module) is trainer


def test_a_value_is_logged_as_in_the_running_hook() -> None:
    def log_as_at_the_epochs_end(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        vars(module)[internals.RUNNING_HOOK] = "on_train_epoch_end"
        module.log("mean", float(trainer.global_step))

    metrics: dict[str, Any] = {}
    hook = LambdaCallback(
        on_train_batch_end=lambda trainer, module, *_: log_as_at_the_epochs_end(trainer, module),
        on_train_end=lambda trainer, _: metrics.update(trainer.callback_metrics),
    )
    quiet_trainer(hook).fit(tiny(), loader())
    assert metrics["mean"] == 2.5  # Of 1 to 4; in a batch's hook the last value would stay.


@pytest.mark.parametrize(("reduce_fx", "ends"), [("mean", 3.0), ("sum", 21.0), ("max", 6.0), ("min", 1.0)])
def test_epoch_sums_continue_from_the_sums_of_all_ranks(reduce_fx: str, ends: float) -> None:
    found: list[Any] = []

    def go_on(trainer: pl.Trainer, _: Any) -> None:
        saved = [{"on_train_batch_end.x": [torch.tensor(value), torch.tensor(1)]} for value in (4.0, 6.0, 5.0)]
        install_update_loop(trainer).results.resume_from(trainer, saved)

    def log(trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if index := trainer.fit_loop.batch_idx:  # Not after the first batch.
            module.log("x", float(index), on_step=False, on_epoch=True, batch_size=2, reduce_fx=reduce_fx)
        means = internals.means_of_epoch(trainer) if install_update_loop(trainer).epoch_is_over else {}
        found.append((internals.epoch_sums(trainer), means))

    hooks = LambdaCallback(
        setup=lambda trainer, *_, **__: install_update_loop(trainer), on_train_start=go_on, on_train_batch_end=log
    )
    quiet_trainer(hooks).fit(tiny(), loader())
    assert [list(sums) for sums, _ in found] == [[], *[["on_train_batch_end.x"]] * 3]
    if reduce_fx == "mean":
        assert [[part.item() for part in sums["on_train_batch_end.x"]] for sums, _ in found[1:]] == [
            [17.0, 5],
            [21.0, 7],
            [27.0, 9],
        ]
    assert [set(means) for _, means in found] == [set(), set(), set(), {"x"}]
    assert found[-1][1]["x"].item() == pytest.approx(ends)


def test_saved_sums_end_with_their_epoch() -> None:
    def go_on(trainer: pl.Trainer, _: Any) -> None:
        saved = [{"on_train_batch_end.x": [torch.tensor(100.0), torch.tensor(1)]}]
        install_update_loop(trainer).results.resume_from(trainer, saved)

    def log(trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.current_epoch:
            module.log("x", 3.0, on_step=False, on_epoch=True, batch_size=2)

    hooks = LambdaCallback(
        setup=lambda trainer, *_, **__: install_update_loop(trainer), on_train_start=go_on, on_train_batch_end=log
    )
    trainer = quiet_trainer(hooks, max_epochs=2)
    trainer.fit(tiny(), loader())
    assert trainer.callback_metrics["x"] == 3.0


STEP = {
    (_TrainingEpochLoop, "advance"): "c7555c01",
    (_TrainingEpochLoop, "reset"): "0014631a",
    (_TrainingEpochLoop, "on_run_start"): "4993b0dc",
    (_TrainingEpochLoop, "on_advance_end"): "2d1ddaa4",
    (_TrainingEpochLoop, "update_lr_schedulers"): "7ea198b4",
    (_TrainingEpochLoop, "_should_check_val_fx"): "cf0916b1",
    (_TrainingEpochLoop, "_broadcast_sigterm_tensor"): "d4e504c3",
    (_TrainingEpochLoop, "done"): "ba06fbd8",
    (_AutomaticOptimization, "run"): "385b4373",
    (_AutomaticOptimization, "_optimizer_step"): "e196b2fa",
    (_AutomaticOptimization, "_make_closure"): "b4bd4534",
    (_AutomaticOptimization, "_make_step_fn"): "91e40ee2",
    (_AutomaticOptimization, "_make_zero_grad_fn"): "0f9b56ff",
    (_AutomaticOptimization, "_make_backward_fn"): "638ca477",
    (_AutomaticOptimization, "_on_before_zero_grad"): "b7f44d3a",
    (_AutomaticOptimization, "_optimizer_zero_grad"): "abd5876a",
    (_AutomaticOptimization, "_training_step"): "72e8f952",
    (Closure, "closure"): "9fb9a0ba",
    (Closure, "__call__"): "81937414",
    (Precision, "pre_backward"): "f94c53cf",
    (Precision, "backward"): "c45a6fcf",
    (Precision, "post_backward"): "26b545c1",
    (Precision, "_after_closure"): "395e9462",
    (Precision, "_wrap_closure"): "2d25ccda",
    (Precision, "optimizer_step"): "868b323a",
    (Strategy, "backward"): "627cfe60",
    (Strategy, "optimizer_step"): "ff24a509",
    (Strategy, "training_step"): "e0755d72",
    (Strategy, "batch_to_device"): "e7b211b0",
    (DDPStrategy, "pre_backward"): "a12899b8",
    (DDPStrategy, "post_backward"): "35d8d161",
    (DDPStrategy, "optimizer_step"): "e13a0ab8",
    (LightningOptimizer, "step"): "a080b1c5",
    (pl.LightningModule, "optimizer_step"): "f0727867",
    (pl.LightningModule, "clip_gradients"): "4d123da6",
    (pl.LightningModule, "_on_before_batch_transfer"): "4ccf3831",
    (_LoggerConnector, "on_batch_start"): "5022a98e",
    (_LoggerConnector, "on_batch_end"): "87c0a9cd",
    (_LoggerConnector, "update_train_step_metrics"): "44584c0c",
    (_ResultCollection, "log"): "57ea9185",
    (_ResultCollection, "update_metrics"): "61e950f1",
    (_ResultCollection, "reset"): "bb625eea",
    (call, "_call_callback_hooks"): "c413fb9a",
    (call, "_call_lightning_module_hook"): "558a87d0",
    (call, "_call_strategy_hook"): "ff429e3a",
}
"""Hashes of the methods that `UpdateLoop`, `LeanCalls` and `UpdateResults` replace, and of those that they build on."""


@pytest.mark.parametrize(("owner", "name"), STEP, ids=[f"{owner.__name__}.{name}" for owner, name in STEP])
def test_the_step_of_this_lightning_is_the_one_that_is_replaced(owner: Any, name: str) -> None:
    method = getattr(owner, name)
    text = inspect.getsource(getattr(method, "fget", method))
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == STEP[owner, name], (
        f"{name} has changed: compare it with callbacks/update_loop.py and callbacks/lib/hook_calls.py"
    )


def test_signal_handlers_are_kept_until_that_is_undone() -> None:
    seen: list[Any] = []
    note = LambdaCallback(on_train_start=lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
    before = signal.getsignal(signal.SIGTERM)
    trainer = quiet_trainer(note)
    undo = internals.keep_signal_handlers(trainer)
    trainer.fit(tiny(), loader())
    undo()
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(tiny(), loader())
    assert seen[0] == before
    assert seen[1] != before


def test_a_strategys_timeout_is_set() -> None:
    strategy = DDPStrategy(timeout=timedelta(seconds=7))
    assert internals.collective_timeout(strategy) == timedelta(seconds=7)
    internals.set_collective_timeout(strategy, timedelta(seconds=9))
    assert internals.collective_timeout(strategy) == timedelta(seconds=9)
    single = SingleDeviceStrategy("cpu")
    internals.set_collective_timeout(single, timedelta(seconds=9))
    assert internals.collective_timeout(single) is None


def test_a_loggers_writer_can_be_replaced(tmp_path: Path) -> None:
    logger, writer = TensorBoardLogger(str(tmp_path)), object()
    assert logger.experiment is not writer
    internals.set_writer(logger, writer)
    assert logger.experiment is writer


@pytest.mark.parametrize(
    ("settings", "within"),
    [
        ({}, False),
        ({"every_n_epochs": 2}, False),
        ({"every_n_train_steps": 3}, True),
        ({"train_time_interval": timedelta(minutes=1)}, True),
    ],
)
def test_a_checkpoint_callback_says_if_it_saves_within_epochs(settings: dict[str, Any], within: bool) -> None:
    assert internals.saves_within_epochs(ModelCheckpoint(**settings)) is within
    assert internals.saves_by_time(ModelCheckpoint(**settings)) == ("train_time_interval" in settings)


# One file alone


@pytest.mark.parametrize("part", ["callbacks", "training", "saving"])
def test_an_error_of_restoring_a_checkpoint_is_told_from_others(part: str, tmp_path: Path) -> None:
    class Fails(pl.Callback):
        """Fails where its state is restored, in training, or where a checkpoint is saved."""

        def state_dict(self) -> dict[str, Any]:
            return {"number": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if part == "callbacks":
                raise TypeError("a number was expected")

        def on_train_batch_start(self, *args: Any) -> None:
            if part == "training" and resuming:
                raise TypeError("a number was expected")

        def on_save_checkpoint(self, *args: Any) -> None:
            if part == "saving" and resuming:
                raise TypeError("a number was expected")

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "b.ckpt")

    resuming = False
    trainer = quiet_trainer(Fails())
    trainer.fit(tiny(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resuming = True
    with pytest.raises(TypeError) as raised:
        quiet_trainer(Fails(), max_epochs=2).fit(tiny(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert internals.raised_by_restoring(raised.value) == (part == "callbacks")


def private_names(text: str) -> set[str]:
    """The private attributes and methods that a module's classes have."""
    return {name or method for name, method in re.findall(r"self\.(_[a-z]\w*)|def (_[a-z]\w*)", text)}


@functools.cache
def names_of_lightning() -> set[str]:
    folders = [Path(str(package.__file__)).parent for package in (fabric, pl)]
    return set().union(*(private_names(file.read_text()) for folder in folders for file in folder.rglob("*.py")))


NAMES = (
    *("_accelerator_connector", "_broadcast_sigterm_tensor", "_call_callback_hooks", "_call_lightning_module_hook"),
    *("_call_strategy_hook", "_can_stop_early", "_combined_loader_states_to_load", "_computed"),
    *("_current_fx_name", "_data_source", "_defer_save_until_validation", "_every_n_train_steps"),
    *("_experiment", "_forked_name", "_forward_cache", "_get_cache"),
    *("_has_run", "_iteration_based_training", "_last_global_step_saved", "_load_combined_loader_states"),
    *("_logger_connector", "_model_averager", "_module_mode", "_monitor_candidates"),
    *("_on_before_batch_transfer", "_results", "_save_last_checkpoint", "_save_topk_checkpoint"),
    *(
        "_should_check_val_epoch",
        "_should_check_val_fx",
        "_should_save_on_train_epoch_end",
        "_should_skip_saving_checkpoint",
    ),
    *("_signal_connector", "_skip_backward", "_stage", "_state_dicts"),
    *("_store_dataloader_outputs", "_timeout", "_train_time_interval", "_trainer_fn"),
)
"""The private names of Lightning on which the files of the fence rely."""


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_exists_in_this_lightning(name: str) -> None:
    assert name in names_of_lightning(), f"{name} has moved: find what does its work now, and edit the files of FENCE"


OF_TORCH = {"_iterator", "_check_input_dim", "_version"}
"""Private names of torch's classes that Lightning has, too."""


def violations(code: str, theirs: set[str], ours: set[str], relied_on: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node.attr in theirs - OF_TORCH:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and node.attr in ours
            if not own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in relied_on:
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom) and "lightning" in (node.module or ""):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("_"))


def test_no_other_file_touches_a_private_name_of_lightning() -> None:
    files = [
        file for room in ("callbacks", "datamodules", "recipes", "benchmarks") for file in (ROOT / room).rglob("*.py")
    ]
    code = {file: file.read_text() for file in files if file not in FENCE}
    theirs, ours = names_of_lightning(), set().union(*map(private_names, code.values()))
    fence = [node for file in FENCE for node in ast.walk(ast.parse(file.read_text()))]
    words = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None) for node in fence}
    relied_on = {word for word in words if isinstance(word, str) and word.startswith("_")} & theirs
    assert set(NAMES) <= relied_on, "NAMES lists what no file of the fence relies on any more"
    found = [
        (str(file.relative_to(ROOT)), *where)
        for file, text in code.items()
        for where in violations(text, theirs, ours, relied_on)
    ]
    assert found == []


@pytest.mark.parametrize("asked", [True, False])
def test_a_trainer_says_whether_it_converts_batchnorm(asked: bool) -> None:
    trainer = quiet_trainer(strategy="ddp", sync_batchnorm=asked)
    assert internals.converts_batchnorm(trainer) == asked
