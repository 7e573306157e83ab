"""A batch job of Slurm that has lost one of its processes is put back into the queue, as long as that leads on."""

import os
from pathlib import Path

from callbacks.lib.slurm_job import NotRequeued, batch_job, requeue, restarts
from datamodules.errors import UserError
from recipes.resume.job_name import torchrun_will_restart
from recipes.resume.saved_run import read_run

__all__ = ["requeue_after_loss"]

_RESTARTS_WITHOUT_PROGRESS = 5


def _most_updates(folder: Path) -> int:
    """The updates behind the newest checkpoint of a run that can be read; 0 without any."""
    found = [0]
    for path in (folder / "checkpoints").glob("*.ckpt"):
        try:
            found.append(read_run(path).updates)
        except UserError:
            continue
    return max(found)


def requeue_after_loss(folder: str | None, updates: int) -> str:
    """Have Slurm start this batch job again, since a process of it was killed or a node has gone.

    What killed it may do so again at the same update. A job that was started without saving anything new is therefore
    requeued up to its fifth restart only.

    Args:
        folder: of the run, where it is known.
        updates: after which this process started.

    Returns:
        What became of it, in words; nothing outside of a batch job, and where torchrun starts the processes again.
    """
    job = batch_job(os.environ)
    if job is None or torchrun_will_restart(os.environ):
        return ""
    count = restarts(os.environ)
    leads_on = folder is not None and _most_updates(Path(folder)) > updates
    if count >= _RESTARTS_WITHOUT_PROGRESS and not leads_on:
        return f"not requeued after {count} restarts, because nothing new was saved; to do so: scontrol requeue {job}"
    try:
        return f"requeued as job {requeue(os.environ)}"
    except NotRequeued as reason:
        again = f"; resume in a new job with --name {Path(folder).name}" if folder else ""
        return f"not requeued, {reason}{again}"
