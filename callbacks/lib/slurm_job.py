"""The batch job of Slurm that this process belongs to, and how it is put back into the queue.

Slurm itself requeues a job when a node fails. A job that was told of its end, or has lost a process, has to ask for it.
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
_ATTEMPTS = 3


class NotRequeued(Exception):
    """Slurm has not put a job back into its queue, for the reason in the message."""


class _Failed(NotRequeued):
    """A command of Slurm failed."""


def _run(*args: str, within: float) -> tuple[int, str, str]:
    """The status, the output and the errors of ``scontrol``.

    Slurm sends signals to the processes of a job that it ends or requeues, at times before the request has returned. A
    process inherits which signals are blocked, and the program that it executes does, too; one that is ignored stays so
    as well. In a session of its own: what ends this process with its group does not end the request.

    Raises:
        subprocess.TimeoutExpired: it did not end within so many seconds.
        OSError: it cannot be started.
    """
    command = ["sh", "-c", 'trap "" TERM INT USR1; exec scontrol "$@"', "sh", *args]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        output, errors = process.communicate(timeout=within)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors


def _scontrol(*args: str, deadline: float) -> str:
    """What ``scontrol`` prints; it is asked again where a signal has ended it."""
    text = f"scontrol {' '.join(args)}"
    for _ in range(_ATTEMPTS):
        within = max(0.1, deadline - time.monotonic())
        try:
            status, output, errors = _run(*args, within=within)
        except subprocess.TimeoutExpired as error:
            raise _Failed(f"{text} did not end within {within:.0f} s") from error
        except OSError as error:
            raise _Failed(f"{text}: {error}") from error
        if status >= 0:
            break
    if status:
        raise _Failed(f"{text} ended with {status}: {errors.strip()}")
    return output


def _record(job: str, deadline: float) -> dict[str, str]:
    """What Slurm knows of a job, by the names of ``scontrol show job``."""
    return dict(re.findall(r"(\w+)=(\S*)", _scontrol("show", "job", job, deadline=deadline)))


def _number(environ: Mapping[str, str]) -> str:
    """The number of the job, with that of its task in an array."""
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


@functools.cache
def _slurm_says_batch(job: str) -> bool:
    try:
        return _record(job, time.monotonic() + _SLURM_ANSWERS).get("BatchFlag") == "1"
    except _Failed:
        return False


def is_batch_job(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch job of Slurm, and not an interactive one of ``salloc`` or ``srun``."""
    if "SLURM_JOB_ID" not in environ:
        return False
    # Slurm sets it in batch scripts, and srun passes it on, but for sbatch --export=NONE and scripts that replace it.
    return environ.get("ENVIRONMENT") == "BATCH" or _slurm_says_batch(_number(environ))


def batch_job(environ: Mapping[str, str]) -> str | None:
    """The number of this batch job of Slurm, as ``scontrol`` takes it; None outside of one.

    Example:
        >>> batch_job({"SLURM_JOB_ID": "71", "ENVIRONMENT": "BATCH"})
        '71'
        >>> array = {"SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2"}
        >>> batch_job({"SLURM_JOB_ID": "73", "ENVIRONMENT": "BATCH"} | array)
        '71_2'
    """
    return _number(environ) if is_batch_job(environ) else None


def restarts(environ: Mapping[str, str]) -> int:
    """How often this job has been started again."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def requeue(environ: Mapping[str, str]) -> str | None:
    """Put this batch job back into Slurm's queue. Several ranks may call it.

    Returns:
        The number of the job; None outside of a batch job.

    Raises:
        NotRequeued: with the reason.
    """
    job = batch_job(environ)
    if job is None:
        return None
    deadline = time.monotonic() + _SLURM_ANSWERS
    record = _record(job, deadline)
    if _has_been_requeued(record, environ):
        return job
    if record.get("Requeue") == "0":
        raise NotRequeued("because the job was submitted without --requeue")
    if record.get("JobState") != "RUNNING":  # Slurm would start a job again that somebody has cancelled.
        raise NotRequeued(f"because the job is {record.get('JobState')}")
    try:
        _scontrol("requeue", job, deadline=deadline)
    except _Failed:
        if not _has_been_requeued(_record(job, deadline), environ):  # By another rank at the same time.
            raise
    return job


def _has_been_requeued(record: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    return int(record.get("Restarts", 0)) > restarts(environ)


def requeue_on(signum: int) -> str:
    """Put this batch job back into the queue where it was SIGUSR1 that ended it; to be called on one rank.

    Returns:
        What became of it, in words; nothing for other signals and outside of a batch job.
    """
    if signum != signal.SIGUSR1:
        return ""
    try:
        job = requeue(os.environ)
    except NotRequeued as reason:
        return f"not requeued, {reason}"
    return f"requeued as job {job}" if job else ""
