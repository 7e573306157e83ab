"""Print lines on one rank."""

import os
import sys
from pathlib import Path

from datamodules.lightning import rank_zero_only


def is_rank_zero() -> bool:
    """Return whether this process is rank 0 of its run.

    `recipes.runner.worker` sets Lightning's ``rank_zero_only.rank``, which this reads. Before that the variables of the
    launchers decide.
    """
    return not getattr(rank_zero_only, "rank", 0) and os.environ.get("NODE_RANK", "0") == "0"


def rank_of_process() -> int:
    """Return the rank of this process, as far as it is known."""
    return int(getattr(rank_zero_only, "rank", 0) or 0)


def rank_zero_print(message: str) -> None:
    """Print a line on rank 0."""
    if is_rank_zero():
        print(message, flush=True)  # noqa: T201


def print_error(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def relative_path(path: str | Path) -> str:
    """Return a path relative to the current folder, where it is inside it."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
