"""Print log messages and warnings in one line each, and suppress those of other packages."""

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from typing_extensions import override

from datamodules.errors import UserError
from datamodules.lightning import pl
from recipes.runner.printing import is_rank_zero

_LIGHTNING = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
_PACKAGES = tuple(Path(__file__).parents[2] / name for name in ("recipes", "callbacks", "datamodules"))


class _OneLine(logging.Handler):
    """Prints each of our log messages as a plain line."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        # A message about one rank, such as a damaged file, is logged by no other.
        if is_rank_zero() or getattr(record, "any_rank", False):
            print(record.getMessage(), file=sys.stderr)  # noqa: T201


_level: ContextVar[int] = ContextVar("_level", default=logging.INFO)


@contextmanager
def warnings_only() -> Iterator[None]:
    """Print nothing but warnings: no messages, no progress and nothing on standard output."""
    before = _level.set(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        _level.reset(before)


def prints_progress() -> bool:
    """Return whether more than warnings are printed."""
    return _level.get() < logging.WARNING


def escape_output() -> None:
    """Have standard output escape what its encoding lacks, as standard error does: a file's name may hold any bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def configure_logging() -> None:
    """Print our messages and warnings as plain lines, and suppress tips and deprecation warnings of others."""
    for name in _LIGHTNING:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in (f"{pl.__name__}.profilers", f"{pl.__name__}.callbacks.model_summary", "lightning_recipes"):
        logger = logging.getLogger(name)
        logger.setLevel(_level.get())
        logger.handlers = [_OneLine()]
        logger.propagate = False
    # A second run in this process must not wrap the function of the first.
    default_showwarning = getattr(warnings.showwarning, "default", warnings.showwarning)

    def show_ours(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *args: Any, **kwargs: Any
    ) -> None:
        if not any(map(Path(filename).is_relative_to, _PACKAGES)):
            default_showwarning(message, category, filename, lineno, *args, **kwargs)
        elif is_rank_zero():
            print(f"warning: {message}", file=sys.stderr)  # noqa: T201

    show_ours.default = default_showwarning  # type: ignore[attr-defined]
    warnings.showwarning = show_ours
    for module in ("joblib", *_LIGHTNING, "torch", "tensorboard", "torchmetrics"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
    # Pillow warns of large images; the data modules refuse images by their own limit.
    warnings.filterwarnings("ignore", message=r"Image size \(\d+ pixels\) exceeds limit")
    warnings.filterwarnings("ignore", message=r".*(isinstance\(treespec, LeafSpec\)|trace might not generalize).*")


def _cut(text: str, longest: int) -> str:
    """Return a text, its middle replaced by dots where it is longer than `longest` characters."""
    if len(text) <= longest:
        return text
    half = (longest - 5) // 2
    return f"{text[: longest - 5 - half]} ... {text[-half:]}"


def error_lines(error: UserError) -> str:
    """Return the message of an error in one printable line, and the commands to type in lines of their own."""
    return "\n  ".join(map(one_line, [str(error.args[0]), *error.commands]))


def one_line(message: str) -> str:
    """Return a message in one printable line, since values of any kind and length may be in it.

    Of words beyond 500 characters, and of a text beyond 10,000, the middle is left out.

    Example:
        >>> print(one_line("no file \x1b[31mred\\n"))
        no file \\x1b[31mred\\n
        >>> one_line("--lr " + "9" * 1000 + " is not a number")[-24:]
        '99999999 is not a number'
    """
    characters = []
    for character in message:
        if character.isprintable():
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    words = "".join(characters).split(" ")
    return _cut(" ".join(_cut(word, 500) for word in words), 10_000)
