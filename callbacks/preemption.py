"""Save and end a run exactly, on all ranks, after a signal to any of them.

Schedulers send SIGTERM or SIGUSR1 some seconds before they kill, to one process or to all; a person presses Ctrl-C,
or closes the terminal, which sends SIGHUP.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, WeightAveraging
from typing_extensions import override

from callbacks.checkpointing.stopping_points import (
    RULES,
    Place,
    move_counters,
    place_after_update,
    trains,
)
from callbacks.lib.exchange import FlagAllReduce
from callbacks.lib.hooks import callbacks_of, surround_callbacks
from callbacks.lib.lightning_internals import collective_timeout, keep_signal_handlers, save_last
from callbacks.lib.signals import Preempted, SignalFlag, name_of
from callbacks.lib.slurm_job import requeue_on
from callbacks.update_loop import UpdateLoop, install_update_loop
from datamodules.notes import warn

_CHILDREN_EXIT = 20.0  # Seconds for the processes that Lightning started; torchrun and Slurm kill after 30.


def evaluation_batches(trainer: pl.Trainer) -> float:
    """The batches of this rank in the evaluation that begins; 0 where the number is unknown."""
    names = {"sanity_val": trainer.sanity_checking, "test": trainer.testing, "predict": trainer.predicting}
    name = next((name for name, evaluates in names.items() if evaluates), "val")
    numbers: Any = getattr(trainer, f"num_{name}_batches")
    total = sum(numbers) if isinstance(numbers, list) else numbers
    return float(total) if total != float("inf") else 0.0


def save_now(trainer: pl.Trainer, place: Place) -> str | None:
    """Save the run as its `last.ckpt`, whatever moments its checkpoint callback keeps to; to be called on all ranks.

    Returns:
        The file; None where the run keeps no checkpoints, or it could not be written.
    """
    found = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    # The first that keeps a last checkpoint, else the first.
    checkpoint = min(found, key=lambda callback: not callback.save_last, default=None)
    if checkpoint is None or getattr(trainer, "fast_dev_run", False):
        return None
    if place == "validation":
        for callback in callbacks_of(trainer):
            if isinstance(callback, WeightAveraging):
                # It has put the average into the module, and the trained weights are with it.
                callback.on_validation_epoch_end(trainer, trainer.lightning_module)
    last = Path(checkpoint.last_model_path)
    if trainer.is_global_zero and last.is_symlink():
        last.unlink()  # Of save_last="link": writing would go through to the checkpoint behind it.
    settings = checkpoint.save_last, checkpoint.save_weights_only
    checkpoint.save_last, checkpoint.save_weights_only = True, False
    try:
        save_last(checkpoint, trainer)
    finally:
        checkpoint.save_last, checkpoint.save_weights_only = settings
    # A plug-in that survives a full disk remembers what it could not write.
    failed = checkpoint.last_model_path in getattr(trainer.strategy.checkpoint_io, "failures", {})
    return None if failed else checkpoint.last_model_path


def end_children(trainer: pl.Trainer, patience: float) -> None:
    """Ends the processes that Lightning's launcher started here, after `patience` seconds by killing them."""
    processes: list[subprocess.Popen[bytes]] = getattr(trainer.strategy.launcher, "procs", [])
    children = list(processes)
    # Lightning's observer kills this process, too, when it finds that a child has ended with a status other than 0.
    processes.clear()
    deadline = time.monotonic() + patience
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _watch_in_place_of(loop: UpdateLoop) -> Callable[[], None]:
    """Keeps the loop from asking all ranks for SIGTERM in each update; returns how to undo it."""
    loop.watches_sigterm = False

    def undo() -> None:
        loop.watches_sigterm = True

    return undo


class Preemption(pl.Callback):
    """Ends a run after the current update, saved, when any rank gets SIGTERM, SIGUSR1, SIGHUP or Ctrl-C.

    A signal only sets a flag. All ranks agree on it at the end of an update, one update later on several ranks, save
    `last.ckpt` through the run's checkpoint callback, and raise `Preempted`, which ends each process with 128 + the
    signal's number: 143, 138, 129, 130. A resumed run continues there bit for bit. During a validation they save the
    state before it; `trainer.validate`, `test` and `predict` end at the next batch. Before the first update nothing is
    saved. A second Ctrl-C ends the process at once.

    On SIGUSR1 a batch job of Slurm is requeued before any rank exits (``#SBATCH --signal=USR1@90`` sends
    it in time). A run validates and stops after complete updates, as with `ExactCheckpoint`.

    Runs on: the end of each update, the start and the batches of each evaluation, the start of each epoch. It is the
    last callback there, so a checkpoint holds what the others did.

    Raises:
        Preempted: on every rank, when a signal came; a kind of SystemExit.

    Example:
        >>> trainer = pl.Trainer(callbacks=[Preemption()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        super().__init__()
        self._flag = SignalFlag()
        self._undo: list[Callable[[], None]] = []
        self._forget()

    def _forget(self) -> None:
        self._ranks: FlagAllReduce | None = None
        self._stop_requested = False
        self._place: Place | None = None
        self._stopping = False
        self._common_batches = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()
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
        # Lightning would put its own handlers around ours, and SIGTERM's runs a collective.
        self._undo = [surround_callbacks(trainer, first, self), keep_signal_handlers(trainer)]
        if stage == "fit":
            self._undo.append(_watch_in_place_of(install_update_loop(trainer)))

    def _over_ranks(self, trainer: pl.Trainer) -> FlagAllReduce:
        if self._ranks is None:
            # With the timeout of Lightning's own group, which a new group would not inherit.
            self._ranks = FlagAllReduce(trainer.world_size, collective_timeout(trainer.strategy))
        return self._ranks

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop here a run that received a signal while it started."""
        if self._over_ranks(trainer).maximum(self._flag.received)[0]:
            self._stop(trainer, "run start")

    def _begin_epoch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._stop_requested:
            self._stop(trainer, "epoch start")

    def _begin_evaluation(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit":
            # A validation that was interrupted and repeated left one batch of the first attempt uncounted.
            trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset_on_restart()
        ranks = self._over_ranks(trainer)
        mine = self._stop_requested or ranks.wait() or bool(self._flag.received)
        # Ranks may have unequal numbers of batches; flags are exchanged where all of them have one.
        requested, fewest = ranks.maximum(mine, -evaluation_batches(trainer))
        self._stop_requested = bool(requested)
        self._common_batches = -fewest
        if self._stop_requested:
            self._stop(trainer, "validation start" if trains(trainer) else "evaluation")

    def on_update_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop here if a signal came, unless the update is an epoch's last, whose next hook is the exact place."""
        place = place_after_update(trainer)
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
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Too late to cut anything, but what comes after training shall not begin.
        if self._over_ranks(trainer).maximum(self._flag.received)[0]:
            self._stop(trainer, "run end")

    def _stop(self, trainer: pl.Trainer, place: Place) -> None:
        """Save where there is something to save, and end on every rank with the same signal."""
        self._stopping = True
        ranks = self._over_ranks(trainer)
        signum = int(ranks.maximum(self._flag.received)[0])
        self._place = place
        path = save_now(trainer, place) if RULES[place].saves else None
        self._place = None
        done = f"saved {path}" if path else "nothing was saved"
        # First: Slurm may end the program that writes a job's output as soon as it has requeued the job.
        when = f" after update {trainer.global_step}" if trainer.state.fn == "fit" else ""
        warn("%s%s: %s", name_of(signum), when, done)
        if trainer.is_global_zero and (note := requeue_on(signum)):
            warn(note)
        # Slurm may end the whole step, with the request to requeue, when the first process exits. All is saved: a rank
        # that does not take part is no reason to fail.
        with contextlib.suppress(RuntimeError):
            ranks.maximum(0)
        raise Preempted(signum, path, trained=place == "run end")

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._place is not None:
            move_counters(checkpoint["loops"], self._place)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted):
            # Where the ranks have not agreed to stop, the others wait for this process, and would wait on.
            end_children(trainer, _CHILDREN_EXIT if self._stopping else 0.0)
        self._release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        self._flag.restore()
        while self._undo:
            self._undo.pop()()
        self._forget()
