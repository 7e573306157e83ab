"""Files of settings, read within bounds: YAML's aliases let a few lines stand for more values than memory holds."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from datamodules.errors import UserError

__all__ = ["check_settings", "is_file", "read_settings", "setting_lines"]

_LARGEST_FILE = 1 << 20  # Bytes. A file of settings has some thousands.
_MOST_VALUES = 100_000


def _count(root: Any, parts: Callable[[Any], Iterable[Any]]) -> int:
    """How many values there are below and including this one, where each is counted wherever it is referred to.

    Raises:
        ValueError: a value holds itself.
    """
    counts: dict[int, int] = {}
    inside: set[int] = set()

    def count(value: Any) -> int:
        key = id(value)
        if key in inside:
            raise ValueError("a value holds itself")
        if key not in counts:
            inside.add(key)
            counts[key] = 1 + sum(map(count, parts(value)))
            inside.remove(key)
        return counts[key]

    return count(root)


def _parts_of_node(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _parts_of_value(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, (list, tuple, set)) else ()


def _check(root: Any, parts: Callable[[Any], Iterable[Any]], source: str | Path) -> None:
    try:
        found = _count(root, parts)
    except (ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"cannot be read: {error}"
        raise UserError(f"{source} {reason}; expected settings as --print-config prints them") from error
    if found > _MOST_VALUES:
        raise UserError(
            f"{source} holds {found:,} values where its aliases are followed, more than the {_MOST_VALUES:,} that a"
            " file of settings may have; write them without aliases, or leave them out"
        )


def check_settings(settings: Any, source: str | Path) -> None:
    """Refuse settings that take more memory written out than as they are stored.

    Raises:
        UserError: with what was found and the limit.
    """
    _check(settings, _parts_of_value, source)


def is_file(text: str | Path) -> bool:
    """Whether a text is the path of a file; what is too long for a name is not."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


_CONFIG = "config"
"""The entry of a run's results.json that holds its settings."""


def _without_results(settings: Any) -> Any:
    """The settings of a run, where these are its results; others as they are."""
    inside = settings.get(_CONFIG) if isinstance(settings, dict) else None
    return inside if isinstance(inside, dict) else settings


def read_settings(path: str | Path) -> Any:
    """What a YAML file of settings, or a run's results.json, holds of settings, as plain Python.

    Raises:
        UserError: it is no file, is too large, is no YAML, has a setting twice, or its aliases stand for too much.
    """
    if not is_file(path):
        raise UserError(f"there is no file {path}")
    path = Path(path)
    if (size := path.stat().st_size) > _LARGEST_FILE:
        raise UserError(f"{path} has {size:,} bytes, and a file of settings has {_LARGEST_FILE:,} at most")
    try:
        text = path.read_text(encoding="utf-8")
        # Before values are made of it: keys that are merged (<<) are written out then.
        root = yaml.compose(text, yaml.SafeLoader)
        _check(root, _parts_of_node, path)
        _refuse_repeated(root, path)
        # In YAML 1.1 numbers such as 1e-05 are text.
        return _without_results(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{where}: cannot be read as a file of settings: {error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()) if not isinstance(error, RecursionError) else "it is nested too deeply"
        raise UserError(f"{path} cannot be read as a file of settings: {reason}") from error


def _refuse_repeated(root: yaml.Node | None, path: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if lines.setdefault(str(key.value), line) != line:
            raise UserError(f"{path}, line {line}: {key.value} is in line {lines[str(key.value)]}, too; leave one out")


def _lines_below(node: yaml.Node, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        parts = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(str(i), value, value) for i, value in enumerate(node.value)]
    else:
        parts = []
    for key, at, value in parts:
        yield (*name, key), at.start_mark.line + 1
        yield from _lines_below(value, (*name, key))


def setting_lines(path: str | Path) -> dict[tuple[str, ...], int]:
    """The lines of a file that `read_settings` reads: of each setting by its name, and of the values inside.

    Example:
        >>> file = getfixture("tmp_path") / "a.yaml"
        >>> file.write_text("lr: 1\\naccumulate:\\n  0: 8") > 0
        True
        >>> setting_lines(file)
        {('lr',): 1, ('accumulate',): 2, ('accumulate', '0'): 3}
    """
    root = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    lines = dict(_lines_below(root)) if root else {}
    inside = {name[1:]: line for name, line in lines.items() if name[0] == _CONFIG and len(name) > 1}
    return inside or lines
