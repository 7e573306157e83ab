"""Runs that begin with a checkpoint which the user has named: from which, for which job, and what it leaves behind.

A job that is started again types the same ``--resume FILE`` again. The file is where it began, and not where it is.
"""

import json
from pathlib import Path

from datamodules.errors import UserError
from recipes.resume.saved_run import read_run

__all__ = ["has_begun", "mark_beginning", "set_aside"]

_FILE = "beginnings.json"


def _beginnings(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / _FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def has_begun(folder: Path, job: str, checkpoint: str) -> bool:
    """Whether a job has begun its run in a folder with this checkpoint, so that it goes on from its own."""
    return _beginnings(folder).get(job) == checkpoint


def mark_beginning(folder: Path, job: str, checkpoint: str) -> None:
    """Write down that a job begins its run in a folder with a checkpoint, as it was typed."""
    beside = folder / f"{_FILE}.part"
    beside.write_text(json.dumps(_beginnings(folder) | {job: checkpoint}, indent=2))
    beside.replace(folder / _FILE)


def set_aside(folder: Path, checkpoint: Path) -> list[Path]:
    """Rename the checkpoints that are farther on than one to which their run goes back.

    Else they would be what ``--resume auto`` takes, until the run is as far again.

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
        except UserError:  # Nobody goes on from it.
            continue
        number, target = 1, path.with_name(f"{path.name}.abandoned")
        while target.exists():
            number += 1
            target = path.with_name(f"{path.name}-{number}.abandoned")
        path.rename(target)
        renamed.append(target)
    return renamed
