"""Slurm: the batch job of this process, and its requeue.

Slurm itself requeues a job when a node fails. After a signal before its time limit, or the loss of a process, a job has
to request the requeue.
"""

import functools
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping

from callbacks.lib.signals import SIGNALS

_SLURM_ANSWERS = 20.0  # Seconds for Slurm to reply.
_ATTEMPTS = 3  # Of a command that a signal ends.


class NotRequeued(Exception):
    """Error: Slurm has not requeued a job, for the reason in the message."""


class _Failed(NotRequeued):
    """Error: a command of Slurm failed."""


def _run(*args: str, within: float) -> tuple[int, str, str]:
    """Run ``scontrol`` so that signals do not end it, and return its status, output and errors.

    Raises:
        subprocess.TimeoutExpired: it did not end within so many seconds.
        OSError: it cannot be started.
    """
    # Slurm sends signals to the processes of a job that it ends or requeues, sometimes before the request has returned.
    # A child process, and the program that it executes, inherit which signals are blocked and which are ignored.
    command = ["sh", "-c", 'trap "" TERM INT USR1; exec scontrol "$@"', "sh", *args]
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        # In a new session, a signal to the process group of this process does not end the request.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    try:
        output, errors = process.communicate(timeout=within)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors


def _scontrol(*args: str, deadline: float) -> str:
    """Return the output of ``scontrol``; run it again if a signal has ended it."""
    command = f"scontrol {' '.join(args)}"
    for _ in range(_ATTEMPTS):
        within = max(0.1, deadline - time.monotonic())
        try:
            status, output, errors = _run(*args, within=within)
        except subprocess.TimeoutExpired as error:
            raise _Failed(f"{command} did not end within {within:.0f} s") from error
        except OSError as error:
            raise _Failed(f"{command}: {error}") from error
        if status >= 0:
            break
    if status:
        raise _Failed(f"{command} ended with {status}: {errors.strip()}")
    return output


def _job_fields(job: str, deadline: float) -> dict[str, str]:
    """Return the fields of ``scontrol show job`` by name."""
    return dict(re.findall(r"(\w+)=(\S*)", _scontrol("show", "job", job, deadline=deadline)))


def _job_id(environ: Mapping[str, str]) -> str:
    """Return the ID of the job; in an array, the ID of the array with the number of the task."""
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


@functools.cache
def _slurm_says_batch(job: str) -> bool:
    try:
        return _job_fields(job, time.monotonic() + _SLURM_ANSWERS).get("BatchFlag") == "1"
    except _Failed:
        return False


def is_batch_job(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch job of Slurm, and not an interactive one of ``salloc`` or ``srun``."""
    if "SLURM_JOB_ID" not in environ:
        return False
    # Slurm sets ENVIRONMENT in batch scripts, and srun passes it on. It is missing after sbatch --export=NONE and in
    # scripts that set it to another value; then Slurm is asked.
    return environ.get("ENVIRONMENT") == "BATCH" or _slurm_says_batch(_job_id(environ))


def batch_job(environ: Mapping[str, str]) -> str | None:
    """Return the ID of this batch job of Slurm, as ``scontrol`` takes it; None outside of one.

    Example:
        >>> batch_job({"SLURM_JOB_ID": "71", "ENVIRONMENT": "BATCH"})
        '71'
        >>> array = {"SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2"}
        >>> batch_job({"SLURM_JOB_ID": "73", "ENVIRONMENT": "BATCH"} | array)
        '71_2'
    """
    return _job_id(environ) if is_batch_job(environ) else None


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often this job has been restarted."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def requeue(environ: Mapping[str, str]) -> str | None:
    """Put this batch job back into Slurm's queue. Several ranks may call it.

    Returns:
        The ID of the job; None outside of a batch job.

    Raises:
        NotRequeued: Slurm does not requeue the job, for the reason in the message.
    """
    job = batch_job(environ)
    if job is None:
        return None
    deadline = time.monotonic() + _SLURM_ANSWERS
    fields = _job_fields(job, deadline)
    if _has_been_requeued(fields, environ):
        return job
    if fields.get("Requeue") == "0":
        raise NotRequeued("because the job was submitted without --requeue")
    if fields.get("JobState") != "RUNNING":  # Slurm would restart even a job that somebody has cancelled.
        raise NotRequeued(f"because the job is {fields.get('JobState')}")
    try:
        _scontrol("requeue", job, deadline=deadline)
    except _Failed:
        # Another rank may have requeued the job at the same time.
        if not _has_been_requeued(_job_fields(job, deadline), environ):
            raise
    return job


def _has_been_requeued(fields: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    return int(fields.get("Restarts", 0)) > restarts(environ)


def requeue_on(signum: int) -> str:
    """Requeue this batch job if SIGUSR1 has ended it; to be called on one rank.

    Returns:
        The result as a text; empty for other signals and outside of a batch job.
    """
    if signum != signal.SIGUSR1:
        return ""
    try:
        job = requeue(os.environ)
    except NotRequeued as reason:
        return f"not requeued, {reason}"
    return f"requeued as job {job}" if job else ""
