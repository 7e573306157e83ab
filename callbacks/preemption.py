"""Exact save and end of a run on all ranks, after a signal to any of them.

Schedulers send SIGTERM or SIGUSR1 some seconds before they kill a job, to one process or to all. Ctrl-C sends SIGINT,
and closing the terminal sends SIGHUP.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import warn_of_other_checkpoints
from callbacks.checkpointing.replay import resumes_within_epoch
from callbacks.checkpointing.stopping_points import (
    SAVE_POINTS,
    SavePoint,
    move_counters,
    save_point_after_update,
    trains,
)
from callbacks.checkpointing.verified_io import CheckpointGuard
from callbacks.lib.lightning_internals import (
    OneLightningCallback,
    callbacks_of,
    collective_timeout,
    keep_signal_handlers,
    save_newest,
    surround_callbacks,
)
from callbacks.lib.ranks import FlagAllReduce
from callbacks.lib.signals import Preempted, SignalFlag, name_of, requeue_on
from callbacks.update_loop import UpdateLoop, install_update_loop
from datamodules.lightning import LambdaCallback, ModelCheckpoint, WeightAveraging, pl
from datamodules.notes import warn

_CHILDREN_EXIT = 20.0  # Seconds for the processes that Lightning started; torchrun and Slurm kill after 30.


def evaluation_batches(trainer: pl.Trainer) -> float:
    """Return the number of batches of this rank in the evaluation that starts; 0 if it is unknown."""
    name = "val"
    if trainer.sanity_checking:
        name = "sanity_val"
    elif trainer.testing:
        name = "test"
    elif trainer.predicting:
        name = "predict"
    numbers: Any = getattr(trainer, f"num_{name}_batches")
    total = sum(numbers) if isinstance(numbers, list) else numbers
    return float(total) if total != float("inf") else 0.0


def _checkpoint_callbacks(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    """Return the callbacks that save, those with a ``last.ckpt`` first."""
    checkpoints = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return sorted(checkpoints, key=lambda checkpoint: not checkpoint.save_last)


def _failures(trainer: pl.Trainer) -> Mapping[str, str]:
    """Return the files that could not be written: `VerifiedCheckpointIO` raises no error, but lists them."""
    failures: Mapping[str, str] = getattr(trainer.strategy.checkpoint_io, "failures", {})
    return failures


def newest_checkpoint(trainer: pl.Trainer) -> str | None:
    """Return the last checkpoint of a run, or the one that it has resumed from; None if there is none."""
    checkpoints = _checkpoint_callbacks(trainer)
    last = [checkpoint.last_model_path for checkpoint in checkpoints]
    # Without a score the best one is the newest.
    newest = [checkpoint.best_model_path for checkpoint in checkpoints if checkpoint.monitor is None]
    of_scores = [checkpoint.best_model_path for checkpoint in checkpoints if checkpoint.monitor is not None]
    paths = [*last, *newest, trainer.ckpt_path, *of_scores]
    return next((str(path) for path in paths if path and str(path) not in _failures(trainer)), None)


def save_now(trainer: pl.Trainer, place: SavePoint) -> str | None:
    """Save the run as its `last.ckpt`, whatever the interval of its checkpoint callback; a collective call.

    Returns:
        The path; None if the run keeps no checkpoints or the file could not be written.
    """
    checkpoint = next(iter(_checkpoint_callbacks(trainer)), None)
    if checkpoint is None or getattr(trainer, "fast_dev_run", False):
        return None
    if place == "validation":
        for callback in callbacks_of(trainer):
            if isinstance(callback, WeightAveraging):
                # During a validation it has the average in the module: this hook puts the trained weights back.
                callback.on_validation_epoch_end(trainer, trainer.lightning_module)
    last = Path(checkpoint.last_model_path)
    if trainer.is_global_zero and last.is_symlink():
        last.unlink()  # With save_last="link" a write would overwrite the checkpoint behind the link.
    save_newest(checkpoint, trainer)
    return None if checkpoint.last_model_path in _failures(trainer) else checkpoint.last_model_path


def end_children(trainer: pl.Trainer, patience: float) -> None:
    """Wait for the processes that Lightning's launcher started here, and kill them after `patience` seconds."""
    processes: list[subprocess.Popen[bytes]] = getattr(trainer.strategy.launcher, "procs", [])
    children = list(processes)
    # Lightning's observer of these processes kills this process as well when one of them ends with an error status.
    processes.clear()
    deadline = time.monotonic() + patience
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _disable_sigterm_broadcast(loop: UpdateLoop) -> Callable[[], None]:
    """Disable Lightning's broadcast of SIGTERM in each update; return a function to undo it."""
    loop.watches_sigterm = False

    def undo() -> None:
        loop.watches_sigterm = True

    return undo


class Preemption(OneLightningCallback):
    """Callback that saves and ends a run after the current update, when a rank gets SIGTERM, SIGUSR1, SIGHUP or Ctrl-C.

    A signal only sets a flag. The ranks all-reduce the flag at the end of each update; on several ranks its result
    is known one update later. Then all ranks save `last.ckpt` through the run's checkpoint callback and raise
    `Preempted`, which ends each process with 128 + the signal's number: 143, 138, 129, 130. A resumed run continues
    there bit for bit. During a validation they save the state before it. Within an epoch they save only if the training
    loader resumes there; otherwise the checkpoint of the last epoch's end stays. `trainer.validate`, `test` and
    `predict` end at the next batch. Before the first update nothing is saved. A signal that arrives after the last
    update or batch, in the last hooks, ends the program as well. A second Ctrl-C ends the process at once.

    On SIGUSR1 a batch job of Slurm is requeued before any rank exits (``#SBATCH --signal=USR1@90`` sends
    it in time). A run validates and stops after complete updates, as with `ExactCheckpoint`.

    Runs on: the end of each update, the start and the batches of each evaluation, the start of each epoch,
    `on_train_end`, `teardown`. It is the last callback there, so a checkpoint includes the changes of the others.

    Raises:
        Preempted: on every rank after a signal; a subclass of SystemExit.

    Example:
        >>> trainer = pl.Trainer(callbacks=[Preemption()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        super().__init__()
        self._flag = SignalFlag()
        self._has_other_ranks = False
        self._undo: list[Callable[[], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._ranks: FlagAllReduce | None = None
        self._stop_requested = False
        self._place: SavePoint | None = None
        self._stopping = False
        self._common_batches = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._release()
        self._has_other_ranks = trainer.world_size > 1
        what = "saving after this update" if stage == "fit" else "ending after this batch"
        self._flag.on_interrupt = f"Ctrl-C: {what}; press it again to end at once" if trainer.is_global_zero else ""
        self._flag.install()
        first = LambdaCallback(
            on_sanity_check_start=self._begin,
            on_train_start=self._begin,
            on_train_epoch_start=self._begin_epoch,
            on_validation_start=self._begin_evaluation,
            on_test_start=self._begin_evaluation,
            on_predict_start=self._begin_evaluation,
        )
        # Lightning would install its own handlers over these, and its handler of SIGTERM runs a collective, which hangs
        # if only one rank gets the signal.
        self._undo = [surround_callbacks(trainer, first, self), keep_signal_handlers(trainer)]
        if stage == "fit":
            self._undo.append(_disable_sigterm_broadcast(install_update_loop(trainer)))

    def _over_ranks(self, trainer: pl.Trainer) -> FlagAllReduce:
        if self._ranks is None:
            # A new process group does not inherit the timeout of Lightning's own group.
            self._ranks = FlagAllReduce(trainer.world_size, collective_timeout(trainer.strategy))
        return self._ranks

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop a run that received a signal while it started."""
        if self._over_ranks(trainer).maximum(self._flag.received)[0]:
            self._stop(trainer, "run start")

    def _begin_epoch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._stop_requested:
            self._stop(trainer, "epoch start")

    def _begin_evaluation(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit":
            # An interrupted validation leaves a batch of the first attempt started and not completed.
            trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset_on_restart()
        ranks = self._over_ranks(trainer)
        rank_requests_stop = self._stop_requested or ranks.wait() or bool(self._flag.received)
        # Ranks may have unequal numbers of batches, and a collective call needs all of them: flags are all-reduced only
        # in as many batches as every rank has. The minimum is the negative of a maximum.
        requested, negative_minimum = ranks.maximum(rank_requests_stop, -evaluation_batches(trainer))
        self._stop_requested = bool(requested)
        self._common_batches = -negative_minimum
        if self._stop_requested:
            self._stop(trainer, "validation start" if trains(trainer) else "evaluation")

    def on_update_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop after a signal, except after an epoch's last update: there the start of the next epoch is exact."""
        if not (self._has_other_ranks or self._flag.received or self._stop_requested):
            return
        place = save_point_after_update(trainer)
        if place == "within update":
            return
        self._stop_requested |= self._over_ranks(trainer).start(bool(self._flag.received))
        if self._stop_requested and not trainer.is_last_batch:
            self._stop(trainer, place)

    def _end_evaluation_batch(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._common_batches -= 1
        if self._common_batches >= 0 and self._over_ranks(trainer).start(bool(self._flag.received)):
            self._stop(trainer, "validation" if trains(trainer) else "evaluation")

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _end_evaluation_batch

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not any(isinstance(callback, CheckpointGuard) for callback in callbacks_of(trainer)):
            warn_of_other_checkpoints(trainer)  # Otherwise CheckpointGuard does.

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Training is complete, but the program must not begin its next step, such as a test.
        if self._over_ranks(trainer).maximum(self._flag.received)[0]:
            self._stop(trainer, "run end", trained=True)

    def _stop(self, trainer: pl.Trainer, place: SavePoint, *, trained: bool = False) -> None:
        """Save if the point allows it, and raise `Preempted` with the same signal on every rank."""
        self._stopping = True
        ranks = self._over_ranks(trainer)
        signum = int(ranks.maximum(self._flag.received)[0])
        is_fit = trainer.state.fn == "fit"
        rule = SAVE_POINTS[place]
        problem = resumes_within_epoch(trainer) if rule.saves and rule.adjusts != "epoch" else None
        path = None
        if rule.saves and problem is None:
            self._place = place
            path = save_now(trainer, place)
            self._place = None
        kept = newest_checkpoint(trainer) if is_fit else None
        result = f"saved {path}" if path else "nothing was saved" + (f" since {kept}" if kept else "")
        if problem is not None:
            advice = "resume from there" if kept else "start again"
            result += f", because a run that is saved within this epoch cannot resume: {problem}; {advice}"
        when = f" after update {trainer.global_step}" if is_fit else ""
        # Before the requeue, as soon as which Slurm may end the program that writes the job's output.
        warn("%s%s: %s", name_of(signum), when, result)
        if trainer.is_global_zero:
            note = requeue_on(signum)
            if note:
                warn(note)
        # The other ranks wait for rank 0: when the first process exits, Slurm may end the whole job step, with the
        # request to requeue. Everything is saved, so the run does not fail if a rank does not take part.
        with contextlib.suppress(RuntimeError):
            ranks.maximum(0)
        raise Preempted(signum, path, trained=trained)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._place is not None:
            move_counters(checkpoint["loops"], self._place)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted):
            # If the ranks have not agreed to stop, the others wait for this process and are killed at once.
            end_children(trainer, _CHILDREN_EXIT if self._stopping else 0.0)
        self._release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # From here on a signal acts as it did before the Trainer ran. None before that is lost: this is the last hook
        # in which all ranks meet.
        self._flag.restore()
        if self._over_ranks(trainer).maximum(self._flag.received)[0]:
            self._stop(trainer, "evaluation", trained=stage == "fit")
        self._release()

    def _release(self) -> None:
        self._flag.restore()
        while self._undo:
            self._undo.pop()()
        self._reset()
