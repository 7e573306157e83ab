"""What we rely on of Lightning's private names holds in the installed release, and one file alone relies on it."""

import ast
import re
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops import _TrainingEpochLoop
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.utils.data import DataLoader, TensorDataset

from callbacks.lib import lightning_internals as internals
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, silence

ROOT = Path(__file__).parents[3]
FENCE = ROOT / "callbacks/lib/lightning_internals.py"


def loader(samples: int = 16) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*noisy_images(samples)), batch_size=4)


def tiny() -> Tiny:
    return Tiny(image_network().double(), torch.optim.SGD, lr=0.1)


def trainer_with(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    settings = {"max_epochs": 1, "enable_progress_bar": False, "enable_checkpointing": False} | QUIET | options
    return pl.Trainer(callbacks=list(callbacks), **settings)


def in_each_step(look: Callable[[pl.Trainer, pl.LightningModule], Any], **options: Any) -> list[Any]:
    """What `look` returns at the end of each training batch."""
    found: list[Any] = []
    hook = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: found.append(look(trainer, module)))
    trainer_with(hook, **options).fit(tiny(), loader())
    return found


def test_the_running_hook_is_an_entry_of_the_modules_dict() -> None:
    assert in_each_step(lambda _, module: vars(module)[internals.RUNNING_HOOK]) == ["on_train_batch_end"] * 4


def test_a_value_is_logged_as_in_the_running_hook() -> None:
    def log_as_at_the_epochs_end(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        vars(module)[internals.RUNNING_HOOK] = "on_train_epoch_end"
        module.log("mean", float(trainer.global_step))

    metrics: dict[str, Any] = {}
    hook = LambdaCallback(
        on_train_batch_end=lambda trainer, module, *_: log_as_at_the_epochs_end(trainer, module),
        on_train_end=lambda trainer, _: metrics.update(trainer.callback_metrics),
    )
    trainer_with(hook).fit(tiny(), loader())
    assert metrics["mean"] == 2.5  # Of 1 to 4; in a batch's hook the last value would stay.


def test_the_attached_trainer_is_none_before_a_run() -> None:
    module, trainer = tiny(), trainer_with()
    assert internals.attached_trainer(module) is None
    trainer.fit(module, loader())
    assert internals.attached_trainer(module) is trainer


def test_another_loop_is_told_from_the_standard_one() -> None:
    class OtherEpochs(_TrainingEpochLoop):
        pass

    class OtherUpdates(_AutomaticOptimization):
        pass

    trainer = trainer_with()
    assert internals.has_standard_training_loop(trainer)
    trainer.fit_loop.epoch_loop.automatic_optimization = OtherUpdates(trainer)
    assert not internals.has_standard_training_loop(trainer)
    trainer = trainer_with()
    trainer.fit_loop.epoch_loop = OtherEpochs(trainer)
    assert not internals.has_standard_training_loop(trainer)


def test_a_step_knows_the_last_batch_and_whether_it_accumulates() -> None:
    def look(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[bool, bool]:
        step = internals.StepInternals(trainer)
        return step.accumulates(), step.is_last_batch()

    expected = [(True, False), (True, False), (False, False), (False, True)]
    assert in_each_step(look, accumulate_grad_batches=3) == expected


def test_a_step_knows_whether_backward_is_skipped() -> None:
    found: list[bool] = []

    def look(trainer: pl.Trainer, *_: Any) -> None:
        found.append(internals.StepInternals(trainer).skips_backward())

    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
    trainer_with(averaging, LambdaCallback(on_train_batch_end=look), max_epochs=2).fit(tiny(), loader())
    assert found == [False] * 8 + [True] * 4


def test_a_step_moves_a_batch_through_the_modules_hooks() -> None:
    class Doubling(Tiny):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [2 * batch[0], batch[1]]

    module = Doubling(image_network().double(), torch.optim.SGD, lr=0.1)
    found: list[Any] = []

    def look(trainer: pl.Trainer, *_: Any) -> None:
        found.append(internals.StepInternals(trainer).transfer_batch([torch.ones(1), 7], dataloader_idx=0))

    trainer_with(LambdaCallback(on_train_batch_end=look)).fit(module, loader())
    assert found[0] == [torch.full((1,), 2.0), 7]


def test_a_step_clips_gradients_as_the_trainer_is_told() -> None:
    def look(trainer: pl.Trainer, module: pl.LightningModule) -> float:
        step, optimizer = internals.StepInternals(trainer), trainer.optimizers[0]
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 100.0)
        step.clip_gradients(module, optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        return float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))

    assert in_each_step(look, gradient_clip_val=0.5) == [pytest.approx(0.5, rel=1e-5)] * 4


def test_a_step_logs_through_the_trainers_results() -> None:
    def look(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[bool, bool]:
        step = internals.StepInternals(trainer)
        before = step.logged()
        step.forget_batch()
        step.begin_batch_logs([torch.zeros(3)])
        module.log("value", 1.0, on_step=True)
        step.end_batch_logs()
        step.log_step()
        assert trainer.logged_metrics["value"] == 1.0
        return before, step.logged()

    assert in_each_step(look, log_every_n_steps=1)[0] == (False, True)


def test_warnings_of_steps_without_batch_or_loss_are_given_once() -> None:
    def look(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        internals.StepInternals(trainer).warn_of_missing_batch()
        internals.warn_of_step_without_loss()

    with pytest.warns(UserWarning, match="yielded None") as caught:
        in_each_step(look)
    assert sum("yielded None" in str(warning.message) for warning in caught) == 1
    assert any("returned `None`" in str(message) for message in Closure.warning_cache)


def _sigterm_of_rank_0(_: str) -> str:
    silence()

    def look(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank == 0:
            trainer.received_sigterm = True  # type: ignore[misc]
        internals.StepInternals(trainer).broadcast_sigterm()

    pl.Trainer.received_sigterm = False  # type: ignore[misc, assignment]
    try:
        in_each_step(look, strategy="ddp", devices=2)
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def test_a_sigterm_of_rank_0_reaches_the_other_ranks() -> None:
    assert run_ranks(_sigterm_of_rank_0, 2, "") == ["SIGTERMException"] * 2


def test_the_output_of_a_step_is_divided_by_the_factor() -> None:
    loss = torch.tensor(3.0, requires_grad=True)
    result = internals.TrainingStepResult.from_training_step_output({"loss": loss, "count": 5}, 2)
    assert result.closure_loss is not None
    assert result.closure_loss.requires_grad
    assert result.asdict() == {"loss": torch.tensor(1.5), "count": 5}
    assert result.loss is not None
    assert not result.loss.requires_grad


def test_training_is_done_at_max_steps_and_at_the_last_batch() -> None:
    def look(trainer: pl.Trainer, _: pl.LightningModule) -> bool:
        return internals.training_is_done(trainer)

    assert in_each_step(look) == [False, False, False, True]
    assert in_each_step(look, max_steps=2, max_epochs=-1) == [False, True]


def test_a_run_with_max_steps_is_resumed_at_an_epochs_end_as_one_with_epochs(tmp_path: Path) -> None:
    def ends(mended: bool) -> list[int]:
        path, seen = tmp_path / f"{mended}.ckpt", []

        def save(trainer: pl.Trainer, _: pl.LightningModule) -> None:
            if trainer.current_epoch == 0 and not path.exists():
                trainer.save_checkpoint(path)

        def mend(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            if mended:
                internals.resume_max_steps_at_epoch_end(trainer)

        note = LambdaCallback(on_train_epoch_end=lambda trainer, _: seen.append(trainer.current_epoch), setup=mend)
        options: dict[str, Any] = {"max_epochs": -1, "max_steps": 8}
        trainer_with(LambdaCallback(on_train_epoch_end=save), **options).fit(tiny(), loader())
        trainer_with(note, **options).fit(tiny(), loader(), ckpt_path=path)
        return seen

    assert ends(mended=True) == [1]
    assert ends(mended=False) == [0, 1]


def test_the_count_of_updates_is_in_the_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_with()
    trainer.fit(tiny(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loops = torch.load(tmp_path / "a.ckpt", weights_only=False)["loops"]["fit_loop"]
    internals.uncount_update(loops)
    trainer.fit_loop.load_state_dict(loops)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 3


def test_a_loader_is_new_where_a_module_makes_it() -> None:
    found: list[tuple[Any, bool]] = []
    hook = LambdaCallback(on_train_start=lambda trainer, _: found.append(internals.original_training_loader(trainer)))

    class WithLoader(Tiny):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

    passed = loader()
    trainer_with(hook).fit(tiny(), passed)
    trainer = trainer_with(hook)
    trainer.fit(WithLoader(image_network().double(), torch.optim.SGD, lr=0.1))
    assert found[0] == (passed, False)
    assert found[1][1]
    assert isinstance(found[1][0], DataLoader)
    assert found[1][0] is not trainer.train_dataloader


def test_lightning_installs_no_signal_handlers_until_that_is_undone() -> None:
    seen: list[Any] = []
    note = LambdaCallback(on_train_start=lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
    before = signal.getsignal(signal.SIGTERM)
    trainer = trainer_with(note)
    undo = internals.keep_signal_handlers(trainer)
    trainer.fit(tiny(), loader())
    undo()
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(tiny(), loader())
    assert seen[0] == before
    assert seen[1] != before


def test_a_strategys_timeout_is_read_and_set() -> None:
    strategy = DDPStrategy(timeout=timedelta(seconds=7))
    assert internals.collective_timeout(strategy) == timedelta(seconds=7)
    internals.set_collective_timeout(strategy, timedelta(seconds=9))
    assert internals.collective_timeout(strategy) == timedelta(seconds=9)
    single = SingleDeviceStrategy("cpu")
    internals.set_collective_timeout(single, timedelta(seconds=9))
    assert internals.collective_timeout(single) is None


def _timeout_of_group(_: str) -> bool:
    silence()
    strategy = DDPStrategy(process_group_backend="gloo")
    internals.set_collective_timeout(strategy, timedelta(seconds=47))
    found: list[Any] = []

    def look(*_: Any) -> None:
        group = torch.distributed.distributed_c10d._get_default_group()
        found.append(group._get_backend(torch.device("cpu")).options._timeout)

    trainer_with(LambdaCallback(on_train_start=look), strategy=strategy, devices=2).fit(tiny(), loader())
    return found == [timedelta(seconds=47)]


def test_the_timeout_that_is_set_is_that_of_the_process_group() -> None:
    assert run_ranks(_timeout_of_group, 2, "") == [True, True]


def test_a_strategy_that_averages_models_is_told_from_others() -> None:
    strategy = DDPStrategy()
    assert not internals.averages_models(strategy)
    assert not internals.averages_models(SingleDeviceStrategy("cpu"))
    strategy._model_averager = object.__new__(PeriodicModelAverager)
    assert internals.averages_models(strategy)


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
def test_a_checkpoint_callback_says_whether_it_saves_within_epochs(settings: dict[str, Any], within: bool) -> None:
    assert internals.saves_within_epochs(ModelCheckpoint(**settings)) is within


def test_a_checkpoint_callback_saves_when_told(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="top", save_last=True, every_n_epochs=100)
    trainer = trainer_with(checkpoint, enable_checkpointing=True)
    trainer.fit(tiny(), loader())
    for file in tmp_path.iterdir():
        file.unlink()
    internals.save_last(checkpoint, trainer)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_callback_saves_once_after_an_update(tmp_path: Path) -> None:
    saved: list[list[str]] = []

    def save(trainer: pl.Trainer, _: pl.LightningModule) -> None:
        for _ in range(2):
            internals.save_now_unless_saved(checkpoint, trainer)
            saved.append(sorted(file.name for file in tmp_path.iterdir()))
            for file in tmp_path.iterdir():
                file.unlink()

    checkpoint = ModelCheckpoint(tmp_path, filename="top", every_n_epochs=100)
    trainer_with(LambdaCallback(on_train_epoch_end=save), checkpoint, enable_checkpointing=True).fit(tiny(), loader())
    assert saved == [["top.ckpt"], []]


@pytest.mark.parametrize("epoch", [0, 1])
def test_training_loaders_start_again_behind_the_batches_that_are_skipped(epoch: int) -> None:
    found: list[Any] = []

    def restart(trainer: pl.Trainer, _: Any) -> None:
        if trainer.current_epoch == epoch:
            internals.restart_training_loaders(trainer, skip=1, seed=found.append)
            fetcher: Any = trainer.fit_loop._data_fetcher
            found.append((len(next(fetcher)[0][1]), fetcher.fetched))
            iter(fetcher)

    trainer = trainer_with(LambdaCallback(on_train_epoch_start=restart), max_epochs=2)
    trainer.fit(tiny(), loader(6))
    assert found == [trainer, (2, 1)]


# One file alone


def private_names(text: str) -> set[str]:
    """The private attributes and methods that a module's classes have."""
    return {name or method for name, method in re.findall(r"self\.(_[a-z]\w*)|def (_[a-z]\w*)", text)}


def names_of_lightning() -> set[str]:
    folders = [Path(str(package.__file__)).parent for package in (lightning.fabric, lightning.pytorch)]
    return set().union(*(private_names(file.read_text()) for folder in folders for file in folder.rglob("*.py")))


OF_TORCH = {"_iterator", "_check_input_dim"}
"""Private names of torch's classes that Lightning has, too."""


def violations(code: str, theirs: set[str], ours: set[str], relied_on: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node.attr in theirs - OF_TORCH:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and node.attr in ours
            if not own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in relied_on:
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("_"))


def test_no_other_file_touches_a_private_name_of_lightning() -> None:
    files = [
        file for room in ("callbacks", "datamodules", "recipes", "benchmarks") for file in (ROOT / room).rglob("*.py")
    ]
    code = {file: file.read_text() for file in files if file != FENCE}
    theirs, ours = names_of_lightning(), set().union(*map(private_names, code.values()))
    fence = ast.walk(ast.parse(FENCE.read_text()))
    words = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None) for node in fence}
    relied_on = {word for word in words if isinstance(word, str) and word.startswith("_")} & theirs
    assert {"_trainer", "_current_fx_name", "_timeout"} <= relied_on
    found = [
        (str(file.relative_to(ROOT)), *where)
        for file, text in code.items()
        for where in violations(text, theirs, ours, relied_on)
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "trainer._signal_connector.register_signal_handlers()",
        "self._experiment = writer",
        "getattr(self, '_trainer', None)",
        "from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop",
    ],
)
def test_the_search_finds_each_kind_of_use(code: str) -> None:
    assert list(violations(code, names_of_lightning(), set(), {"_trainer"}))
