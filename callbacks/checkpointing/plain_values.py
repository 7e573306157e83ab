"""Values as tensors and plain Python: what `torch.load(weights_only=True)` reads back without running code."""

import dataclasses
import enum
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["as_plain"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)
_TENSORS = (Tensor, nn.Parameter)
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set)
_DEEPEST = 50


def as_plain(value: Any, lost: list[str] | None = None, name: str = "") -> Any:
    """A value made of tensors and plain Python; the very same object where it was that already.

    Enum members become their values, paths text, dataclasses and namespaces dicts, NumPy's arrays tensors and its
    scalars numbers. What has no such form becomes a text that names it.

    Args:
        lost: takes the places, such as ``"hyper_parameters.act"``, where only a text is left.
        name: the place of `value` itself.

    Example:
        >>> as_plain({"folder": PurePath("data"), "sizes": np.arange(2), "act": max}, lost := [])
        {'folder': 'data', 'sizes': tensor([0, 1]), 'act': '<built-in function max>'}
        >>> lost
        ['act']
    """
    lost = [] if lost is None else lost
    if type(value) in _ATOMS or type(value) in _TENSORS:
        return value
    if name.count(".") > _DEEPEST:
        # Such as a dict that holds itself.
        return _named(value, lost, name)
    if isinstance(value, Mapping):
        return _plain_mapping(value, lost, name)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _plain_sequence(value, lost, name)
    return _plain_object(value, lost, name)


def _plain_mapping(value: Mapping[Any, Any], lost: list[str], name: str) -> Any:
    lead = f"{name}." if name else ""
    pairs = [(as_plain(key, lost, f"{lead}key"), as_plain(item, lost, f"{lead}{key}")) for key, item in value.items()]
    same = all(k is key and v is item for (k, v), (key, item) in zip(pairs, value.items(), strict=True))
    # A state dict is an OrderedDict with an attribute, so it is kept rather than copied.
    return value if same and type(value) in _MAPPINGS else dict(pairs)


def _plain_sequence(value: Any, lost: list[str], name: str) -> Any:
    lead = f"{name}." if name else ""
    items = [as_plain(item, lost, f"{lead}{i}") for i, item in enumerate(value)]
    if type(value) in _SEQUENCES and all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, (set, frozenset)):
        try:
            return set(items)
        except TypeError:  # Its items were hashable, and their plain forms are not.
            return items
    return tuple(items) if isinstance(value, tuple) else items


def _plain_object(value: Any, lost: list[str], name: str) -> Any:
    """The plain form of what is no container."""
    if isinstance(value, enum.Enum):
        return as_plain(value.value, lost, name)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return as_plain(value.item(), lost, name)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return as_plain(fields, lost, name)
    if isinstance(value, Namespace):
        return as_plain(vars(value), lost, name)
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor)
    kinds: tuple[Any, ...] = (int, float, str, bytes, bytearray)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    return _named(value, lost, name)


def _named(value: Any, lost: list[str], name: str) -> str:
    lost.append(name)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        module = getattr(value, "__module__", None)
        return repr(value) if module == "builtins" and not isinstance(value, type) else f"{module}.{value.__qualname__}"
    return repr(value)[:200]
