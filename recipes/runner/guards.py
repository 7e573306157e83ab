"""Turn a signal, a lack of memory or a bad checkpoint into one line that says what to type."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from callbacks.lib.lightning_internals import raised_by_restoring
from callbacks.lib.signals import SIGNALS, Preempted
from callbacks.lib.slurm_job import is_batch_job, requeue_on
from datamodules.errors import RunFailedError, UserError, first_line, is_out_of_memory, spelled
from datamodules.lightning import pl
from recipes.runner.command import Command
from recipes.runner.experiment import Experiment
from recipes.runner.failures import exit_now, is_lost_connection
from recipes.runner.printing import is_rank_zero, rank_zero_print, relative_path


@contextmanager
def guarded(
    trainer: pl.Trainer, experiment: Experiment, folder: Path | None = None, restores: str | None = None
) -> Iterator[None]:
    """Turn an error that ends a command into one line that says what to type.

    Args:
        folder: the run's folder, if it has one.
        restores: the checkpoint to restore, if any.
    """
    with _interruptible(trainer, experiment, folder), restoring(restores), _within_memory(trainer, experiment):
        yield


@contextmanager
def restoring(checkpoint: str | None) -> Iterator[None]:
    """Turn an error of restoring a checkpoint into one line.

    Raises:
        UserError: the values in the checkpoint are not those that were expected.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        is_of_weights = "Error(s) in loading state_dict" in str(error)
        if is_of_weights or is_lost_connection(error) or not raised_by_restoring(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{checkpoint} cannot be restored: it holds other values than were expected ({first_line(error)[:220]}, in"
            f" {frame.name} of {frame.filename}); pass another checkpoint"
        ) from error


@contextmanager
def _within_memory(trainer: pl.Trainer, experiment: Experiment) -> Iterator[None]:
    """Turn an out-of-memory error into one line that says what to pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_out_of_memory(error):
            raise
        config = experiment.config
        rank = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        names = [name for name in (experiment.tokens_parameter or "batch_size", "eval_batch_size") if name in config]
        sizes = ", ".join(spelled(name, config[name]) for name in names)
        raise RunFailedError(
            f"out of memory{rank} with {sizes}: pass a smaller one; a larger {spelled('accumulate')}, or"
            f" {spelled('global_batch_size')}, keeps the samples of an update ({first_line(error)[:160]})"
        ) from error


@contextmanager
def _interruptible(trainer: pl.Trainer, experiment: Experiment, folder: Path | None) -> Iterator[None]:
    """Print how to resume when a signal ends the run, and exit; a program that called `fit` continues."""
    try:
        yield
    except Preempted as stopped:
        if experiment.typed.in_program:
            last = folder / "checkpoints" / "last.ckpt" if folder else None
            saved = f"; {spelled('resume', relative_path(last))} resumes it" if last and last.exists() else ""
            rank_zero_print(f"\nended by {stopped.signal_name}{saved}")
            raise
        with suppress(ValueError):  # Handlers need the main thread.
            # Slurm sends SIGTERM to a job that was requeued; it must not end this process before the message.
            for signum in SIGNALS:
                signal.signal(signum, signal.SIG_IGN)
        rank_zero_print(_how_to_go_on(trainer, experiment, folder, stopped))
        sys.stderr.flush()
        # Loggers and loader processes are closed already, and a regular exit would take another second.
        exit_now(int(stopped.code or 1))


def _how_to_go_on(trainer: pl.Trainer, experiment: Experiment, folder: Path | None, stopped: Preempted) -> str:
    """Return which signal ended a run, and the command that resumes it."""
    typed = experiment.typed
    text = f"\nended by {stopped.signal_name}"
    note = requeue_on(stopped.signum) if stopped.at_once and is_rank_zero() else ""
    if note:
        text += f"; {note}"
    if folder is None:
        return text
    last = folder / "checkpoints" / "last.ckpt"
    best = last.with_name("best.ckpt")
    if not last.exists():
        last = best
    if not last.exists():
        return f"{text}; nothing was saved, so type the same command again"
    if stopped.trained or trainer.state.fn != "fit":
        test = typed.alone("test").using(ckpt=relative_path(best if best.exists() else last))
        return f"{text}; the training is done, so test with\n  {test}"
    # The signal may have been for another node, which leaves an elastic run.
    goes_on = experiment.launch.is_elastic and experiment.launch.restarts
    stays = "the nodes that stay go on without it, and if none does, " if goes_on else ""
    return f"{text}; {stays}{how_to_resume(typed, folder, last)}"


def how_to_resume(typed: Command, folder: Path, checkpoint: Path) -> str:
    """Return the command that resumes a run, with the words that lead to it.

    Args:
        typed: what the user typed.
        folder: the run's folder.
        checkpoint: the checkpoint to resume from.
    """
    start = f"resume in a new job with --name {folder.name}, or with" if is_batch_job(os.environ) else "resume with"
    # Another number of devices would resume with rounding differences, so that the command names the number.
    devices = typed.devices if typed.launcher == "local" and typed.devices > 1 else None
    return f"{start}\n  {typed.alone().using(resume=relative_path(checkpoint), devices=devices)}"
