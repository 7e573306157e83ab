"""Modules and parameters by name, where users write the end of it, and their modes.

A name is dotted and leads from the module itself, such as ``network.layer3.0.conv1.weight``.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from datamodules.errors import UserError


def module_names(module: nn.Module) -> list[str]:
    """Names of all submodules in the order of their definition; a shared one has several."""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name]


def parameter_names(module: nn.Module) -> list[str]:
    """Names of all parameters in the order of their definition; a shared one has several."""
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def find_name(name: str, names: Collection[str]) -> str:
    """The one full name that ends in `name`; of several the one that is nested least.

    Raises:
        UserError: no name ends so, or several do that are nested alike.

    Example:
        >>> find_name("conv1", ["net", "net.conv1", "net.layer1", "net.layer1.conv1"])
        'net.conv1'
    """
    found = sorted({n for n in names if n == name or n.endswith(f".{name}")}, key=lambda n: (n.count("."), n))
    if not found:
        ends = {".".join(n.split(".")[-length:]): n for n in names for length in range(1, n.count(".") + 2)}
        close = list(dict.fromkeys(ends[end] for end in get_close_matches(name, ends, n=5)))
        instead = (
            f"did you mean {' or '.join(map(repr, close))}?" if close else f"the first names are {list(names)[:5]}"
        )
        raise UserError(f"there is no {name!r} in the module; {instead}")
    if len(found) > 1 and found[0].count(".") == found[1].count("."):
        raise UserError(f"{name!r} could be {' or '.join(map(repr, found))}: write one of them in full")
    return found[0]


def matching_names(patterns: Iterable[str], names: Collection[str]) -> set[str]:
    """The names that match one of the patterns, in full or by an end that begins after a dot.

    Raises:
        UserError: a pattern matches nothing.

    Example:
        >>> sorted(matching_names(["bn*"], ["net.conv1", "net.bn1", "net.bn1.weight"]))
        ['net.bn1', 'net.bn1.weight']
    """
    matched: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not found:
            raise UserError(f"{pattern!r} matches no module or parameter; the first names are {list(names)[:5]}")
        matched |= found
    return matched


def inside(name: str, outers: Collection[str]) -> bool:
    """Whether a name, or one that it lies in, is among `outers`; everything lies in ``"*"``.

    Example:
        >>> inside("net.layer1.bn", {"net.layer1"}), inside("net.layer10", {"net.layer1"})
        (True, False)
    """
    ends = [i for i, letter in enumerate(name) if letter == "."]
    return "*" in outers or name in outers or any(name[:end] in outers for end in ends)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards each layer has its own mode, whatever its `train` method does."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training
