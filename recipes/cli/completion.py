"""Completion of recipes and flags in bash and zsh, by shtab.

Its script holds every flag, so that a Tab starts no Python: completion by argcomplete, which jsonargparse supports as
well, would import torch at each.
"""

import argparse
import types
from collections.abc import Iterable
from pathlib import Path
from runpy import run_module
from typing import Any, Literal, Union, get_args, get_origin

import shtab

from recipes.cli.flags import FlagParser
from recipes.launch.settings import flag_of

__all__ = ["completion_script"]


def _choices(annotation: Any) -> list[str]:
    """The values that a type lists."""
    if get_origin(annotation) is Literal:
        return list(dict.fromkeys(map(str, get_args(annotation))))
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return []


def _add_flags(parser: argparse.ArgumentParser, flags: FlagParser, commands: Iterable[str]) -> None:
    parser.add_argument("command", nargs="?", choices=list(commands))
    for name, annotation in flags.types().items():
        if name.startswith("print_"):  # jsonargparse's own
            continue
        flag, choices = flag_of(name), _choices(annotation)
        accepted = (annotation, *get_args(annotation))
        if bool in accepted and not choices:
            parser.add_argument(flag, f"--no-{flag[2:]}", action="store_true")
            continue
        action = parser.add_argument(flag, choices=choices or None)
        if not choices and (str in accepted or Path in accepted or name == "config"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    parser.add_argument("--help", "--help-all", "--print-config", action="store_true")


def completion_script(shell: str, recipes: dict[str, str]) -> str:
    """The script that completes ``lightning-recipes``.

    Args:
        shell: one of shtab's, as bash and zsh.
        recipes: names and summaries.
    """
    root = argparse.ArgumentParser("lightning-recipes", add_help=False)
    names = root.add_subparsers()
    names.add_parser("list", add_help=False, help="list the recipes")
    verification = names.add_parser(
        "verify", add_help=False, help="train a part of a run again, and compare the weights"
    )
    verification.add_argument("run").complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    for name, summary in recipes.items():
        parser = names.add_parser(name, add_help=False, help=summary)

        def take(flags: FlagParser, commands: Iterable[str], parser: argparse.ArgumentParser = parser) -> None:
            _add_flags(parser, flags, commands)

        # In the recipe's `__main__`, `run` passes its parser to this function and returns.
        run_module(f"recipes.{name}", {"TAKE_PARSER": take}, run_name="__main__", alter_sys=True)
    return shtab.complete(root, shell)
