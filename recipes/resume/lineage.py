"""Resume lineage: which job started its run from which checkpoint, and what becomes of later checkpoints.

A job that is restarted runs the same command with ``--resume FILE`` again. The file is where the job
started, and its own newest checkpoint is where it resumes.
"""

import json
from pathlib import Path

from callbacks.lib.writing import whole_or_nothing
from datamodules.errors import UserError
from recipes.resume.saved_run import read_run

__all__ = ["abandon_later_checkpoints", "record_start", "was_started_from"]

_FILE = "lineage.json"


def _lineage(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / _FILE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def was_started_from(folder: Path, job: str, checkpoint: str) -> bool:
    """Whether a job has started its run in a folder from this checkpoint; then it resumes from its own newest one."""
    return _lineage(folder).get(job) == checkpoint


def record_start(folder: Path, job: str, checkpoint: str) -> None:
    """Record that a job starts its run in a folder from a checkpoint, as it was typed."""
    with whole_or_nothing(folder / _FILE) as part:
        part.write_text(json.dumps(_lineage(folder) | {job: checkpoint}, indent=2))


def abandon_later_checkpoints(folder: Path, checkpoint: Path) -> list[Path]:
    """Rename the checkpoints with more updates than the one from which their run resumes.

    Otherwise ``--resume auto`` would take them until the run has made as many updates again.

    Args:
        folder: the run's ``checkpoints``.

    Returns:
        The new names, which end in ``.abandoned``.
    """
    updates, renamed = read_run(checkpoint).updates, []
    for path in sorted(folder.glob("*.ckpt")):
        try:
            if read_run(path).updates <= updates:
                continue
        except UserError:  # No run resumes from it.
            continue
        number, target = 1, path.with_name(f"{path.name}.abandoned")
        while target.exists():
            number += 1
            target = path.with_name(f"{path.name}-{number}.abandoned")
        path.rename(target)
        renamed.append(target)
    return renamed
