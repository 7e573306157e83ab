"""The types of flags: from the annotations of constructors to what jsonargparse reads and what the help names."""

import inspect
import os
import types
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_PLAIN = (int, float, str, type(None), timedelta, Enum, os.PathLike)
_SWITCH_VALUES = {"true", "false", "yes", "no", "1", "0", "null", "none"}
_LONGEST_CHOICE = 34
"""Characters of choices that the short help names all of."""


def flag_type(annotation: Any) -> Any:
    """The type of a flag: a parameter's without its marks, and without classes that need an object.

    In a union int comes before float, and float before text: jsonargparse takes the first that fits. 1 is not the share
    1.0, and 1.0 is not the time "1.0". A time stays text: jsonargparse reads 00:00:30:00 as 30 s. The order in the
    source does not tell: typing returns an equal union that another library has made before.
    """
    if get_origin(annotation) is Annotated:
        return flag_type(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    parts = [part for part in map(flag_type, get_args(annotation)) if not _needs_object(part)]
    places = {float: 1, str: 2, timedelta: 3} if float in parts else {}
    return Union[tuple(sorted(parts, key=lambda part: places.get(part, 0)))]  # noqa: UP007


def _needs_object(annotation: Any) -> bool:
    return isinstance(annotation, type) and get_origin(annotation) is None and not issubclass(annotation, _PLAIN)


def type_name(annotation: Any, everything: bool = True) -> str:
    """A type in one word, as the help names it; of many choices the first, unless `everything` is asked for.

    Example:
        >>> type_name(int | None), type_name(Literal["gas", "oil"]), type_name(float | int)
        ('INT', 'gas|oil', 'FLOAT|INT')
    """
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Literal:
        joined = "|".join(dict.fromkeys(map(str, arguments)))
        if everything or len(joined) <= _LONGEST_CHOICE:
            return joined
        return f"{arguments[0]}|{arguments[1]}|..."
    if origin in (Union, types.UnionType):
        names = dict.fromkeys(type_name(each, everything) for each in arguments if each is not type(None))
        return "|".join(names).replace("INT|FLOAT", "NUMBER")
    name = getattr(annotation, "__name__", str(annotation))
    return {"str": "TEXT", "NoneType": "null"}.get(name, name.upper())


def allows_none(annotation: Any) -> bool:
    """Whether null is a value of a type."""
    if annotation in (Any, None, type(None), inspect.Parameter.empty):
        return True
    return get_origin(annotation) in (Union, types.UnionType) and any(map(allows_none, get_args(annotation)))


def is_switch(annotation: Any) -> bool:
    """Whether a flag needs no value."""
    return annotation is bool or (get_origin(annotation) in (Union, types.UnionType) and bool in get_args(annotation))


def takes_list(annotation: Any) -> bool:
    """Whether several values may follow a flag."""
    return any(get_origin(part) in (list, Sequence) for part in (annotation, *get_args(annotation)))


def switch_values(annotation: Any) -> set[str]:
    """The words that may follow a switch as its value; a number may also follow."""
    literals = (get_args(part) for part in get_args(annotation) if get_origin(part) is Literal)
    return _SWITCH_VALUES | {choice for choices in literals for choice in choices}
