"""Convert the annotations of constructors to types for jsonargparse, and to names for the help."""

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
"""Characters up to which the short help names all choices."""


def flag_type(annotation: Any) -> Any:
    """Return the type of a flag: the parameter's without its marks, and without classes that need an object.

    In a union int comes before float, and float before text, because jsonargparse takes the first type that fits: 1 is
    not the share 1.0, and 1.0 is not the time "1.0". A time stays text: jsonargparse reads 00:00:30:00 as 30 s. The
    order in the source cannot be relied on, since typing caches unions: it may return an equal one in another order.
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
        if everything or len(joined) <= _LONGEST_CHOICE:
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
    """Return the words that may follow a switch as its value; a number may follow as well."""
    literals = (get_args(member) for member in get_args(annotation) if get_origin(member) is Literal)
    return _SWITCH_VALUES | {choice for choices in literals for choice in choices}
