"""The settings of a run in one mapping: defaults, then those of a checkpoint, of files, and what was typed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Marks:
    """Which settings are special, by the marks of their types.

    Args:
        free: do not make the experiment: what is learned stays, or only its length changes.
        one_call: belong to one call, and are not saved with a run.
        of_machine: say where a run trains, and are not taken from a checkpoint.
        null_ends: a null that is typed on the command line ends what the run had.
    """

    free: frozenset[str]
    one_call: frozenset[str]
    of_machine: frozenset[str]
    null_ends: frozenset[str]


def is_auto(value: Any) -> bool:
    """Whether a setting is left to the run."""
    return value is None or value == "auto"


FURTHER = "trainer"
"""The setting that holds the parameters without a name of their own."""


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others on top, which replace them; further parameters of the Trainer are replaced one by one."""
    settings = {**below, **above}
    further = below.get(FURTHER)
    if isinstance(further, Mapping) and isinstance(above.get(FURTHER), Mapping):
        settings[FURTHER] = {**further, **above[FURTHER]}
    return settings


def with_length(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a training whose length is given in steps: the epochs of a recipe could end it before."""
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
    """All settings of a command; each layer replaces those before it.

    A null or "auto" that is given stands for what the saved run has resolved it to.

    Args:
        defaults: of all settings; others are left out.
        given: in files and on the command line.
        saved: those of a checkpoint.
        auto_settings: which of the saved ones the run has resolved; by default any.
        keeps: settings of the machine and of one call that are also taken from the saved ones.
        typed: which of those given stand on the command line, where a null can end what it asked for.
    """
    not_taken = (marks.one_call | marks.of_machine) - set(keeps)
    taken = {name: value for name, value in (saved or {}).items() if name in defaults and name not in not_taken}
    stands = taken.keys() - marks.free - (marks.null_ends & set(typed))
    if auto_settings is not None:
        stands &= set(auto_settings)
    wanted = {name: value for name, value in given.items() if not (is_auto(value) and name in stands)}
    return layered({**defaults, **taken}, wanted)


def fill(settings: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those that were left open replaced by what was found."""
    filled = {name: value for name, value in found.items() if name in settings and is_auto(settings[name])}
    return {**settings, **{name: value for name, value in filled.items() if value is not None}}


def as_plain(value: Any) -> Any:
    """A value as YAML, JSON and checkpoints hold it: numbers, text, lists and dicts.

    Raises:
        TypeError: it is none of these, and stands for none.

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
        return {name: as_plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)  # As on all ranks.
    if isinstance(value, (list, tuple, range)):
        return [as_plain(each) for each in value]
    raise TypeError(f"expected numbers, text, lists and dicts, found a {type(value).__name__}")


def same_setting(name: str, old: Any, new: Any) -> bool:
    """Whether two values of a setting ask for the same; files, of settings that end in ``_file``, may lie elsewhere."""
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
    """A line for each setting that asks for another experiment than the saved one.

    A setting that is left open (None, "auto") has been resolved in the saved run.

    Args:
        free: settings that may differ.
        auto_settings: those that the saved run has resolved; None for any.
    """
    lines = []
    for name, new in settings.items():
        resolved = is_auto(new) and (auto_settings is None or name in auto_settings)
        if name in free or name not in saved or resolved or same_setting(name, saved[name], new):
            continue
        lines.append(f"`{name}` is {new}, and {saved[name]} in the checkpoint")
    return lines
