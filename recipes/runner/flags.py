"""Parser of a command line into a request: one flag per parameter of the classes' constructors, in groups.

jsonargparse reads names, types, defaults and texts from constructors and their docstrings. This file adds the usual
features of a command line: dashes or underscores, switches without values, files of settings, and one-line errors.
Settings are not merged here: typed settings, settings in files and defaults are three mappings.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings
from typing_extensions import override

from datamodules.contract import USUALLY_CHANGEABLE, Advanced, Changeable, Transient, data_contract, marked_parameters
from datamodules.errors import UserError, flag_of, spelled
from datamodules.lightning import Callback, pl
from recipes.base import Recipe
from recipes.runner.command import (
    COMMANDS,
    HELP_FLAGS,
    PREDICT_INPUTS,
    PRINT_CONFIG_FLAGS,
    HelpEntry,
    HelpPage,
    allows_none,
    flag_type,
    help_text,
    is_switch,
    summary_of,
    switch_values,
    takes_list,
    type_name,
    with_typed_value,
)
from recipes.runner.hints import TRAINER_FLAG, nearest, unknown_flag, valid_names
from recipes.runner.launch import LaunchSettings
from recipes.runner.saved_run import read_settings
from recipes.runner.settings import (
    MachineOnly,
    NullDisables,
    RunSettings,
    SettingMarks,
    TrainerSettings,
    as_plain,
    drop_epoch_limit,
    merge_layers,
)
from recipes.runner.verify import Interval
from recipes.version import __version__

_CLASS_PATH = "optimizer"
"""The flag whose value may be the import path of a class."""
# Parameters of type Any would accept objects of all classes, and some classes of torch start a program.
set_parsing_settings(instantiate_subclass_spec_in_any=False)
SCORING = ("validate", "test")
"""The commands that take a file of weights in place of a checkpoint."""
_TAKE_INPUTS = ("predict", "verify")
"""The commands that take arguments without a flag."""


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one class.

    Args:
        title: the heading in the help.
        cls: the class with the constructor.
        skip: parameters without a flag.
    """

    title: str
    cls: type
    skip: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ParsedArguments:
    """The settings of a command line.

    Args:
        typed: the settings that were typed as flags, or the arguments of `recipes.fit`.
        files: the settings in the files that ``--config`` names; later files win.
        inputs: the arguments that are not flags.
    """

    typed: Mapping[str, Any]
    files: Mapping[str, Any]
    inputs: Sequence[str] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """All settings; what was typed wins over all files."""
        return merge_layers(self.files, self.typed)


def _one_line(message: str) -> str:
    return re.sub(r"\s+", " ", message.removeprefix("error: ")).strip()


def _is_flag(arg: str) -> bool:
    return re.match(r"--\w", arg) is not None


class FlagParser(ArgumentParser):
    """Parser for the parameters of several classes; parameters of the same name share one flag.

    Raises:
        UserError: there is a mistake on the command line, in a file or in the arguments of `recipes.fit`.
    """

    def __init__(self, groups: Sequence[FlagGroup] = (), prog: str | None = None, **options: Any) -> None:
        # jsonargparse builds parsers of this class, without groups, for the parameters of nested classes.
        super().__init__(prog=prog, **{"add_help": False, "exit_on_error": False} | options)
        self.names: dict[str, list[str]] = {}
        self.shown: list[tuple[FlagGroup, list[str]]] = []
        for group in groups:
            self._add_group(group)
        self.flags = {a.dest: a for a in self._actions if a.option_strings and not a.dest.endswith(".help")}
        for action in self.flags.values():
            annotation = getattr(action, "_typehint", None)
            if annotation is not None:
                action._typehint = flag_type(annotation)  # type: ignore[attr-defined]
        # A checkpoint or a file may have the value of a required flag; `check_required` checks all sources together.
        self._required = {name for name, action in self.flags.items() if groups and action.required}
        for name in self._required:
            self.flags[name].required = False

    def _add_group(self, group: FlagGroup) -> None:
        """Add a flag for each parameter of a class; a name that is a flag already is shared."""
        existing = set().union(*self.names.values())
        try:
            added = self.add_class_arguments(group.cls, skip={*group.skip, *existing}, instantiate=False)
            shared = ArgumentParser(exit_on_error=False).add_class_arguments(group.cls, skip={*group.skip, *added})
        except ValueError as error:
            name = group.cls.__name__
            raise UserError(f"the parameters of {name} are the flags of its command line: {error}") from error
        self.names[group.title] = [*added, *shared]
        self.shown.append((group, added))

    def type_of(self, name: str) -> Any:
        """Return the type of a flag."""
        action = self.flags[name]
        return getattr(action, "_typehint", None) or action.type

    def marked(self, mark: Any) -> frozenset[str]:
        """Return the flags whose parameters have a mark, such as `Changeable`."""
        return frozenset().union(*(marked_parameters(group.cls, mark) for group, _ in self.shown))

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of all flags."""
        return {name: value for name, value in self.get_defaults().as_dict().items() if name in self.flags}

    def help_groups(self) -> dict[str, list[HelpEntry]]:
        """Return the help of each flag, by the headings of the groups."""
        return {group.title: [self._help_entry(group, name) for name in names] for group, names in self.shown}

    def _help_entry(self, group: FlagGroup, name: str) -> HelpEntry:
        action = self.flags[name]
        default = None if action.default is inspect.Parameter.empty else action.default
        text = (action.help or "").replace("%%", "%")
        if "==SUPPRESS==" in text:
            text = ""
        return HelpEntry(name, self.type_of(name), default, text, name in marked_parameters(group.cls, Advanced))

    def select(self, settings: Mapping[str, Any], title: str) -> dict[str, Any]:
        """Return the parameters of one group's class."""
        return {name: settings[name] for name in self.names.get(title, ())}

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(message)

    # Read

    def parse(self, args: Sequence[str], takes_inputs: bool = False) -> ParsedArguments:
        """Read a command line and its files of settings.

        Args:
            takes_inputs: whether arguments that are not flags are inputs of the command.
        """
        if takes_inputs and not any(action.dest == "inputs" for action in self._actions):
            self.add_argument("inputs", nargs="*").required = False
        arguments, paths = self._spell_out(args, takes_inputs)
        files: dict[str, Any] = {}
        for path in paths:
            files = merge_layers(files, self.read(self._settings_in(path), path))
        try:
            typed = self.parse_args(arguments, defaults=False).as_dict()
        except Exception as error:
            message = with_typed_value(str(error), arguments)
            raise UserError(self._explain(message, takes_inputs=takes_inputs)) from error
        inputs = typed.pop("inputs", None) or ()
        return ParsedArguments(typed, files, inputs)

    def read(self, values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
        """Convert the settings of a file or a program to their types; names without a flag are left out.

        Args:
            values: the settings by name.
            source: the name of the origin in messages; empty for the arguments of `recipes.fit`.
        """
        flag_values = {name: value for name, value in values.items() if name in self.flags}
        for name, value in flag_values.items():
            if value is None and not allows_none(self.type_of(name)):
                expected = f"expected {type_name(self.type_of(name))}"
                if source:
                    raise UserError(f"{source}: {name}: null: {expected}")
                raise UserError(expected, setting=name, value=None)
        try:
            converted: dict[str, Any] = self.parse_object(flag_values, defaults=False).as_dict()
        except Exception as error:
            raise UserError(self._explain(str(error), source, of_program=not source)) from error
        return converted

    def read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments of `recipes.fit` to their types."""
        unknown = arguments.keys() - self.flags.keys()
        if unknown:
            name = min(unknown)
            raise UserError(f"fit() has no parameter {name}{self._hint(name, f'{TRAINER_FLAG}={{{name!r}: ...}}')}")
        plain = {}
        for name, value in arguments.items():
            try:
                plain[name] = as_plain(value)
            except TypeError:
                raise UserError(
                    f"{name} is a {type(value).__name__}, and settings are numbers, text, lists and dicts, which are"
                    " saved with the run"
                ) from None
        return self.read(plain)

    def check_required(self, settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Reject a command that gives no value to a parameter without a default.

        Args:
            settings: all settings.
            given: the settings in files and on the command line.
        """
        missing = [name for name in self.flags if name in self._required and settings[name] is None]
        # Null is a value if the type allows it, but only if the user passes it.
        unset = [name for name in missing if name not in given or not allows_none(self.type_of(name))]
        if unset:
            name = unset[0]
            raise UserError(f"{spelled(name)} has no default: pass {spelled(name)} {type_name(self.type_of(name))}")

    def import_optimizer(self, settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Import the module of an optimizer by its import path, if the user typed the path.

        Raises:
            UserError: the path is in a checkpoint, which must not make the program import code; or the import fails.
        """
        path = str(settings.get(_CLASS_PATH, ""))
        module = path.rpartition(".")[0]
        if not module or module in sys.modules:
            return
        if given.get(_CLASS_PATH) != path:
            raise UserError(f"a checkpoint must not import {module}; if you trust it, pass --{_CLASS_PATH} {path}")
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"{path} cannot be imported: {error}; install its package, or correct the name") from error

    def _settings_in(self, path: str) -> dict[str, Any]:
        """Read a file of settings; each setting must be a flag."""
        settings = read_settings(path)
        if not isinstance(settings, dict):
            raise UserError(f"{path} holds no settings; expected lines such as seed: 1")
        for name in settings:
            if name not in self.flags:
                hint = self._hint(str(name), f"{TRAINER_FLAG}: {{{name}: ...}}")
                raise UserError(f"{path}: there is no setting {name}{hint}")
        return settings

    # Spell

    def _known(self) -> list[str]:
        """Return all valid names: the flags, and the Trainer's other parameters."""
        return valid_names(self.flags, inspect.signature(pl.Trainer).parameters)

    def _hint(self, name: str, trainer_spelling: str) -> str:
        """Return "; did you mean ...?", or "" without a similar setting.

        Args:
            trainer_spelling: the spelling of this name as a parameter of the Trainer.
        """
        if f"{TRAINER_FLAG}.{name}" in self._known():
            return f"; did you mean {trainer_spelling}?"
        return nearest(name, self.flags)

    def _check_name(self, flag: str, name: str) -> None:
        """Reject a flag that does not exist."""
        is_trainer_flag = TRAINER_FLAG in self.flags and name.startswith(f"{TRAINER_FLAG}.")
        if name in self.flags or name == "config" or is_trainer_flag:
            return
        raise UserError(unknown_flag(flag, name, self.flags, inspect.signature(pl.Trainer).parameters))

    def _spell_out(self, args: Sequence[str], takes_inputs: bool) -> tuple[list[str], list[str]]:
        """Rewrite arguments for jsonargparse: underscores in names, and values for bare switches and lists."""
        rewritten: list[str] = []
        files: list[str] = []
        expects_config_file = False
        # A command with inputs has arguments that do not belong to a flag: they might be joined to a list.
        args = list(args) if takes_inputs else self._join_lists(args)
        for i, arg in enumerate(args):
            if expects_config_file:
                expects_config_file = False
                files.append(arg)
                continue
            # Typesetting programs replace two hyphens by one long dash.
            without_dashes = re.match(r"(?:-|-?[–—−]+-?)([A-Za-z][\w-]+)", arg)
            if without_dashes:
                raise UserError(f"flags begin with two hyphens; did you mean --{without_dashes[1]}?")
            if not _is_flag(arg):
                rewritten.append(arg)
                continue
            flag, equals, value = arg[2:].partition("=")
            name = flag.replace("-", "_")
            if name.startswith("no_") and name not in self.flags and not equals:
                name = name.removeprefix("no_")
                equals = "="
                value = "false"
            self._check_name(flag, name)
            following = args[i + 1] if i + 1 < len(args) else "--"
            if name == "config":
                if not equals and following.startswith("--"):
                    raise UserError("--config needs a value: a file of settings")
                if equals:
                    files.append(value)
                else:
                    expects_config_file = True
                continue
            is_bare = self._is_bare(name, following)
            if name.startswith(f"{TRAINER_FLAG}."):
                is_bare = following.startswith("--")  # Most parameters of the Trainer without a flag are switches.
            if is_bare and not equals:
                equals = "="
                value = "true"
            rewritten.append(f"--{name}{equals}{value}")
        return rewritten, files

    def _is_bare(self, name: str, following: str) -> bool:
        """Return whether a switch has no value, because the next word is another argument."""
        annotation = self.type_of(name) if name in self.flags else None
        if not is_switch(annotation):
            return False
        return following.lower() not in switch_values(annotation) and not following.lstrip("-").isdigit()

    def _join_lists(self, args: Sequence[str]) -> list[str]:
        """Join several values after the flag of a list, as a shell expands ``--source-file corpus.*.de``."""
        joined: list[str] = []
        for are_flags, run_of_args in groupby(args, key=_is_flag):
            group = list(run_of_args)
            name = joined[-1].removeprefix("--").replace("-", "_") if joined else ""
            if not are_flags and len(group) > 1 and name in self.flags and takes_list(self.type_of(name)):
                joined.append(json.dumps(group))
            else:
                joined += group
        return joined

    def _explain(self, message: str, source: str = "", *, of_program: bool = False, takes_inputs: bool = False) -> str:
        """Format an error of jsonargparse as one line, with the type as in the help.

        Args:
            source: the file with the setting, or another name for its origin; empty for flags.
            of_program: whether the setting is an argument of `recipes.fit`.
            takes_inputs: whether arguments that are not flags are inputs of the command.
        """
        unrecognized = re.match("unrecognized arguments: (.*)", message)
        if unrecognized:
            if takes_inputs:
                return f"pass all inputs beside each other, also {unrecognized[1]}"
            return f"{unrecognized[1]!r} is neither a flag nor the value of one; a command such as test comes first"
        without_value = re.match(r"argument --(\w+): expected one argument", message)
        if without_value:
            name = without_value[1]
            return f"{flag_of(name)} needs a value: {type_name(self.type_of(name))}"
        wrong_type = re.match(r'Parser key "(\w+)[.\w]*".*(?:Got|Given) value: (.*)', message, re.DOTALL)
        if wrong_type:
            name, value = wrong_type.groups()
            setting = f"{flag_of(name)} {value}"
            if source:
                setting = f"{source}: {name}: {value}"
            elif of_program:
                setting = f"{name}={value}"
            return f"{setting}: expected {type_name(self.type_of(name))}"
        return _one_line(message)


def takes_inputs(data_class: type[pl.LightningDataModule]) -> bool:
    """Return whether a data module's constructor accepts the arguments of the predict command."""
    return PREDICT_INPUTS in ArgumentParser(exit_on_error=False).add_class_arguments(data_class)


@dataclass(frozen=True)
class RunClasses:
    """The recipe and data classes of a command line.

    Args:
        recipe: the class of the recipe.
        data: the class of the data module, or a data module that was passed to `recipes.fit`.
        callbacks: a function that makes new user callbacks for the Trainer at each call.
        samples: samples in memory for the data module; None if it reads files.
    """

    recipe: type[Recipe]
    data: type[pl.LightningDataModule] | pl.LightningDataModule
    callbacks: Callable[[], Sequence[Callback]] = tuple
    samples: Any = None

    @property
    def data_class(self) -> type[pl.LightningDataModule]:
        """The class of the data module."""
        return self.data if isinstance(self.data, type) else type(self.data)

    @property
    def both(self) -> tuple[type, type]:
        """The classes of recipe and data module."""
        return self.recipe, self.data_class

    def build_data(self, options: Mapping[str, Any]) -> pl.LightningDataModule:
        """Build the data module, and pass it the samples in memory."""
        if not isinstance(self.data, type):
            return self.data
        data = self.data(**options)
        if self.samples is not None:
            data_contract(data).set_samples(self.samples)
        return data

    def parser(self, program: str = "") -> FlagParser:
        """Build the parser, with a flag for every parameter of the two constructors and of the run."""
        data_groups = []
        # A data module that was passed to `fit` has already been built, so its parameters are not flags.
        if isinstance(self.data, type):
            data_groups.append(FlagGroup("Data", self.data, frozenset({PREDICT_INPUTS})))
        groups = [
            FlagGroup("Run", RunSettings),
            *data_groups,
            FlagGroup("Recipe", self.recipe),
            # After the recipe, so that the recipe's default counts for a shared name.
            FlagGroup("Trainer", TrainerSettings),
            FlagGroup("Launch", LaunchSettings),
        ]
        parser = FlagParser(groups, program)
        parser.set_defaults(self.recipe.trainer_defaults)
        return parser

    def with_inputs(self, options: dict[str, Any], inputs: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of the data module, and the inputs of predict among them."""
        return {**options, PREDICT_INPUTS: list(inputs)} if inputs else options


def marks_of(parser: FlagParser) -> SettingMarks:
    """Return the special flags by the marks of their types."""
    return SettingMarks(
        changeable=parser.marked(Changeable) | USUALLY_CHANGEABLE,
        transient=parser.marked(Transient) | {PREDICT_INPUTS},
        machine_only=parser.marked(MachineOnly),
        null_disables=parser.marked(NullDisables),
    )


def changeable_parameters(classes: RunClasses) -> frozenset[str]:
    """Return the parameters of recipe and data that do not define the experiment."""
    owners = (classes.recipe, classes.data_class)
    return frozenset().union(USUALLY_CHANGEABLE, *(marked_parameters(owner, Changeable) for owner in owners))


@dataclass(frozen=True)
class Request:
    """A command with its settings.

    Args:
        command: one of `COMMANDS`.
        given: the settings of the command, and the inputs of predict.
        folder: the folder of the run for verify.
        interval: the part of the run that verify trains again; None before `Resolver.with_interval`.
    """

    command: str
    given: ParsedArguments
    folder: Path | None = None
    interval: Interval | None = None


def read_request(parser: FlagParser, recipe: type[Recipe], args: Sequence[str]) -> Request | None:
    """Read a command line; print the help, the version or the settings on request.

    Returns:
        The request; None if a text was printed.
    """
    command, arguments = _command(args)
    help_flags = HELP_FLAGS.intersection(arguments)
    if help_flags:
        page = HelpPage(summary_of(recipe.__doc__ or recipe.__name__), recipe.title, parser.help_groups())
        print(help_text(parser.prog, page, everything=any(arg.endswith("all") for arg in help_flags)))  # noqa: T201
        return None
    if "--version" in arguments:
        print(f"lightning-recipes {__version__}")  # noqa: T201
        return None
    flags = [arg for arg in arguments if arg not in PRINT_CONFIG_FLAGS]
    given = parser.parse(flags, takes_inputs=command in _TAKE_INPUTS)
    if PRINT_CONFIG_FLAGS.intersection(arguments):
        settings = as_plain(merge_layers(drop_epoch_limit(parser.defaults(), given.settings), given.settings))
        print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")  # noqa: T201
        return None
    if command != "verify" or not given.inputs:
        return Request(command, given)
    if len(given.inputs) > 1:
        raise UserError(f"verify trains a part of one run again, found {len(given.inputs)}: {' '.join(given.inputs)}")
    return Request(command, given, Path(given.inputs[0]))


def _command(args: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command and the arguments after it."""
    arguments = list(args)
    command = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "fit"
    if arguments and not arguments[0].startswith("-") and command not in _TAKE_INPUTS:
        if arguments[0] in COMMANDS:
            raise UserError(f"{command} and {arguments[0]} are two commands; pass one of them")
        hint = nearest(arguments[0], COMMANDS) or f"; expected one of {', '.join(COMMANDS)}, or a flag"
        raise UserError(f"unknown command {arguments[0]!r}{hint}")
    return command, arguments


def _reject(*rules: tuple[Any, str]) -> None:
    """Raise the message of the first rule whose condition holds."""
    for holds, message in rules:
        if holds:
            raise UserError(message)


def check_request(request: Request, settings: Mapping[str, Any], classes: RunClasses) -> None:
    """Reject flags that the command does not use, and a command without a required flag.

    Args:
        settings: the given settings and the defaults.
        classes: the classes of recipe and data module.
    """
    recipe = classes.recipe
    data_name = classes.data_class.__name__
    command = "fit" if request.command == "verify" else request.command
    fits = command == "fit"
    predicts = command == "predict"
    ckpt = settings["ckpt"]
    output = settings["output"]
    typed = request.given.typed
    bare = ", or --weights FILE, weights alone" if command in SCORING else ""
    _reject(
        (ckpt and "weights" in typed, "--ckpt and --weights are two sources of weights; leave one of them out"),
        (
            fits and settings["limit_train_batches"] == 0,
            f"{spelled('limit_train_batches', 0)} trains nothing; {spelled('max_epochs', 0)} scores the initial"
            " weights",
        ),
        (
            command != "export" and settings["format"] is not None,
            "--format is for export; a run writes checkpoints, and other commands follow the suffix of --output",
        ),
        (
            settings["graph"] is not None and settings["format"] != "onnx",
            f"{spelled('graph')} is the input of an onnx file; pass it to export with --format onnx",
        ),
        (command in ("validate", "export") and typed.get("tta"), "--tta is for test and predict; leave it out"),
        (fits and ckpt, "fit begins with new weights; pass --resume FILE to resume from a checkpoint"),
        (fits and output, "fit writes results.json into its run's folder; --output is for the other commands"),
        (not fits and settings["resume"], f"--resume continues training; pass --ckpt FILE to {command}"),
        (
            predicts and request.given.inputs and not takes_inputs(classes.data_class),
            f"{data_name} takes no inputs, because its constructor has no parameter predict_inputs; leave"
            f" {' '.join(request.given.inputs)} out to predict what {data_name}.predict_dataloader() yields",
        ),
        (
            not fits and not ckpt and (command not in SCORING or settings.get("weights") in (None, "none")),
            f"{command} needs a checkpoint; pass --ckpt runs/{recipe.title}/NAME/checkpoints/best.ckpt{bare}",
        ),
        (
            command == "export" and settings["format"] is None,
            "export needs a format; pass --format safetensors, state-dict, onnx or pt2",
        ),
    )
    if not fits and command != "export":
        _check_output(output, recipe.prediction_files if predicts else (".json", ".csv"))


def _check_output(output: str | None, endings: Sequence[str]) -> None:
    """Reject an output file that could not be written, before the computation."""
    if output is not None and Path(output).suffix not in endings:
        raise UserError(f"expected a name that ends in {' or '.join(endings)}", setting="output", value=output)
    if output is not None and not Path(output).parent.is_dir():
        raise UserError(f"there is no folder {Path(output).parent}", setting="output", value=output)
