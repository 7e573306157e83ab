"""Print the help: a line for each flag, in groups, in the width of the terminal."""

import inspect
import re
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from datamodules.contract import Rare, marked_parameters
from recipes.runner.command import flag_of
from recipes.runner.flag_types import type_name
from recipes.runner.flags import FlagParser

_COLUMN = 34
"""The column at which the texts of the flags begin."""


def help_width() -> int:
    """Return the width of the help in columns: the terminal's, but at least 80; 100 without a terminal."""
    return max(80, shutil.get_terminal_size((100, 24)).columns)


def without_markup(text: str) -> str:
    """Return a docstring's text without Sphinx roles and backticks.

    Example:
        >>> without_markup("pass ``True``, see :class:`~torch.utils.data.DataLoader`")
        'pass True, see DataLoader'
    """
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text).replace("`", "")


def print_columns(title: str, texts: Mapping[str, str], width: int) -> None:
    """Print names and their texts in two columns."""
    column = max(map(len, texts)) + 2
    print(f"{title}:")  # noqa: T201
    for name, text in texts.items():
        line = textwrap.fill(
            text,
            width,
            initial_indent=f"  {name:<{column}}",
            subsequent_indent=" " * (column + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        print(line)  # noqa: T201


def _text(action: Any, everything: bool) -> str:
    """Return what a flag does: its first sentence, or all of them with `everything`."""
    text = re.sub(r"\s+", " ", (action.help or "").replace("%%", "%").strip())
    if "==SUPPRESS==" in text:
        return ""
    text = without_markup(text)
    if not everything:
        text = re.split(r"(?<=[a-z\d)])[.;] ", text)[0]
    return text.strip().rstrip(".")


def _line(parser: FlagParser, name: str, everything: bool, width: int) -> str:
    action = parser.flags[name]
    flag_column = f"  {flag_of(name)} {type_name(parser.type_of(name), everything)}"
    hidden = action.default in (None, (), inspect.Parameter.empty)
    default = "" if hidden else f" ({action.default})"
    text = _text(action, everything) + default
    wrapped = textwrap.wrap(text, max(20, width - _COLUMN), break_on_hyphens=False) or [""]
    line_break = f"\n{'':<{_COLUMN}}"
    first_line = flag_column + line_break
    if len(flag_column) < _COLUMN - 1:
        first_line = f"{flag_column:<{_COLUMN - 1}} "
    return first_line + line_break.join(wrapped)


def print_flags(parser: FlagParser, everything: bool = False) -> None:
    """Print the help: grouped, a line per flag; `everything` adds the rarely used flags and the full texts."""
    width = help_width()
    for group, names in parser.shown:
        rare = marked_parameters(group.cls, Rare)
        shown = [name for name in names if everything or name not in rare]
        if not shown:
            continue
        print(f"\n{group.title}:")  # noqa: T201
        for name in shown:
            print(_line(parser, name, everything, width))  # noqa: T201
