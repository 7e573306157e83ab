"""Search for modules and parameters by the end of their names, and a context for evaluation mode.

A full name is dotted and starts at the module itself, such as ``network.layer3.0.conv1.weight``.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from datamodules.errors import UserError


def module_names(module: nn.Module) -> list[str]:
    """Return the names of all submodules in the order of their definition; a shared one has several."""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name]


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of all parameters in the order of their definition; a shared one has several."""
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def find_name(name: str, names: Collection[str]) -> str:
    """Return the full name that ends in `name`; of several the least nested one.

    Raises:
        UserError: no name ends so, or several at the same depth do.

    Example:
        >>> find_name("conv1", ["net", "net.conv1", "net.layer1", "net.layer1.conv1"])
        'net.conv1'
    """
    matches = sorted({n for n in names if n == name or n.endswith(f".{name}")}, key=lambda n: (n.count("."), n))
    if not matches:
        ends = {".".join(n.split(".")[-length:]): n for n in names for length in range(1, n.count(".") + 2)}
        close = list(dict.fromkeys(ends[end] for end in get_close_matches(name, ends, n=5)))
        instead = (
            f"did you mean {' or '.join(map(repr, close))}?" if close else f"the first names are {list(names)[:5]}"
        )
        raise UserError(f"there is no {name!r} in the module; {instead}")
    if len(matches) > 1 and matches[0].count(".") == matches[1].count("."):
        raise UserError(f"{name!r} could be {' or '.join(map(repr, matches))}: write one of them in full")
    return matches[0]


def matching_names(patterns: Iterable[str], names: Collection[str]) -> set[str]:
    """Return the names that match one of the patterns, in full or from a dot on.

    Raises:
        UserError: a pattern matches nothing.

    Example:
        >>> sorted(matching_names(["bn*"], ["net.conv1", "net.bn1", "net.bn1.weight"]))
        ['net.bn1', 'net.bn1.weight']
    """
    all_matches: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not matches:
            raise UserError(f"{pattern!r} matches no module or parameter; the first names are {list(names)[:5]}")
        all_matches |= matches
    return all_matches


def inside(name: str, outers: Collection[str]) -> bool:
    """Whether a name or one of its parents is among `outers`; everything is inside ``"*"``.

    Example:
        >>> inside("net.layer1.bn", {"net.layer1"}), inside("net.layer10", {"net.layer1"})
        (True, False)
    """
    ends = [i for i, letter in enumerate(name) if letter == "."]
    return "*" in outers or name in outers or any(name[:end] in outers for end in ends)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode within the context, and restore the mode of each layer afterwards."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training  # Not by `train()`, which a layer may override.
