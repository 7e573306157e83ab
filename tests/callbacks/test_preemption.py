"""A run that is told to stop ends in time on every rank, saved so that its resume ends with the bits of a whole run.

The signals are real, and come from the run's own callbacks at a known place: in the midst of an accumulation window, on
an epoch's last batch, in a validation. The answer of a life is its exit status, the places it went through, its scores
and the SHA-256 of its weights.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.lib.lightning_internals import callbacks_of, set_callbacks
from callbacks.lib.signals import Preempted, SignalFlag
from callbacks.preemption import Preemption, newest_checkpoint
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.end_to_end.test_exact_resume import BATCH_SIZE, TRAIN, VALIDATION, adamw, augment, hash_of
from tests.support.ranks import run_ranks
from tests.support.scontrol import BATCH, fake_scontrol
from tests.support.tables import CALLBACKS, TOGETHER, Tiny, image_network, quiet_trainer

EPOCHS = 3


Moment = tuple[str, int, int]
"""A hook ("train", "validation" or "test"), the epoch and the batch."""


class Alarm(pl.Callback):
    """Sends signals to its own process at some moment, once, and notes the moments."""

    def __init__(self, moment: Moment | None, signum: int) -> None:
        self.moment, self.signum, self.rung = moment, signum, False
        self.places: list[Moment] = []
        for hook in ("train", "validation", "test"):
            setattr(self, f"on_{hook}_batch_start", partial(self._look, hook))

    def _look(self, hook: str, trainer: pl.Trainer, *args: Any) -> None:
        place = "sanity" if trainer.sanity_checking else hook, trainer.current_epoch, args[2]
        self.places.append(place)
        if place == self.moment and not self.rung:
            self.rung = True
            os.kill(os.getpid(), self.signum)


class Life(NamedTuple):
    """How a life of a run ended: status 0 at the run's end, with the SHA-256 of its weights."""

    status: int
    sha256: str
    places: list[tuple[str, int, int]]
    scores: list[float]


class Scores(pl.Callback):
    """Every validation's score, kept over resumes."""

    def __init__(self) -> None:
        self.scores: list[float] = []

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.scores.append(float(trainer.callback_metrics["val_loss"]))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = list(state_dict["scores"])


def live(
    names: tuple[str, ...],
    world_size: int,
    folder: Path,
    moment: Moment | None = None,
    signum: int = signal.SIGTERM,
    rank: int | None = 0,
    early: bool = True,
    slurm: dict[str, str] | None = None,
    **options: Any,
) -> Life:
    """One life of a run, from its last checkpoint on, in which a rank (or each of them) gets a signal."""
    alarm, scores = Alarm(None, signum), Scores()
    checkpoint = ExactCheckpoint(folder, filename="best", monitor="val_loss" if early else None, save_last=True)
    stops = [EarlyStopping("val_loss", patience=EPOCHS)] if early else []
    callbacks = [*(CALLBACKS[name]() for name in names), scores, *stops, checkpoint, alarm]
    trainer = quiet_trainer(*callbacks, world_size=world_size, max_epochs=EPOCHS, **options)
    os.environ.update(slurm or {})  # Now: Lightning would take its ranks from Slurm.
    if rank is None or rank == trainer.global_rank:
        alarm.moment = moment
    rank_of = trainer.global_rank, world_size
    train = TrainLoader(*TRAIN, torch.arange(len(TRAIN[1])), BATCH_SIZE, 1, *rank_of, transform=augment)
    validation = EvaluationLoader(*VALIDATION, torch.arange(len(VALIDATION[1])), 2, *rank_of)
    model = Tiny(image_network(dropout=0.3), adamw)
    last = folder / "last.ckpt"
    before, status = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)], 0
    try:
        trainer.fit(model, train, validation, ckpt_path=last if last.exists() else None, weights_only=True)
    except Preempted as stopped:
        status = int(stopped.code or 0)
        assert not alarm.rung or len(alarm.places) - alarm.places.index(moment) <= 4
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    return Life(status, hash_of(model), alarm.places, scores.scores)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...], int], list[Life]]:
    """Runs that nobody stopped, each made once."""

    @cache
    def run(names: tuple[str, ...], world_size: int) -> list[Life]:
        return run_ranks(live, world_size, names, world_size, tmp_path_factory.mktemp("whole"))

    return run


BARE = ("SeedControl", "Preemption")
ACCUMULATING = ("SeedControl", "GradientAccumulation", "Preemption")
Whole = Callable[[tuple[str, ...], int], list[Life]]


@pytest.mark.parametrize(
    ("names", "world_size", "moment", "last", "options"),
    [
        pytest.param(ACCUMULATING, 1, ("train", 1, 2), ("train", 1, 2), {}, id="within an update, after it"),
        pytest.param(BARE, 1, ("validation", 0, 2), ("validation", 0, 2), {}, id="in validation, there"),
        pytest.param(BARE, 1, *[("train", 1, 12)] * 2, {"signum": signal.SIGINT}, id="last batch, before validation"),
        # The flag is read one update later.
        pytest.param(
            BARE, 2, ("train", 0, 3), ("train", 0, 4), {"rank": 1, "signum": signal.SIGUSR1}, id="to one rank of two"
        ),
        *(
            pytest.param(TOGETHER, world_size, moment, None, {"rank": rank}, marks=pytest.mark.slow)
            for world_size, last in ((1, 6), (2, 3))
            for moment, rank in (
                (("train", 0, 0), world_size - 1),
                (("train", 1, 2), None),
                (("train", 1, last), world_size - 1),
                (("validation", 1, 1), None),
            )
        ),
    ],
)
def test_a_run_stopped_by_a_signal_resumes_to_the_same_end(
    names: tuple[str, ...],
    world_size: int,
    moment: Moment,
    last: Moment | None,
    options: dict[str, Any],
    whole: Whole,
    tmp_path: Path,
) -> None:
    first = run_ranks(live, world_size, names, world_size, tmp_path, moment, **options)
    assert {life.status for life in first} == {128 + options.get("signum", signal.SIGTERM)}
    assert last in (None, first[0].places[-1])
    assert (tmp_path / "last.ckpt").is_file()
    ends = run_ranks(live, world_size, names, world_size, tmp_path)
    assert [end.sha256 for end in ends] == [end.sha256 for end in whole(names, world_size)]
    # A checkpoint holds rank 0's.
    assert ends[0].scores == whole(names, world_size)[0].scores
    again = set(first[0].places) & set(ends[0].places)
    assert {hook for hook, *_ in again} <= {"validation"}, "no batch is trained twice"
    trained = [place for place in first[0].places + ends[0].places if place[0] == "train"]
    assert trained == [place for place in whole(names, world_size)[0].places if place[0] == "train"]


def test_an_interrupted_validation_is_repeated(tmp_path: Path) -> None:
    ends = []
    for name, moment in (("cut", ("validation", 1, 1)), ("cut", None), ("due", ("train", 1, 5)), ("due", None)):
        ends.append(run_ranks(live, 1, BARE, 1, tmp_path / name, moment, val_check_interval=6)[0])
    entire = run_ranks(live, 1, BARE, 1, tmp_path / "whole", val_check_interval=6)[0]
    assert [end.status for end in ends] == [143, 0, 143, 0]
    assert ends[1].places[0] == ends[3].places[0] == ("validation", 1, 0)
    assert ends[1][1:2] == ends[3][1:2] == entire[1:2]
    assert ends[1].scores == ends[3].scores == entire.scores
    run_ranks(live, 1, BARE, 1, tmp_path / "other", ("validation", 1, 1), val_check_interval=6)
    other = run_ranks(live, 1, BARE, 1, tmp_path / "other", val_check_interval=4)[0]
    assert other.places[0] == ("validation", 1, 0), "also where no validation would be due"


def test_before_the_first_update_nothing_is_saved(tmp_path: Path) -> None:
    for world_size in (1, 2):
        lives = run_ranks(
            live, world_size, BARE, world_size, tmp_path, ("sanity", 0, 0), rank=world_size - 1, num_sanity_val_steps=2
        )
        assert {life.status for life in lives} == {143}
        assert {place[0] for place in lives[0].places} == {"sanity"}
        assert not list(tmp_path.iterdir())


def test_a_signal_in_the_last_validation_prevents_the_test(tmp_path: Path) -> None:
    lives = run_ranks(live, 2, BARE, 2, tmp_path, ("validation", 2, 1), rank=1)
    assert {life.status for life in lives} == {143}
    # Too late to cut the validation on both ranks alike: all epochs are done, and saved.
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3 * 7


def _test_run(world_size: int) -> tuple[int, int]:
    alarm = Alarm(("test", 0, 1) if int(os.environ.get("RANK", 0)) == world_size - 1 else None, signal.SIGTERM)
    trainer = quiet_trainer(CALLBACKS["Preemption"](), alarm, world_size=world_size)
    model = Tiny(image_network(), adamw)
    model.test_step = model.validation_step  # type: ignore[method-assign]
    loader = EvaluationLoader(*TRAIN, torch.arange(50), BATCH_SIZE, trainer.global_rank, world_size)
    with pytest.raises(Preempted) as ended:
        trainer.test(model, loader, verbose=False)
    return int(ended.value.code or 0), alarm.places[-1][2]


def test_a_test_ends_at_the_next_batch_on_all_ranks() -> None:
    assert run_ranks(_test_run, 1, 1) == [(143, 1)]
    # The vote is heard one batch later.
    assert run_ranks(_test_run, 2, 2) == [(143, 2), (143, 2)]


class Late(Tiny):
    """Gets SIGTERM in a hook of its own, which Lightning calls after those of all callbacks."""

    def __init__(self, hook: str, killed: bool) -> None:
        super().__init__(image_network(), adamw)
        setattr(self, hook, lambda: os.kill(os.getpid(), signal.SIGTERM) if killed else None)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


LAST_HOOKS = {"on_train_end": "fit", "on_fit_end": "fit", "on_validation_end": "validate", "on_predict_end": "predict"}


def _signal_in(world_size: int) -> dict[str, tuple[int, bool]]:
    """The status of each Trainer's end, and whether the training counts as done, for a signal to the last rank."""
    ends = {}
    for hook, name in LAST_HOOKS.items():
        trainer = quiet_trainer(CALLBACKS["Preemption"](), world_size=world_size)
        data = TensorDataset(*(values[:8] for values in TRAIN))
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(Preempted) as ended:
            getattr(trainer, name)(Late(hook, trainer.global_rank == world_size - 1), DataLoader(data, BATCH_SIZE))
        assert signal.getsignal(signal.SIGTERM) == before
        ends[hook] = int(ended.value.code or 0), ended.value.trained
    return ends


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_in_the_last_hook_ends_the_program(world_size: int) -> None:
    expected = {hook: (143, name == "fit") for hook, name in LAST_HOOKS.items()}
    assert run_ranks(_signal_in, world_size, world_size) == [expected] * world_size


class Stream(IterableDataset[Any]):
    """Samples of a data set without a length, whose loader has no position."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*TRAIN, strict=True)


def stream(folder: Path, moment: Moment | None = None, resume: Path | None = None, **options: Any) -> tuple[Any, str]:
    """Where the last checkpoint of a run is, and the hash of its weights."""
    checkpoint = ExactCheckpoint(folder, save_last=True, **options)
    callbacks = [CALLBACKS["SeedControl"](), checkpoint, CALLBACKS["Preemption"](), Alarm(moment, signal.SIGTERM)]
    trainer = quiet_trainer(*callbacks, max_epochs=EPOCHS)
    model = Tiny(image_network(dropout=0.3), adamw)
    validation = DataLoader(TensorDataset(*VALIDATION), 4)
    with contextlib.suppress(Preempted):
        trainer.fit(model, DataLoader(Stream(), BATCH_SIZE), validation, ckpt_path=resume, weights_only=True)
    last = folder / "last.ckpt"
    return torch.load(last, weights_only=True)["global_step"] if last.exists() else None, hash_of(model)


@pytest.mark.parametrize(
    ("moment", "saved"),
    [
        pytest.param(("train", 0, 2), None, id="in the first epoch"),
        pytest.param(("train", 1, 2), 13, id="in the second epoch"),
        pytest.param(("validation", 1, 0), 26, id="in an epoch's last validation"),
    ],
)
def test_what_cannot_be_resumed_is_not_saved_over_what_can(
    moment: Moment, saved: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert stream(tmp_path / "run", moment)[0] == saved
    kept = f" since {tmp_path / 'run' / 'last.ckpt'}" if saved else ""
    problem = f"nothing was saved{kept}, because a run that is saved within this epoch cannot resume: the order of this"
    assert (problem in caplog.text) == (moment[0] == "train")
    last = tmp_path / "run" / "last.ckpt"
    assert stream(tmp_path / "run", resume=last if saved else None) == stream(tmp_path / "whole")


@pytest.mark.parametrize(
    ("signum", "save_last", "line"),
    [
        pytest.param(signal.SIGTERM, True, "SIGTERM after update 3: saved {}", id="a signal"),
        pytest.param(signal.SIGINT, True, "Ctrl-C after update 3: saved {}", id="the keyboard"),
        pytest.param(signal.SIGTERM, "link", "SIGTERM after update 3: saved {}", id="in place of a link"),
        pytest.param(signal.SIGTERM, None, "SIGTERM after update 3: nothing was saved", id="without checkpoints"),
    ],
)
def test_the_line_of_a_stop_names_what_was_saved(
    signum: int, save_last: Any, line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    saves = [ExactCheckpoint(tmp_path, "best", every_n_train_steps=2, save_last=save_last)] if save_last else []
    trainer = quiet_trainer(*saves, Preemption(), Alarm(("train", 0, 2), signum))
    loader = TrainLoader(*TRAIN, torch.arange(len(TRAIN[1])), BATCH_SIZE, 1)
    with pytest.raises(Preempted) as ended:
        trainer.fit(Tiny(image_network(), adamw), loader)
    assert ended.value.code == 128 + signum
    assert caplog.messages[-1] == line.format(tmp_path / "last.ckpt")
    asks = "Ctrl-C: saving after this update; press it again to end at once"
    assert (asks in capfd.readouterr().err) == (signum == signal.SIGINT)
    if save_last:
        steps = [torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["global_step"] for name in ("best", "last")]
        assert steps == [2, 3]


def test_the_newest_checkpoint_is_one_that_was_written() -> None:
    scored, newest = ModelCheckpoint(monitor="val_loss"), ModelCheckpoint(save_last=True)
    trainer: Any = quiet_trainer(scored, newest)
    assert newest_checkpoint(trainer) is None
    trainer.strategy.checkpoint_io.failures = failures = {}
    scored.best_model_path, newest.best_model_path, newest.last_model_path = "scored", "newest", "last"
    trainer.ckpt_path = "resumed"
    for path in ("last", "newest", "resumed", "scored"):  # The best by a score may be the oldest.
        assert newest_checkpoint(trainer) == path
        failures[path] = "No space left on device"
    assert newest_checkpoint(trainer) is None


def test_a_run_that_another_callback_saves_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Replace(pl.Callback):
        """Takes the checkpoint callbacks out, as a library's does."""

        @override
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            others = [callback for callback in callbacks_of(trainer) if not isinstance(callback, ModelCheckpoint)]
            set_callbacks(trainer, [*others, ModelCheckpoint(tmp_path)])

    data = DataLoader(TensorDataset(*(values[:8] for values in TRAIN)), BATCH_SIZE)
    for guards, replacing in ((["Preemption"], 1), (["Preemption", "CheckpointGuard"], 1), (["CheckpointGuard"], 0)):
        caplog.clear()
        others = [CALLBACKS[name]() for name in guards]
        trainer = quiet_trainer(*[Replace()] * replacing, ExactCheckpoint(tmp_path), *others)
        trainer.fit(Tiny(image_network(), adamw), data)
        assert caplog.text.count("no ExactCheckpoint saves this run, but ModelCheckpoint, so a") == replacing


def _forked(signum: int) -> tuple[int, int]:
    """The status of a forked process after a signal, and what was noted here."""
    flag = SignalFlag()
    flag.install()
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writer, b"here")  # Python drops signals that arrive before it has come to itself in the child.
        time.sleep(0.5)
        os._exit(7)
    os.read(reader, 4)
    os.kill(pid, signum)
    status = os.waitpid(pid, 0)[1]
    flag.restore()
    return os.waitstatus_to_exitcode(status), flag.received


def _each_forked() -> list[tuple[int, int]]:
    return [_forked(signum) for signum in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM)]


def test_forked_workers_leave_signals_to_the_run() -> None:
    assert run_ranks(_each_forked, 1) == [[(7, 0)] * 3 + [(-signal.SIGTERM, 0)]]


def _hung_up() -> list[int]:
    """What was noted of a SIGHUP that is ignored, and of one after which the terminal is no longer there."""
    received, flag = [], SignalFlag()
    terminal, end = os.openpty()
    os.dup2(end, 2)
    os.close(terminal)
    for before in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGHUP, before)
        flag.install()
        os.kill(os.getpid(), signal.SIGHUP)
        received.append(flag.received)
        flag.restore()
    os.write(2, b"saved")
    return received


def test_a_closed_terminal_is_no_longer_written_to() -> None:
    assert run_ranks(_hung_up, 1) == [[0, signal.SIGHUP]]


@pytest.mark.parametrize(
    ("exception", "agreed", "status"),
    [
        pytest.param(Preempted(signal.SIGTERM), True, 0, id="after they have agreed to stop"),
        pytest.param(Preempted(signal.SIGTERM), False, -signal.SIGKILL, id="before they have agreed"),
        pytest.param(ValueError(), True, None, id="on another exception"),
    ],
)
def test_the_processes_of_lightnings_launcher_end_with_a_stop(
    exception: BaseException, agreed: bool, status: int | None
) -> None:
    preemption, trainer, model = Preemption(), quiet_trainer(), Tiny(image_network(), adamw)
    preemption._stopping = agreed
    launcher: Any = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
    trainer.strategy._launcher = launcher
    with subprocess.Popen(["sleep", "0.5" if status == 0 else "60"]) as child:
        launcher.procs = [child]
        preemption.on_exception(trainer, model, exception)
        ended = child.poll()
        child.kill()
    assert ended == status
    assert launcher.procs == ([child] if status is None else [])


def test_sigusr1_puts_a_batch_job_back_into_slurms_queue_once(tmp_path: Path) -> None:
    env = fake_scontrol(tmp_path) | BATCH | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    lives = run_ranks(
        live, 2, BARE, 2, tmp_path / "run", ("train", 0, 2), signum=int(signal.SIGUSR1), rank=1, slurm=env
    )
    assert [life.status for life in lives] == [138, 138]
    assert (tmp_path / "asked").read_text() == "requeue 70_3\n"
    assert (tmp_path / "run" / "last.ckpt").is_file()
