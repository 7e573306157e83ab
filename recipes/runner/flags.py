"""A flat command line from the signatures of classes: one flag per parameter, in groups.

jsonargparse reads names, types, defaults and texts from constructors and their docstrings. This file adds what users
expect of a command line: dashes or underscores, switches without values, help on one page, and errors in one line.
"""

import difflib
import importlib
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import groupby, pairwise
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings
from typing_extensions import override

from datamodules.contract import Rare, marked_parameters
from datamodules.errors import UserError
from recipes.runner.command import flag_of
from recipes.runner.saved_run import read_settings

_CLASS_PATH = "optimizer"
"""The flag whose text may be the import path of a class."""

# Parameters of type Any would take objects of all classes, and torch has some that start a program.
set_parsing_settings(instantiate_subclass_spec_in_any=False)
_PLAIN = (int, float, str, type(None), timedelta, Enum, os.PathLike)

_SWITCH_VALUES = {"true", "false", "yes", "no", "1", "0", "null", "none"}

# Names of other libraries and of the Trainer, whose spelling is not close to ours.
_OTHER_NAMES = {
    "accumulate_grad_batches": "accumulate",
    "checkpoint": "ckpt",
    "ckpt_path": "ckpt",
    "epochs": "max_epochs",
    "gpus": "devices",
    "gamma": "schedule_args",
    "learning_rate": "lr",
    "milestones": "schedule_args",
    "nodes": "num_nodes",
    "sync_batchnorm": "sync_bn",
}


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one class.

    Args:
        title: the heading in the help.
        cls: the class whose constructor is read.
        skip: parameters without a flag.
        common: parameters that ``--help`` shows; None shows all but those marked with `Rare`.
        texts: what parameters do, in place of the text in the class's docstring.
    """

    title: str
    cls: type
    skip: frozenset[str] = frozenset()
    common: frozenset[str] | None = None
    texts: Mapping[str, str] = field(default_factory=dict)


def type_name(annotation: Any, everything: bool = True) -> str:
    """A type in one word, as the help names it; of many choices the first, unless `everything` is asked for."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        joined = "|".join(dict.fromkeys(map(str, arguments)))
        return joined if everything or len(joined) <= 34 else f"{arguments[0]}|{arguments[1]}|..."
    if origin in (Union, types.UnionType):
        names = dict.fromkeys(type_name(a, everything) for a in arguments if a is not type(None))
        return "|".join(names).replace("INT|FLOAT", "NUMBER")
    return {"str": "TEXT", "NoneType": "null"}.get(
        name := getattr(annotation, "__name__", str(annotation)), name.upper()
    )


def _allows_bare(annotation: Any) -> bool:
    return annotation is bool or (get_origin(annotation) in (Union, types.UnionType) and bool in get_args(annotation))


def _takes_list(annotation: Any) -> bool:
    return any(get_origin(part) in (list, Sequence) for part in (annotation, *get_args(annotation)))


def _switch_values(annotation: Any) -> set[str]:
    """What may follow a switch as its value, in place of the next flag; numbers may, too."""
    literals = (get_args(part) for part in get_args(annotation) if get_origin(part) is Literal)
    return _SWITCH_VALUES | {choice for choices in literals for choice in choices}


def without_markup(text: str) -> str:
    """A docstring's text without Sphinx roles and backticks.

    Example:
        >>> without_markup("pass ``True``, see :class:`~torch.utils.data.DataLoader`")
        'pass True, see DataLoader'
    """
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text).replace("`", "")


def _one_line(message: str) -> str:
    return re.sub(r"\s+", " ", message.removeprefix("error: ")).strip()


def nearest(name: str, names: Iterable[str]) -> str:
    """A question about the name that was meant, such as "; did you mean lr?"; nothing where none is close."""
    known = list(names)
    others = {other: meant for other, meant in _OTHER_NAMES.items() if meant in known}
    close = difflib.get_close_matches(name, [*known, *others], n=1, cutoff=0.5)
    return f"; did you mean {others.get(close[0], close[0])}?" if close else ""


def _needs_object(annotation: Any) -> bool:
    return isinstance(annotation, type) and get_origin(annotation) is None and not issubclass(annotation, _PLAIN)


def _flag_type(annotation: Any) -> Any:
    """The type of a flag: a parameter's without `Free`, `OneCall` and `Rare`, and without classes that need an object.

    In a union int comes before float, and float before text: jsonargparse takes the first that fits. 1 is not the share
    1.0, and 1.0 is not the time "1.0". A time stays text: jsonargparse reads 00:00:30:00 as 30 s. The order in the
    source does not tell: typing returns an equal union that another library has made before.
    """
    if get_origin(annotation) is Annotated:
        return _flag_type(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    parts = [part for part in map(_flag_type, get_args(annotation)) if not _needs_object(part)]
    places = {float: 1, str: 2, timedelta: 3} if float in parts else {}
    return Union[tuple(sorted(parts, key=lambda part: places.get(part, 0)))]  # noqa: UP007


def help_width() -> int:
    """The columns of the help: those of the terminal, 80 at least, or 100."""
    return max(80, shutil.get_terminal_size((100, 24)).columns)


class FlagParser(ArgumentParser):
    """A parser for the parameters of several classes, which share one flag where they share a name.

    Raises:
        UserError: from `parse_args`, for any mistake on the command line or in the file.
    """

    def __init__(self, groups: Sequence[FlagGroup] = (), prog: str | None = None, **options: Any) -> None:
        # jsonargparse makes further parsers of this class, without groups, for the parameters of a class by name.
        super().__init__(prog=prog, **{"add_help": False, "exit_on_error": False} | options)
        self.names: dict[str, list[str]] = {}
        self._shown: list[tuple[FlagGroup, list[str]]] = []
        seen: set[str] = set()
        for group in groups:
            try:
                names = ArgumentParser(exit_on_error=False).add_class_arguments(group.cls, skip=set(group.skip))
            except ValueError as error:
                name = group.cls.__name__
                raise UserError(f"the parameters of {name} are the flags of its command line: {error}") from error
            self.names[group.title] = names
            self.add_class_arguments(group.cls, skip=set(group.skip) | (seen & set(names)), instantiate=False)
            self._shown.append((group, [name for name in names if name not in seen]))
            seen |= set(names)
        if groups:
            self.add_argument(
                "--config", action=ActionConfigFile, help="a YAML file of settings, as --print-config prints"
            )
        self._flags = {a.dest: a for a in self._actions if a.option_strings and not a.dest.endswith(".help")}
        for action in self._flags.values():
            if (annotation := getattr(action, "_typehint", None)) is not None:
                action._typehint = _flag_type(annotation)  # type: ignore[attr-defined]
        for name, text in (pair for group in groups for pair in group.texts.items()):
            self._flags[name].help = text

    def _type(self, name: str) -> Any:
        action = self._flags[name]
        return getattr(action, "_typehint", None) or action.type

    def types(self) -> dict[str, Any]:
        """The type of every flag."""
        return {name: self._type(name) for name in self._flags}

    def set_known_defaults(self, values: dict[str, Any]) -> None:
        """Take defaults from other settings, such as those of a checkpoint.

        Names without a flag are ignored.

        Raises:
            UserError: a value cannot be used.
        """
        known = {name: value for name, value in values.items() if name in self._flags}
        try:
            self.set_defaults(known)
        except Exception as error:
            raise UserError(f"the saved settings cannot be used: {_one_line(str(error))}") from error

    def as_plain(self, namespace: Namespace) -> dict[str, Any]:
        """All settings as plain Python, as in a file of settings."""
        return dict(yaml.safe_load(self.dump(namespace, skip_none=False)))

    def select(self, config: dict[str, Any], title: str) -> dict[str, Any]:
        """The parameters of one group's class."""
        return {name: config[name] for name in self.names[title]}

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(message)

    def _spell_out(self, args: Sequence[str]) -> list[str]:
        """Underscores in names, values for bare switches and lists, and an error for flags that do not exist."""
        spelled = []
        args = self._join_lists(args)
        for i, arg in enumerate(args):
            if re.match(r"-[A-Za-z]\w", arg):
                raise UserError(f"flags begin with two dashes; did you mean -{arg}?")
            if not re.match(r"--\w", arg):
                spelled.append(arg)
                continue
            flag, equals, value = arg[2:].partition("=")
            name = flag.replace("-", "_")
            if name.startswith("no_") and name not in self._flags and not equals:
                name, equals, value = name[3:], "=", "false"
            if name not in self._flags and name != "print_config":
                names = [*self._flags, "help", "help_all", "print_config"]
                hint = nearest(name, names).replace("mean ", "mean --").replace("_", "-")
                raise UserError(f"there is no flag --{flag}{hint or '; --help-all lists the flags'}")
            following = args[i + 1].lower() if i + 1 < len(args) else "--"
            bare = not equals and name in self._flags and _allows_bare(self._type(name))
            if bare and following not in _switch_values(self._type(name)) and not following.lstrip("-").isdigit():
                equals, value = "=", "true"
            spelled += ["--config", value] if name == "config" and equals else [f"--{name}{equals}{value}"]
        # With jsonargparse the last one wins; here the command line wins over all files, wherever they are named.
        pairs = enumerate(pairwise(spelled))
        named = {i for i, (flag, path) in pairs if flag == "--config" and not path.startswith("--")}
        named |= {i + 1 for i in named}
        return [spelled[i] for i in sorted(range(len(spelled)), key=lambda i: i not in named)]

    def _join_lists(self, args: Sequence[str]) -> list[str]:
        """Several values behind the flag of a list as one, as a shell writes them for ``--source-file corpus.*.de``."""
        joined: list[str] = []
        if any(not action.option_strings for action in self._actions):
            return list(args)  # Which values are arguments of the command is not known.
        for of_value, values in groupby(args, key=lambda arg: not re.match(r"--\w", arg)):
            given = list(values)
            name = joined[-1].removeprefix("--").replace("-", "_") if joined else ""
            several = of_value and len(given) > 1 and name in self._flags and _takes_list(self._type(name))
            joined += [json.dumps(given)] if several else given
        return joined

    def parse(self, args: Sequence[str]) -> Namespace:
        """Read a command line."""
        args, files = self._spell_out(args), dict[str, str]()
        for flag, path in pairwise(args):
            if flag == "--config" and not path.startswith("--"):
                files |= dict.fromkeys(self._settings_in(path), path)
        try:
            return self.parse_args(args)
        except Exception as error:
            raise UserError(self._explain(str(error), args, files)) from error

    def _settings_in(self, path: str) -> list[str]:
        """The names of the settings in a file, each of which has to be a flag."""
        settings = read_settings(path)
        if not isinstance(settings, dict):
            raise UserError(f"{path} holds no settings; expected lines such as seed: 1")
        for name in settings:
            if name not in self._flags:
                raise UserError(f"{path}: there is no setting {name}{nearest(str(name), self._flags)}")
        return list(settings)

    def import_optimizer(self, namespace: Namespace, args: Sequence[str]) -> None:
        """Import the module of an optimiser by its import path, if that was typed or is in the file that was.

        Raises:
            UserError: a checkpoint names it, which must not make the program import code; or it cannot be imported.
        """
        path = str(namespace[_CLASS_PATH])
        module = path.rpartition(".")[0]
        if not module or module in sys.modules:
            return
        if self.typed(args).get(_CLASS_PATH) != path:
            raise UserError(f"a checkpoint must not import {module}; if you trust it, pass --{_CLASS_PATH} {path}")
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"{path} cannot be imported: {error}; install its package, or correct the name") from error

    def typed(self, args: Sequence[str]) -> dict[str, Any]:
        """The settings of a command line that `parse` has taken, and of the file that it names, without defaults."""
        return vars(self.parse_args(self._spell_out(args), defaults=False))

    def _explain(self, message: str, args: Sequence[str], files: Mapping[str, str]) -> str:
        """What jsonargparse says in several lines, in one, with the type as the help names it.

        Args:
            files: that hold settings, by their names.
        """
        if found := re.match("unrecognized arguments: (.*)", message):
            if any(action.nargs == "*" and not action.option_strings for action in self._actions):
                return f"pass all inputs beside each other, also {found[1]}"
            return f"{found[1]!r} is neither a flag nor the value of one; a command such as test comes first"
        if found := re.match(r"argument --(\w+): expected one argument", message):
            wanted = "a file of settings" if found[1] == "config" else type_name(self._type(found[1]))
            return f"{flag_of(found[1])} needs a value: {wanted}"
        if found := re.match(r'Parser key "(\w+)".*(?:Got|Given) value: (.*)', message, re.DOTALL):
            name, value = found.groups()
            exactly = f"--{name}={value}" in args or (f"--{name}", value) in pairwise(args)
            typed = exactly or (name not in files and any(arg.partition("=")[0] == f"--{name}" for arg in args))
            what = f"{flag_of(name)} {value}" if typed else f"{files.get(name, 'the saved settings')}: {name}: {value}"
            return f"{what}: expected {type_name(self._type(name))}"
        return _one_line(message)

    def print_flags(self, everything: bool = False) -> None:
        """Print the help: grouped, a line per flag; `everything` adds the rarely used flags and the full texts."""
        width = help_width()
        indent = 34
        lines = []
        for group, names in self._shown:
            common = set(names) - marked_parameters(group.cls, Rare) if group.common is None else group.common
            shown = [name for name in names if everything or name in common]
            if not shown:
                continue
            lines.append(f"\n{group.title}:")
            for name in shown:
                action = self._flags[name]
                left = f"  {flag_of(name)} {type_name(self._type(name), everything)}"
                text = re.sub(r"\s+", " ", (action.help or "").replace("%%", "%").strip())
                text = "" if "==SUPPRESS==" in text else without_markup(text)
                if not everything:
                    text = re.split(r"(?<=[a-z\d)])[.;] ", text)[0]
                text = text.strip().rstrip(".")
                default = "" if action.default in (None, (), inspect.Parameter.empty) else f" ({action.default})"
                if default:  # Lightning's texts repeat it.
                    text = re.sub(r"[. ]*Default: \S+$", "", text)
                room = width - indent - len(default)
                if not everything:
                    text = textwrap.shorten(text, max(20, room), break_on_hyphens=False, placeholder=" ...")
                wrapped = textwrap.wrap(text + default, max(20, width - indent), break_on_hyphens=False) or [""]
                begin = f"\n{'':<{indent}}"
                first = f"{left:<33} " if len(left) < 33 else left + begin
                lines.append(first + begin.join(wrapped))
        print("\n".join(lines))  # noqa: T201
