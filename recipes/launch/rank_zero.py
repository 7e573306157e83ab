"""Which process prints and writes for the run."""

import os
import sys

from lightning.pytorch.utilities import rank_zero_only

__all__ = ["is_rank_zero", "print_error", "rank_zero_print"]


def is_rank_zero() -> bool:
    """Whether this process is rank 0 of its run.

    `recipes.failures.join.join_run` sets Lightning's ``rank_zero_only.rank``, which this reads. Before that the
    variables of the launchers decide.
    """
    return not getattr(rank_zero_only, "rank", 0) and os.environ.get("NODE_RANK", "0") == "0"


def rank_zero_print(message: str) -> None:
    """Print a line on rank 0."""
    if is_rank_zero():
        print(message, flush=True)  # noqa: T201


def print_error(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201
