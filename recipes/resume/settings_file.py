"""Files of settings, read within bounds: YAML's aliases let a few lines stand for more values than memory holds."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from datamodules.errors import UserError

__all__ = ["check_settings", "is_file", "read_settings"]

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


def read_settings(path: str | Path) -> Any:
    """What a YAML file of settings holds, as plain Python.

    Raises:
        UserError: it is no file, is too large, is no YAML, or its aliases stand for too much.
    """
    if not is_file(path):
        raise UserError(f"there is no file {path}")
    path = Path(path)
    if (size := path.stat().st_size) > _LARGEST_FILE:
        raise UserError(f"{path} has {size:,} bytes, and a file of settings has {_LARGEST_FILE:,} at most")
    try:
        text = path.read_text(encoding="utf-8")
        # Before values are made of it: keys that are merged (<<) are written out then.
        _check(yaml.compose(text, yaml.SafeLoader), _parts_of_node, path)
        return yaml.safe_load(text)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()) if not isinstance(error, RecursionError) else "it is nested too deeply"
        raise UserError(f"{path} cannot be read as a file of settings: {reason}") from error
