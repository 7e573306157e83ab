"""Merge the settings of a run: defaults, a checkpoint's, those of files, and what was typed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.errors import spelled
from recipes.runner.hints import FURTHER


@dataclass(frozen=True)
class Marks:
    """The sets of settings with special rules, from the marks of their types.

    Args:
        free: do not define the experiment: they do not change what is learned, or only how long.
        one_call: belong to one call, and are not saved with a run.
        of_machine: choose where a run trains, and are not taken from a checkpoint.
        null_ends: a null that is typed on the command line switches off what the run had.
    """

    free: frozenset[str]
    one_call: frozenset[str]
    of_machine: frozenset[str]
    null_ends: frozenset[str]


def is_auto(value: Any) -> bool:
    """Return whether a value is None or "auto", so that the run resolves it."""
    return value is None or value == "auto"


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others on top; further parameters of the Trainer are replaced one by one."""
    settings = {**below, **above}
    further = below.get(FURTHER)
    if isinstance(further, Mapping) and isinstance(above.get(FURTHER), Mapping):
        settings[FURTHER] = {**further, **above[FURTHER]}
    return settings


def with_length(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults, without a limit of epochs where the user limits the steps only."""
    steps = given.get("max_steps", defaults["max_steps"])
    ends_by_steps = steps not in (-1, None) and given.get("max_epochs") is None
    return {**defaults, "max_epochs": -1} if ends_by_steps else dict(defaults)


def merge(
    marks: Marks,
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    saved: Mapping[str, Any] | None = None,
    auto_settings: Collection[str] | None = None,
    keeps: Collection[str] = (),
    typed: Collection[str] = (),
) -> dict[str, Any]:
    """Return all settings of a command; each layer replaces the one before it.

    A given null or "auto" means the value that the saved run has resolved it to.

    Args:
        defaults: the defaults of all settings; saved settings without a default are left out.
        given: the settings in files and on the command line.
        saved: the settings of a checkpoint.
        auto_settings: the saved settings that the run has resolved; by default any.
        keeps: settings of the machine or of one call that are taken from the saved ones nevertheless.
        typed: the given settings on the command line, where a null can switch off what the run had.
    """
    excluded = (marks.one_call | marks.of_machine) - set(keeps)
    saved_settings = {}
    for name, value in (saved or {}).items():
        if name in defaults and name not in excluded:
            saved_settings[name] = value
    # Free settings may change in a resume, so that a null or "auto" of theirs is resolved again. A null in a file does
    # not switch off what the run had: --print-config writes a null for each setting without a value.
    resolved_by_run = saved_settings.keys() - marks.free - (marks.null_ends & set(typed))
    if auto_settings is not None:
        resolved_by_run &= set(auto_settings)
    replacing = {name: value for name, value in given.items() if not (is_auto(value) and name in resolved_by_run)}
    return layered({**defaults, **saved_settings}, replacing)


def fill(settings: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose None and "auto" are replaced by resolved values."""
    filled = dict(settings)
    for name, value in found.items():
        if value is not None and name in settings and is_auto(settings[name]):
            filled[name] = value
    return filled


def as_plain(value: Any) -> Any:
    """Convert a value to what YAML, JSON and checkpoints hold: numbers, text, lists and dicts.

    Raises:
        TypeError: the value cannot be converted to these.

    Example:
        >>> as_plain({"file": Path("a.csv"), "sizes": (1, 2)})
        {'file': 'a.csv', 'sizes': [1, 2]}
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, timedelta):
        minutes, seconds = divmod(int(value.total_seconds()), 60)
        return f"{minutes // 1440:02}:{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02}"
    if isinstance(value, Mapping):
        return {name: as_plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)  # The order of a set differs between processes, and ranks compare their settings.
    if isinstance(value, (list, tuple, range)):
        return [as_plain(item) for item in value]
    raise TypeError(f"expected numbers, text, lists and dicts, found a {type(value).__name__}")


def same_setting(name: str, old: Any, new: Any) -> bool:
    """Return whether two values of a setting are equivalent.

    Files of settings that end in ``_file`` may be in another folder.
    """
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(same_setting(name, *pair) for pair in zip(old, new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {str(k): v for k, v in old.items()} == {str(k): v for k, v in new.items()}
    if isinstance(old, str) and isinstance(new, str) and old != new:
        a = Path(old).expanduser()
        b = Path(new).expanduser()
        return a.name == b.name if name.endswith("_file") else a.resolve() == b.resolve()
    return bool(old == new)


def describe_differences(
    saved: Mapping[str, Any],
    settings: Mapping[str, Any],
    free: Collection[str],
    auto_settings: Collection[str] | None = None,
) -> list[str]:
    """Return a line for each setting that asks for another experiment than the saved one.

    A setting that is left open (None, "auto") has been resolved in the saved run.

    Args:
        free: the settings that may differ.
        auto_settings: the settings that the saved run has resolved; None for any.
    """
    lines = []
    for name, new in settings.items():
        resolved = is_auto(new) and (auto_settings is None or name in auto_settings)
        if name in free or name not in saved or resolved or same_setting(name, saved[name], new):
            continue
        lines.append(f"{spelled(name)} is {new}, and {saved[name]} in the checkpoint")
    return lines
