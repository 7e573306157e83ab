"""What may end a command on its way, each in one line: a checkpoint's values, memory that is out, a signal."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lightning.pytorch as pl

from callbacks.lib.lightning_internals import raised_by_restoring
from callbacks.lib.signals import SIGNALS, Preempted
from callbacks.lib.slurm_job import is_batch_job, requeue_on
from datamodules.errors import RunFailedError, UserError, first_line, is_out_of_memory
from recipes.runner.experiment import Experiment
from recipes.runner.failures import exit_now
from recipes.runner.printing import is_rank_zero, rank_zero_print
from recipes.runner.report import relative_path


@contextmanager
def guarded(
    trainer: pl.Trainer, experiment: Experiment, folder: Path | None = None, restores: str | None = None
) -> Iterator[None]:
    """Turn what ends a command into one line that says what to type.

    Args:
        folder: of the run; None for one without.
        restores: the checkpoint that is restored.
    """
    with _interruptible(trainer, experiment, folder), restoring(restores), _within_memory(trainer, experiment):
        yield


@contextmanager
def restoring(checkpoint: str | None) -> Iterator[None]:
    """Turn an error that the values in a checkpoint cause while it is restored into one line.

    Raises:
        UserError: with the checkpoint and what the error says.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not raised_by_restoring(error) or "Error(s) in loading state_dict" in str(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{checkpoint} cannot be restored: it holds other values than were expected ({first_line(error)[:220]}, in"
            f" {frame.name} of {frame.filename}); pass another checkpoint"
        ) from error


@contextmanager
def _within_memory(trainer: pl.Trainer, experiment: Experiment) -> Iterator[None]:
    """Turn an error that says that memory is out into one line, which says what to pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_out_of_memory(error):
            raise
        config = experiment.config
        rank = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        names = [name for name in (experiment.tokens_parameter or "batch_size", "eval_batch_size") if name in config]
        sizes = ", ".join(f"{name}={config[name]}" for name in names)
        raise RunFailedError(
            f"out of memory{rank} with {sizes}: pass a smaller one; a larger `accumulate`, or `global_batch_size`,"
            f" keeps the samples of an update ({first_line(error)[:160]})"
        ) from error


@contextmanager
def _interruptible(trainer: pl.Trainer, experiment: Experiment, folder: Path | None) -> Iterator[None]:
    """Where a signal has ended the run, print how to resume, and end the process; a program goes on."""
    try:
        yield
    except Preempted as stopped:
        if experiment.typed.in_program:
            saved = f'; resume="{relative_path(folder / "checkpoints" / "last.ckpt")}" resumes it' if folder else ""
            rank_zero_print(f"\nended by {stopped.signal_name}{saved}")
            raise
        with suppress(ValueError):  # Handlers need the main thread.
            for signum in SIGNALS:  # Slurm sends SIGTERM to a job that has been requeued.
                signal.signal(signum, signal.SIG_IGN)
        rank_zero_print(_how_to_go_on(trainer, experiment, folder, stopped))
        sys.stderr.flush()
        # Loggers and processes are closed; a regular exit of the interpreter would take another second.
        exit_now(int(stopped.code or 1))


def _how_to_go_on(trainer: pl.Trainer, experiment: Experiment, folder: Path | None, stopped: Preempted) -> str:
    """What has ended a run, and what to type to go on with it."""
    typed = experiment.typed
    why = f"\nended by {stopped.signal_name}"
    if stopped.at_once and is_rank_zero() and (note := requeue_on(stopped.signum)):
        why += f"; {note}"
    if folder is None:
        return why
    last = folder / "checkpoints" / "last.ckpt"
    best = last.with_name("best.ckpt")
    if not last.exists():
        last = best
    if not last.exists():
        return f"{why} before the first update, so nothing was saved"
    if stopped.trained or trainer.state.fn != "fit":
        test = typed.alone("test").using(ckpt=relative_path(best if best.exists() else last))
        return f"{why}; the training is done, so test with\n  {test}"
    how = f"in a new job with --name {folder.name}, or with" if is_batch_job(os.environ) else "with"
    # On other devices than before it would resume within rounding.
    devices = typed.devices if typed.launcher == "local" and typed.devices > 1 else None
    line = typed.alone().using(resume=relative_path(last), devices=devices)
    return f"{why}; resume {how}\n  {line}"
