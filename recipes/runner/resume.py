"""Where a run resumes: the rule, from what was typed and the job that it runs in to a folder and a checkpoint.

``--resume FILE`` takes the checkpoint, ``--resume auto`` the newest valid one of the run, and ``--resume none`` starts
fresh, which is the default but in a job that Slurm or torchrun may start again. Such a job finds its run by the name of
the job. Typed again with ``--resume FILE``, it resumes from its own newest checkpoint: the run's ``lineage.json`` says
which job began at which file. A further run of a process is none of those before it.
"""

import json
import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from callbacks.lib.slurm_job import NotRequeued, batch_job, is_batch_job, requeue, restarts
from datamodules.errors import UserError
from recipes.runner.merging import describe_differences
from recipes.runner.printing import is_rank_zero
from recipes.runner.results import RESULTS, read_results, write_rows
from recipes.runner.saved_run import (
    SavedRun,
    newest_valid_checkpoint,
    read_run,
    read_settings,
    readable_checkpoints,
)
from recipes.runner.worker import is_worker

_LINEAGE = "lineage.json"
_LENGTHS = ("max_epochs", "max_steps", "max_time")
_RESTARTS_WITHOUT_PROGRESS = 5

_used: set[str | None] = set()
"""The folders of the runs of this process; one of them that was removed counts, so that a restart counts as it did."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts or resumes.

    Args:
        folder: the run's folder, which may exist; None for a new one, named by --name or the time.
        checkpoint: the checkpoint to resume from.
        finished: the run has been trained and tested.
        given: the user has named the checkpoint.
    """

    folder: str | None = None
    checkpoint: str | None = None
    finished: bool = False
    given: bool = False


def find_resume_point(
    resume: str | None,
    name: str | None,
    parent: Path,
    config: Mapping[str, Any],
    typed: Mapping[str, Any],
    free: Collection[str],
) -> ResumePoint:
    """Decide where this command trains; the same on all ranks that share the folder.

    Args:
        resume: a checkpoint, "auto", "none", or None: "auto" where the launcher restarts the run, else "none".
        name: the name of the run.
        parent: the folder of the recipe's runs.
        config: the settings of this command.
        typed: those of them that were typed, or stand in a file that was.
        free: settings that do not make the experiment.

    Raises:
        UserError: `resume` is not a valid checkpoint, or nothing names the job.
    """

    def resume_same(folder: Path) -> ResumePoint | None:
        """Resume in a folder whose run is this experiment, or says nothing of its own."""
        file = folder / "config.yaml"
        saved = read_settings(file) if file.is_file() else None
        if saved is not None and describe_differences(saved, config, free):
            return None
        point = resume_in(folder, typed)
        run = read_run(point.checkpoint) if point.checkpoint else None
        return None if run and describe_differences(run.config, config, free, run.auto_settings) else point

    if resume not in (None, "auto", "none"):
        point = _from_file(resume, name, parent, typed)
    elif resume == "none" or (resume is None and launch_name(os.environ, name) is None):
        point = ResumePoint()
    elif name is not None and (resume or str(parent / name) not in _used):
        point = resume_in(parent / name, typed)
    elif job := launch_name(os.environ, name):
        further = (path for path in numbered(parent / (name or job)) if str(path) not in _used)
        point = next(filter(None, map(resume_same, further)))
    else:
        folders = [path.parent for path in parent.glob("*/config.yaml")]
        newest = sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)
        points = filter(None, map(resume_same, newest))
        point = next((each for each in points if each.checkpoint and not each.finished), ResumePoint())
    _used.add(point.folder)
    return point


def resume_in(folder: Path, typed: Mapping[str, Any]) -> ResumePoint:
    """Resume in a run's folder, or start in it where it has no valid checkpoint."""
    checkpoint = newest_valid_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        return ResumePoint(str(folder))
    return ResumePoint(str(folder), str(checkpoint), _is_finished(folder, read_run(checkpoint), typed))


def _is_finished(folder: Path, run: SavedRun, typed: Mapping[str, Any]) -> bool:
    """Whether a run has its results, and what was typed asks for no more than it has trained.

    Args:
        run: its newest checkpoint.
        typed: the settings that were typed. Where the length of the run is not among them, its own holds.
    """
    if not (folder / RESULTS).is_file():
        return False
    epochs, steps, _ = (run.config.get(name) if typed.get(name) is None else typed[name] for name in _LENGTHS)
    if run.is_finished(epochs, -1 if steps is None else steps):
        return True
    # It has ended before that: by early stopping or its time, and would again with these settings.
    names = ("patience",) if read_results(folder).get("stopped_early") else _LENGTHS
    return all(typed.get(name) in (None, run.config.get(name)) for name in names)


def numbered(folder: Path) -> Iterator[Path]:
    """The folders NAME, NAME-2, ..., since several runs may have a name, and a job may make several runs."""
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in count(2))


def _from_file(resume: str, name: str | None, parent: Path, typed: Mapping[str, Any]) -> ResumePoint:
    """Resume from this checkpoint, or from a later one of the same job, if the job was restarted."""
    home = Path(resume).resolve().parent
    in_run = home.name == "checkpoints" and (home.parent / "config.yaml").is_file()
    folder = home.parent if in_run else None
    if job := launch_name(os.environ, name):
        folders = [home.parent] if in_run else (p for p in numbered(parent / (name or job)) if str(p) not in _used)
        folder = next(path for path in folders if in_run or not path.exists() or _lineage(path).get(job) == resume)
        began_here = _lineage(folder).get(job) == resume and str(folder) not in _used
        if began_here and (own := resume_in(folder, typed)).checkpoint:
            return own
    try:
        read_run(resume)
    except UserError as error:
        valid = newest_valid_checkpoint(home, logs=False) if home.name == "checkpoints" else None
        newest = f"{error}; the newest valid checkpoint is {valid}: pass resume=auto"
        raise UserError(newest if valid else str(error)) from error
    return ResumePoint(str(folder) if folder else None, resume, given=True)


def start_from(checkpoint: str, folder: Path, name: str | None) -> list[Path]:
    """Start a run in a folder from the checkpoint of ``--resume FILE``; on rank 0, right before training.

    Checkpoints with more updates are renamed, since ``--resume auto`` would take them until the run has made as many
    updates again.

    Args:
        name: ``--name``.

    Returns:
        The new names of these, which end in ``.abandoned``.
    """
    if not is_rank_zero():
        return []
    updates, renamed = read_run(checkpoint).updates, []
    # First, so that a job that is restarted in between does not find them.
    for path, run in readable_checkpoints(folder / "checkpoints").items():
        if run.updates > updates:
            renamed.append(path.rename(path.with_name(f"{path.name}-{run.updates}.abandoned")))
    if job := launch_name(os.environ, name):
        write_rows(folder / _LINEAGE, _lineage(folder) | {job: checkpoint})
    return renamed


def _lineage(folder: Path) -> dict[str, str]:
    """The checkpoints, as they were typed, from which jobs have started the run in a folder."""
    try:
        return dict(json.loads((folder / _LINEAGE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


# The job


def _slurm_name(environment: Mapping[str, str]) -> str | None:
    """For a step of a batch job; in an interactive job a user may run several programs."""
    if "SLURM_PROCID" not in environment or not is_batch_job(environment):
        return None
    job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
    return f"slurm-{job}" + (f"-step{step}" if step.isdigit() and 0 < int(step) < 1_000_000 else "")


def _torchrun_restarts(environment: Mapping[str, str]) -> tuple[int, int]:
    """How often torchrun has started these processes again, and how often it may."""
    texts = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    done, most = (int(text) if text.isdigit() else 0 for text in texts)
    return done, most


def launch_name(environment: Mapping[str, str], name: str | None = None) -> str | None:
    """A name of this job that its restarts and requeues share, and other jobs do not; None without restarts.

    Args:
        name: that of the run, which serves where torchrun restarts it on several nodes and nothing else names the job.

    Raises:
        UserError: it is needed, and None.
    """
    if slurm := _slurm_name(environment):
        return slurm
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run is None or is_worker(environment) or not any(_torchrun_restarts(environment)):
        return None
    if run != "none":
        return f"elastic-{re.sub(r'[^A-Za-z0-9._-]', '_', run)}"
    if environment.get("GROUP_WORLD_SIZE", "1") != "1":
        if name is not None:
            return name
        raise UserError(
            "torchrun restarts this run, and each restart would start fresh: add --rdzv-id NAME to torchrun's flags on"
            " every node, or pass name=NAME"
        )
    # On one node the agent, which outlives its workers, identifies the job.
    return f"elastic-{socket.gethostname()}-{os.getppid()}"


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
    done, most = _torchrun_restarts(os.environ)
    if job is None or done < most:
        return ""
    saved = readable_checkpoints(Path(folder) / "checkpoints").values() if folder else ()
    if restarts(os.environ) >= _RESTARTS_WITHOUT_PROGRESS and all(run.updates <= updates for run in saved):
        return (
            f"not requeued after {restarts(os.environ)} restarts, because nothing new was saved; to do so: scontrol"
            f" requeue {job}"
        )
    try:
        return f"requeued as job {requeue(os.environ)}"
    except NotRequeued as reason:
        again = f"; resume in a new job with --name {Path(folder).name}" if folder else ""
        return f"not requeued, {reason}{again}"
