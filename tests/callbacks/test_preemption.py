"""A run that is told to stop ends in time on every rank, saved so that its resume ends with the bits of a whole run.

The signals are real, and come from the run's own callbacks at a known place: in the midst of an accumulation window, on
an epoch's last batch, in a validation. The answer of a life is its exit status, the places it went through, its scores
and the SHA-256 of its weights.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.lib.signals import Preempted, SignalFlag
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.end_to_end.test_exact_resume import BATCH_SIZE, TRAIN, VALIDATION, adamw, augment, hash_of
from tests.support.ranks import run_ranks
from tests.support.scontrol import BATCH, fake_scontrol
from tests.support.tables import CALLBACKS, QUIET, TOGETHER, Tiny, image_network, on_ranks, silence

EPOCHS = 3


Moment = tuple[str, int, int]
"""A hook ("train", "validation" or "test"), the epoch and the batch."""


class Alarm(pl.Callback):
    """Sends signals to its own process at some moment, once, and notes the moments."""

    def __init__(self, moment: Moment | None, signum: int) -> None:
        self.moment, self.signum, self.rung = moment, signum, 0.0
        self.places: list[Moment] = []

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._look(trainer, "train", args[2])

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._look(trainer, "validation", args[2])

    @override
    def on_test_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._look(trainer, "test", args[2])

    def _look(self, trainer: pl.Trainer, hook: str, batch: int) -> None:
        if trainer.sanity_checking:
            hook = "sanity"
        place = hook, trainer.current_epoch, batch
        self.places.append(place)
        if place == self.moment and not self.rung:
            self.rung = time.monotonic()
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
    silence()
    alarm, scores = Alarm(None, signum), Scores()
    checkpoint = ExactCheckpoint(folder, filename="best", monitor="val_loss" if early else None, save_last=True)
    stops = [EarlyStopping("val_loss", patience=EPOCHS)] if early else []
    callbacks = [*(CALLBACKS[name]() for name in names), scores, *stops, checkpoint, alarm]
    settings = (
        QUIET | {"max_epochs": EPOCHS, "enable_progress_bar": "RunProgress" in names} | on_ranks(world_size) | options
    )
    trainer = pl.Trainer(callbacks=callbacks, **settings)
    os.environ.update(slurm or {})  # Now: Lightning would take its ranks from Slurm.
    if rank is None or rank == trainer.global_rank:
        alarm.moment = moment
    rows = torch.arange(len(TRAIN[1]))
    train = TrainLoader(*TRAIN, rows, BATCH_SIZE, 1, trainer.global_rank, world_size, transform=augment)
    rows = torch.arange(len(VALIDATION[1]))
    validation = EvaluationLoader(*VALIDATION, rows, 2, trainer.global_rank, world_size)
    model = Tiny(image_network(dropout=0.3), adamw)
    last = folder / "last.ckpt"
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    status = 0
    try:
        trainer.fit(model, train, validation, ckpt_path=last if last.exists() else None, weights_only=True)
    except Preempted as stopped:
        status = int(stopped.code or 0)
        assert time.monotonic() - alarm.rung < 5 or not alarm.rung
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    return Life(status, hash_of(model), alarm.places, scores.scores)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...], int], list[Life]]:
    """Runs that nobody stopped, each made once."""

    @cache
    def run(names: tuple[str, ...], world_size: int) -> list[Life]:
        return run_ranks(live, world_size, names, world_size, tmp_path_factory.mktemp("whole"))

    return run


# The latter in windows of 2 and 3 micro-batches.
BARE = ("SeedControl", "Preemption")
ACCUMULATING = ("SeedControl", "GradientAccumulation", "Preemption")
Whole = Callable[[tuple[str, ...], int], list[Life]]


def stopped(
    names: tuple[str, ...], world_size: int, folder: Path, moment: Moment, whole: Whole, **options: Any
) -> Life:
    """The life of rank 0 that a signal ended; all ranks ended alike, and the run went on to the whole run's end."""
    first = run_ranks(live, world_size, names, world_size, folder, moment, **options)
    assert {life.status for life in first} == {128 + options.get("signum", signal.SIGTERM)}
    assert (folder / "last.ckpt").is_file()
    ends = run_ranks(live, world_size, names, world_size, folder)
    assert [end.sha256 for end in ends] == [end.sha256 for end in whole(names, world_size)]
    # A checkpoint holds rank 0's.
    assert ends[0].scores == whole(names, world_size)[0].scores
    again = set(first[0].places) & set(ends[0].places)
    assert {hook for hook, *_ in again} <= {"validation"}, "no batch is trained twice"
    trained = [place for place in first[0].places + ends[0].places if place[0] == "train"]
    assert trained == [place for place in whole(names, world_size)[0].places if place[0] == "train"]
    return first[0]


def test_a_signal_in_mid_window_ends_the_run_after_that_update(whole: Whole, tmp_path: Path) -> None:
    life = stopped(ACCUMULATING, 1, tmp_path, ("train", 1, 4), whole)
    assert life.places[-1] == ("train", 1, 5)


def test_a_signal_in_validation_ends_the_run_there_and_it_is_validated_again(whole: Whole, tmp_path: Path) -> None:
    life = stopped(BARE, 1, tmp_path, ("validation", 0, 2), whole)
    assert life.places[-1] == ("validation", 0, 2)


def test_a_signal_on_the_last_batch_ends_the_run_before_the_validation(whole: Whole, tmp_path: Path) -> None:
    life = stopped(BARE, 1, tmp_path, ("train", 1, 12), whole, signum=signal.SIGINT)
    assert life.places[-1] == ("train", 1, 12)


def test_a_signal_to_one_rank_ends_all_after_the_same_update(whole: Whole, tmp_path: Path) -> None:
    life = stopped(BARE, 2, tmp_path, ("train", 0, 3), whole, rank=1, signum=signal.SIGUSR1)
    assert life.places[-1] == ("train", 0, 4), "the flag is read one update later"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_wherever_a_signal_arrives_the_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(
    world_size: int, whole: Whole, tmp_path: Path
) -> None:
    last = 12 if world_size == 1 else 6
    moments: list[Moment] = [("train", 0, 0), ("train", 1, 5), ("train", 1, last), ("validation", 1, 1)]
    for number, moment in enumerate(moments):
        rank = (world_size - 1, None)[number % 2]
        stopped(TOGETHER, world_size, tmp_path / str(number), moment, whole, rank=rank)


def test_an_interrupted_validation_is_repeated_and_its_epoch_continues(tmp_path: Path) -> None:
    ends = []
    for name, moment in (("cut", ("validation", 1, 1)), ("cut", None), ("due", ("train", 1, 5)), ("due", None)):
        ends.append(run_ranks(live, 1, BARE, 1, tmp_path / name, moment, val_check_interval=6)[0])
    entire = run_ranks(live, 1, BARE, 1, tmp_path / "whole", val_check_interval=6)[0]
    assert [end.status for end in ends] == [143, 0, 143, 0]
    assert ends[1].places[0] == ends[3].places[0] == ("validation", 1, 0)
    assert ends[1][1:2] == ends[3][1:2] == entire[1:2]
    assert ends[1].scores == ends[3].scores == entire.scores


def test_before_the_first_update_nothing_is_saved(tmp_path: Path) -> None:
    for world_size in (1, 2):
        lives = run_ranks(
            live, world_size, BARE, world_size, tmp_path, ("sanity", 0, 0), rank=world_size - 1, num_sanity_val_steps=2
        )
        assert {life.status for life in lives} == {143}
        assert {place[0] for place in lives[0].places} == {"sanity"}
        assert not list(tmp_path.iterdir())


def test_a_signal_in_the_last_validation_keeps_the_test_from_beginning(tmp_path: Path) -> None:
    lives = run_ranks(live, 2, BARE, 2, tmp_path, ("validation", 2, 1), rank=1)
    assert {life.status for life in lives} == {143}
    # Too late to cut the validation on both ranks alike: all epochs are done, and saved.
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3 * 7


def _test_run(world_size: int) -> tuple[int, int]:
    silence()
    alarm = Alarm(("test", 0, 1) if int(os.environ.get("RANK", 0)) == world_size - 1 else None, signal.SIGTERM)
    options = QUIET | {"enable_progress_bar": False, "enable_checkpointing": False} | on_ranks(world_size)
    trainer = pl.Trainer(callbacks=[CALLBACKS["Preemption"](), alarm], **options)
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
    return [_forked(signum) for signum in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)]


def test_forked_workers_leave_signals_to_the_run_and_end_on_sigterm() -> None:
    assert run_ranks(_each_forked, 1) == [[(7, 0), (7, 0), (-signal.SIGTERM, 0)]]


def test_sigusr1_puts_a_batch_job_back_into_slurms_queue_once(tmp_path: Path) -> None:
    env = fake_scontrol(tmp_path) | BATCH | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    lives = run_ranks(
        live, 2, BARE, 2, tmp_path / "run", ("train", 0, 2), signum=int(signal.SIGUSR1), rank=1, slurm=env
    )
    assert [life.status for life in lives] == [138, 138]
    assert (tmp_path / "asked").read_text() == "requeue 70_3\n"
    assert (tmp_path / "run" / "last.ckpt").is_file()
