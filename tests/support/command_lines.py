"""Command lines of a recipe, one after the other in one fresh process."""

import contextlib
import io
import os
import shlex
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from tests.support.ranks import run_ranks

__all__ = ["Typed", "typed"]

COMMON = ["--accelerator=cpu", "--enable-progress-bar=false"]


class Typed(NamedTuple):
    """What a command line ended with and printed."""

    status: int
    out: str
    err: str


def _type(recipe: str, data: str, all_args: list[list[str]], folder: str) -> list[tuple[int, str, str]]:
    from recipes import run

    os.chdir(folder)
    ended = []
    for args in all_args:
        out, err, status = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                run(resolve_name(recipe), resolve_name(data), args=[*args, *COMMON])
            except SystemExit as end:
                status = int(end.code or 0)
        ended.append((status, out.getvalue(), err.getvalue()))
    return ended


def typed(
    folder: Path,
    *commands: str,
    recipe: str = "tests.support.stock_data:Quadrants",
    data: str = "tests.support.stock_data:Points",
) -> list[Typed]:
    """Type commands in a folder, for a recipe and a data module by ``module:name``."""
    each = [shlex.split(command) for command in commands]
    return [Typed(*ended) for ended in run_ranks(_type, 1, recipe, data, each, str(folder))[0]]
