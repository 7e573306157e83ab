"""Print the help: a line for each flag, in groups, in the width of the terminal.

This module imports neither torch nor Lightning, so that the help is printed at once.
"""

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datamodules.errors import flag_of
from recipes.runner.flag_types import flag_type, type_name

COMMANDS = {
    "fit": "train, then test the best checkpoint (the default)",
    "validate": "score a checkpoint on the validation part",
    "test": "score a checkpoint on the test set",
    "predict": "run inference on the given inputs: predict --ckpt FILE INPUT ...",
    "verify": "train a part of a run again, and compare the weights to the bit: verify runs/RECIPE/NAME",
    "export": "write the network of a checkpoint for other programs, and verify the file",
}

PREDICT_INPUTS = "predict_inputs"
"""The parameter of a data module that takes the arguments of predict, which are no flag."""
HELP_FLAGS = frozenset({"-h", "--help", "--help-all", "--help_all"})

_COLUMN = 34
"""The column at which the texts of the flags begin."""


@dataclass(frozen=True)
class HelpEntry:
    """A flag, as the help shows it.

    Args:
        name: the name of the parameter.
        annotation: its type.
        default: its default; None where it has none.
        text: what its docstring says.
        rare: it stands in the help of ``--help-all`` only.
    """

    name: str
    annotation: Any
    default: Any
    text: str
    rare: bool


@dataclass(frozen=True)
class HelpPage:
    """What the help of a command line shows.

    Args:
        summary: what the recipe does.
        title: the name of the folder of its runs.
        groups: the flags under their headings.
    """

    summary: str
    title: str
    groups: Mapping[str, Sequence[HelpEntry]]

    def names(self) -> list[str]:
        """Return the names of all flags."""
        return [entry.name for entries in self.groups.values() for entry in entries]


def _help_width() -> int:
    """Return the width of the help in columns: the terminal's, but at least 80; 100 without a terminal."""
    return max(80, shutil.get_terminal_size((100, 24)).columns)


def _without_markup(text: str) -> str:
    """Return a docstring's text without Sphinx roles and backticks.

    Example:
        >>> _without_markup("pass ``True``, see :class:`~torch.utils.data.DataLoader`")
        'pass True, see DataLoader'
    """
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text).replace("`", "")


def summary_of(docstring: str) -> str:
    """Return the first line of a docstring, without markup."""
    return _without_markup(docstring.strip().splitlines()[0])


def _columns(title: str, texts: Mapping[str, str], width: int) -> str:
    """Return names and their texts in two columns."""
    column = max(map(len, texts)) + 2
    lines = [f"{title}:"]
    for name, text in texts.items():
        line = textwrap.fill(
            text,
            width,
            initial_indent=f"  {name:<{column}}",
            subsequent_indent=" " * (column + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(line)
    return "\n".join(lines)


def _text(entry: HelpEntry, everything: bool) -> str:
    """Return what a flag does: its first sentence, or all of them with `everything`."""
    text = _without_markup(re.sub(r"\s+", " ", entry.text.strip()))
    if not everything:
        text = re.split(r"(?<=[a-z\d)])[.;] ", text)[0]
    return text.strip().rstrip(".")


def _line(entry: HelpEntry, everything: bool, width: int) -> str:
    flag_column = f"  {flag_of(entry.name)} {type_name(flag_type(entry.annotation), everything)}"
    default = "" if entry.default in (None, ()) else f" ({entry.default})"
    text = _text(entry, everything) + default
    wrapped = textwrap.wrap(text, max(20, width - _COLUMN), break_on_hyphens=False) or [""]
    line_break = f"\n{'':<{_COLUMN}}"
    first_line = flag_column + line_break
    if len(flag_column) < _COLUMN - 1:
        first_line = f"{flag_column:<{_COLUMN - 1}} "
    return first_line + line_break.join(wrapped)


def flags_text(groups: Mapping[str, Sequence[HelpEntry]], everything: bool = False) -> str:
    """Return a line for each flag, in groups; `everything` adds the rarely used flags and the full texts."""
    width = _help_width()
    lines = []
    for title, entries in groups.items():
        shown = [entry for entry in entries if everything or not entry.rare]
        if shown:
            lines += [f"\n{title}:", *(_line(entry, everything, width) for entry in shown)]
    return "\n".join(lines)


def help_text(program: str, page: HelpPage, everything: bool = False) -> str:
    """Return the help of a command line.

    Args:
        program: how it is started, such as ``python -m recipes.mnist``.
        everything: adds the rarely used flags and the full texts.
    """
    width = _help_width()
    usage = f"usage: {program} [{'|'.join(COMMANDS)}] [flags]"
    more_help = {} if everything else {"--help-all": "all flags, with their full texts"}
    settings = {
        "--config FILE": "YAML file of settings; the last wins, and what is typed wins over all",
        "--print-config": "print all settings as such a file, and exit",
        "--version": "print the version, and exit",
    }
    lines = [
        *textwrap.wrap(usage, width, subsequent_indent="  ", break_on_hyphens=False),
        "",
        *textwrap.wrap(page.summary, width),
        "",
        _columns("Commands", COMMANDS, width),
        flags_text(page.groups, everything),
        "",
        _columns("Settings (--no-NAME is the same as --NAME false)", more_help | settings, width),
        "",
        "Examples:",
        f"  {program} --max-epochs 2 --name first",
        f"  {program} test --ckpt runs/{page.title}/NAME/checkpoints/best.ckpt",
    ]
    return "\n".join(lines)
