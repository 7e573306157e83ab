"""Parse a command line into a request, or print a text such as the help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from datamodules.errors import UserError, spelled
from recipes.base import Recipe
from recipes.runner.classes import Classes, takes_inputs
from recipes.runner.flag_help import COMMANDS, HELP_FLAGS, HelpPage, help_text, summary_of
from recipes.runner.flags import FlagParser, Given
from recipes.runner.hints import nearest
from recipes.runner.merging import as_plain, layered, with_length
from recipes.version import __version__

SCORING = ("validate", "test")
"""The commands that take a file of weights in place of a checkpoint."""
_TAKE_INPUTS = ("predict", "verify")
"""The commands after which arguments that are no flags may stand."""
_PRINT_CONFIG = {"--print-config", "--print_config"}


@dataclass(frozen=True)
class Request:
    """A command with its settings.

    Args:
        command: one of `COMMANDS`.
        given: the settings of the command, and the inputs of predict.
        folder: the folder of the run that verify trains again.
    """

    command: str
    given: Given
    folder: Path | None = None


def read_request(parser: FlagParser, recipe: type[Recipe], args: Sequence[str]) -> Request | None:
    """Read a command line; print the help, the version or the settings where it asks for them.

    Returns:
        The request to carry out; None where a text was printed.
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
    flags = [arg for arg in arguments if arg not in _PRINT_CONFIG]
    given = parser.parse(flags, takes_inputs=command in _TAKE_INPUTS)
    if _PRINT_CONFIG & set(arguments):
        settings = as_plain(layered(with_length(parser.defaults(), given.settings), given.settings))
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


def _refuse(*rules: tuple[Any, str]) -> None:
    """Raise the message of the first rule whose condition holds."""
    for holds, message in rules:
        if holds:
            raise UserError(message)


def check_request(request: Request, settings: Mapping[str, Any], classes: Classes) -> None:
    """Refuse flags that the command does not use, and a command without what it needs.

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
    bare = ", or --weights FILE, weights alone" if command in SCORING else ""
    _refuse(
        (
            ckpt and "weights" in request.given.typed,
            "--ckpt and --weights are two sources of weights; leave one of them out",
        ),
        (
            fits and settings["limit_train_batches"] == 0,
            f"{spelled('limit_train_batches', 0)} trains nothing; {spelled('max_epochs', 0)} scores the initial"
            " weights",
        ),
        (
            command != "export" and settings["format"] is not None,
            "--format is for export; a run writes its own checkpoints, and the others go by the suffix of --output",
        ),
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
            "export needs a format; pass --format safetensors, state-dict or onnx",
        ),
    )
    if not fits and command != "export":
        _check_output(output, recipe.prediction_files if predicts else (".json", ".csv"))


def _check_output(output: str | None, endings: Sequence[str]) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if output is not None and Path(output).suffix not in endings:
        raise UserError(f"expected a name that ends in {' or '.join(endings)}", setting="output", value=output)
    if output is not None and not Path(output).parent.is_dir():
        raise UserError(f"there is no folder {Path(output).parent}", setting="output", value=output)
