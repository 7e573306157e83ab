"""The user's command, the types of flags, and the help.

This module imports neither torch nor Lightning, so that the help is printed immediately.

Tested in `tests/recipes/runner/test_flags.py`.
"""

import inspect
import os
import re
import shlex
import shutil
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from datamodules.errors import flag_of

DEFAULT_PORT = 29500
_PLAIN = (int, float, str, type(None), timedelta, Enum, os.PathLike)
_SWITCH_VALUES = {"true", "false", "yes", "no", "1", "0", "null", "none"}
_MAX_CHOICE_LENGTH = 34
"""Maximum number of characters of the choices in the short help."""
COMMANDS = {
    "fit": "train, then test the best checkpoint (the default)",
    "validate": "score a checkpoint on the validation part",
    "test": "score a checkpoint on the test set",
    "predict": "run inference on the given inputs: predict --ckpt FILE INPUT ...",
    "verify": "train a part of a run again, and compare the weights to the bit: verify runs/RECIPE/NAME",
    "export": "write the network of a checkpoint for other programs, and verify the file",
}
PREDICT_INPUTS = "predict_inputs"
"""The parameter of a data module for the arguments of predict, which are not a flag."""
HELP_FLAGS = frozenset({"-h", "--help", "--help-all", "--help_all"})
PRINT_CONFIG_FLAGS = frozenset({"--print-config", "--print_config"})
_COLUMN = 34
"""The column at which the texts of the flags begin."""


@dataclass(frozen=True)
class Command:
    """The user's command, to be printed with other flags.

    Args:
        program: the command line that starts the program on one device.
        args: the arguments of the program.
        launcher: torchrun or slurm, if one of them starts the processes.
        nodes: the number of nodes on which the launcher starts processes.
        devices: the number of processes on each node.
        call: the call of `recipes.fit` in a program; empty if a command was typed.
        srun: the command line that starts Slurm's launcher.

    Example:
        >>> typed = Command("python -m recipes.mnist", ["--num_nodes=2", "--lr", "0.1"])
        >>> typed.using(num_nodes=4, node_rank="I")
        'python -m recipes.mnist --lr 0.1 --num-nodes 4 --node-rank I'
        >>> typed.started_by("slurm", 2, 8).using(master_port=1234)
        'srun --nodes=2 --ntasks-per-node=8 python -m recipes.mnist --lr 0.1 --master-port 1234'
    """

    program: str
    args: Sequence[str] = ()
    launcher: str = ""
    nodes: int = 1
    devices: int = 1
    call: str = ""
    srun: str = "srun"

    @property
    def in_program(self) -> bool:
        """Whether a program has called `recipes.fit`, without a typed command."""
        return bool(self.call)

    def started_by(self, launcher: str, nodes: int, devices: int) -> "Command":
        """Return this command for processes that a launcher starts; `using` formats its line."""
        return replace(self, launcher=launcher, nodes=nodes, devices=devices)

    def alone(self, command: str = "") -> "Command":
        """Return the program with one of its commands, without the flags."""
        return replace(self, program=f"{self.program} {command}".rstrip(), args=())

    def using(self, **flags: Any) -> str:
        """Format the command with these flags replaced; None removes a flag."""
        start = self.program
        if self.launcher == "slurm":
            start = f"{self.srun} --nodes={self.nodes} --ntasks-per-node={self.devices} {start}"
        elif self.launcher == "torchrun":
            rendezvous = f"--nnodes {self.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:{DEFAULT_PORT}"
            topology = "--standalone" if self.nodes == 1 else rendezvous
            start = f"torchrun {topology} --nproc-per-node {self.devices} {start.removeprefix('python ')}"
        if self.launcher in ("slurm", "torchrun"):
            # The launcher decides the number and the place of the processes, and these flags might contradict it.
            flags = dict.fromkeys(("devices", "num_nodes", "node_rank", "master_addr")) | flags
        words: list[str] = []
        skips_value = False
        for i, arg in enumerate(self.args):
            name, equals, _ = arg.removeprefix("--").partition("=")
            if skips_value:
                skips_value = False
            elif arg.startswith("--") and name.replace("-", "_") in flags:
                skips_value = not equals and i + 1 < len(self.args) and not self.args[i + 1].startswith("--")
            else:
                words.append(shlex.quote(arg))
        for name, value in flags.items():
            if value is not None:
                words += [flag_of(name), shlex.quote(str(value))]
        return " ".join([start, *words])

    def split(self, nodes: int, devices: int) -> str:
        """Format the command for other numbers of nodes and devices."""
        if self.launcher in ("slurm", "torchrun"):
            return self.started_by(self.launcher, nodes, devices).using()
        if nodes == self.nodes:
            return self.using(devices=devices)
        return self.using(devices=devices, num_nodes=nodes)


def flag_type(annotation: Any) -> Any:
    """Return the type of a flag: the parameter's type without its marks, and without classes that need an object.

    In a union, int comes before float, and float before text, because jsonargparse uses the first type that fits: 1 is
    not the share 1.0, and 1.0 is not the time "1.0". A time stays text: jsonargparse reads 00:00:30:00 as 30 s. The
    order in the source is not reliable, because typing caches unions: it may return an equal union in another order.
    """
    if get_origin(annotation) is Annotated:
        return flag_type(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    members = [member for member in map(flag_type, get_args(annotation)) if not _needs_object(member)]
    if float in members:
        members.sort(key=_position_in_union)
    return Union[tuple(members)]  # noqa: UP007


def _position_in_union(annotation: Any) -> int:
    return {float: 1, str: 2, timedelta: 3}.get(annotation, 0)


def _needs_object(annotation: Any) -> bool:
    return isinstance(annotation, type) and get_origin(annotation) is None and not issubclass(annotation, _PLAIN)


def type_name(annotation: Any, everything: bool = True) -> str:
    """Return a type in one word, for the help; many choices are cut unless `everything` is True.

    Example:
        >>> type_name(int | None), type_name(Literal["gas", "oil"]), type_name(float | int)
        ('INT', 'gas|oil', 'FLOAT|INT')
    """
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Literal:
        joined = "|".join(dict.fromkeys(map(str, arguments)))
        if everything or len(joined) <= _MAX_CHOICE_LENGTH:
            return joined
        return f"{arguments[0]}|{arguments[1]}|..."
    if origin in (Union, types.UnionType):
        names = dict.fromkeys(type_name(member, everything) for member in arguments if member is not type(None))
        return "|".join(names).replace("INT|FLOAT", "NUMBER")
    name = getattr(annotation, "__name__", str(annotation))
    return {"str": "TEXT", "NoneType": "null"}.get(name, name.upper())


def allows_none(annotation: Any) -> bool:
    """Return whether null is a value of a type."""
    if annotation in (Any, None, type(None), inspect.Parameter.empty):
        return True
    return get_origin(annotation) in (Union, types.UnionType) and any(map(allows_none, get_args(annotation)))


def is_switch(annotation: Any) -> bool:
    """Return whether a flag needs no value."""
    return annotation is bool or (get_origin(annotation) in (Union, types.UnionType) and bool in get_args(annotation))


def takes_list(annotation: Any) -> bool:
    """Return whether several values may follow a flag."""
    return any(get_origin(member) in (list, Sequence) for member in (annotation, *get_args(annotation)))


def switch_values(annotation: Any) -> set[str]:
    """Return the words that may follow a switch as its value; a number may follow too."""
    literals = (get_args(member) for member in get_args(annotation) if get_origin(member) is Literal)
    return _SWITCH_VALUES | {choice for choices in literals for choice in choices}


@dataclass(frozen=True)
class HelpEntry:
    """A flag in the help.

    Args:
        name: the name of the parameter.
        annotation: the type of the parameter.
        default: the default; None if there is no default.
        text: the text in the docstring.
        rare: whether the flag is only in ``--help-all``.
    """

    name: str
    annotation: Any
    default: Any
    text: str
    rare: bool


@dataclass(frozen=True)
class HelpPage:
    """The content of a command line's help.

    Args:
        summary: the first line of the recipe's docstring.
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
    """Return the text of a flag: its first sentence, or with `everything` all sentences."""
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
    """Format a line for each flag, in groups; `everything` adds the rarely used flags and the full texts."""
    width = _help_width()
    lines = []
    for title, entries in groups.items():
        shown = [entry for entry in entries if everything or not entry.rare]
        if shown:
            lines += [f"\n{title}:", *(_line(entry, everything, width) for entry in shown)]
    return "\n".join(lines)


def help_text(program: str, page: HelpPage, everything: bool = False) -> str:
    """Format the help of a command line.

    Args:
        program: the start of the command line, such as ``python -m recipes.mnist``.
        everything: whether to add the rarely used flags and the full texts.
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


def with_typed_value(message: str, arguments: Sequence[str]) -> str:
    """Replace the number in an error of jsonargparse about a value by the typed text.

    Example:
        >>> with_typed_value('Parser key "batch_size": wrong. Given value: 1000.0', ["--batch_size", "1e3"])
        'Parser key "batch_size": wrong. Given value: 1e3'
    """
    wrong_type = re.match(r'Parser key "(\w+)[.\w]*".*(?:Got|Given) value: ', message, re.DOTALL)
    if wrong_type is None:
        return message
    for argument, following in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        if flag == f"--{wrong_type[1]}":
            return wrong_type[0] + (value if equals else following)
    return message
