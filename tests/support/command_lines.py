"""Command lines of a recipe, one after the other in one fresh process."""

import contextlib
import io
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from tests.support.ranks import run_ranks

__all__ = ["MNIST", "Typed", "contents", "type_line", "typed"]

MNIST = {"recipe": "recipes.mnist:MNISTClassifier", "data": "datamodules:MNISTDataModule"}
COMMON = ["--accelerator=cpu", "--enable-progress-bar=false"]


class Typed(NamedTuple):
    """What a command line ended with and printed."""

    status: int
    out: str
    err: str


def type_line(recipe: str, data: str, args: list[str], folder: str, callbacks: Sequence[str] = ()) -> Typed:
    """Type one in this process, which `run_ranks` has started, for classes by ``module:name``."""
    from recipes import run

    os.chdir(folder)
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(resolve_name(recipe), resolve_name(data), lambda: [resolve_name(name)() for name in callbacks], args)
        except SystemExit as end:
            status = int(end.code or 0)
    return Typed(status, out.getvalue(), err.getvalue())


def _type_each(recipe: str, data: str, commands: list[list[str]], folder: str, callbacks: Sequence[str]) -> list[Typed]:
    # A page and its figures take half a second.
    return [type_line(recipe, data, [*args, *COMMON], folder, callbacks) for args in commands]


def typed(
    folder: Path,
    *commands: str,
    recipe: str = "tests.support.stock_data:Quadrants",
    data: str = "tests.support.stock_data:Points",
    callbacks: Sequence[str] = (),
) -> list[Typed]:
    """Type commands in a folder, for a recipe, a data module and callbacks by ``module:name``."""
    lines = [shlex.split(command) for command in commands]
    ended: list[Typed] = run_ranks(_type_each, 1, recipe, data, lines, str(folder), callbacks, timeout=800)[0]
    return ended


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files in a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
