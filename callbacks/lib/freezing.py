"""Which modules and parameters are frozen, by name, and how a module is kept in evaluation mode.

A name is dotted and leads from the module itself, such as ``network.layer3.0.conv1.weight``. Users write its end.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from datamodules.errors import UserError

__all__ = ["check_freezing", "find_name", "frozen_objects", "inside", "keep_in_eval", "matching_names", "names_before"]


def keep_in_eval(module: nn.Module, _: Any) -> None:
    """A forward pre-hook: whoever called ``train()``, the module computes as in evaluation.

    A function of a module and no closure, so that copies and pickles of the module work.
    """
    if module.training:
        module.training = False


def module_names(module: nn.Module) -> list[str]:
    """Names of all submodules in the order of their definition; a shared one has several."""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name]


def parameter_names(module: nn.Module) -> list[str]:
    """Names of all parameters in the order of their definition; a shared one has several."""
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def find_name(name: str, names: Collection[str], argument: str) -> str:
    """The one full name that ends in `name`; of several the one that is nested least.

    Args:
        argument: what the user wrote, for the error.

    Raises:
        UserError: nothing ends so, or several do that are nested alike.

    Example:
        >>> find_name("conv1", ["net", "net.conv1", "net.layer1", "net.layer1.conv1"], "until")
        'net.conv1'
    """
    found = sorted({n for n in names if n == name or n.endswith(f".{name}")}, key=lambda n: (n.count("."), n))
    if not found:
        ends = {".".join(n.split(".")[-length:]): n for n in names for length in range(1, n.count(".") + 2)}
        close = list(dict.fromkeys(ends[end] for end in get_close_matches(name, ends, n=5)))
        raise UserError(
            f"{argument}: there is no {name!r} in the module; "
            + (f"did you mean {' or '.join(map(repr, close))}?" if close else f"its names begin {list(names)[:5]}")
        )
    if len(found) > 1 and found[0].count(".") == found[1].count("."):
        raise UserError(f"{argument}: {name!r} could be {' or '.join(map(repr, found))}: write one of them in full")
    return found[0]


def matching_names(patterns: Iterable[str], names: Collection[str]) -> set[str]:
    """The names that match one of the patterns, by their whole or by an end that begins behind a dot.

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
            raise UserError(
                f"patterns: {pattern!r} matches no module or parameter; their names begin {list(names)[:5]}"
            )
        matched |= found
    return matched


def names_before(module: nn.Module, until: str) -> set[str]:
    """All that is defined before the submodule `until`.

    Of the modules around it, their earlier children and their own parameters belong to that, they themselves do not.

    Example:
        >>> sorted(names_before(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)), "2"))
        ['0', '0.bias', '0.weight', '1']
    """
    before: set[str] = set()
    for name, submodule in module.named_modules(remove_duplicate=False):
        if name == until:
            break
        before.update(n for n, _ in submodule.named_parameters(name, recurse=False, remove_duplicate=False))
        if name and not until.startswith(f"{name}."):
            before.add(name)
    return before


def inside(name: str, outers: Collection[str]) -> bool:
    """Whether a name, or one that it lies in, is among `outers`; everything lies in ``"*"``.

    Example:
        >>> inside("net.layer1.bn", {"net.layer1"}), inside("net.layer10", {"net.layer1"})
        (True, False)
    """
    ends = [i for i, letter in enumerate(name) if letter == "."]
    return "*" in outers or name in outers or any(name[:end] in outers for end in ends)


def frozen_objects(
    module: nn.Module, frozen: Collection[str], thawed: Collection[str]
) -> tuple[set[nn.Module], set[Parameter]]:
    """The modules and parameters inside `frozen` names and outside `thawed` ones.

    What is shared under several names is frozen if all of them are: no owner that trains is held back.

    Example:
        >>> network = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> network[1].weight = network[0].weight
        >>> [list(p.shape) for p in frozen_objects(network, {"0"}, set())[1]]  # the bias alone
        [[1]]
    """

    def select(named: Iterable[tuple[str, Any]]) -> set[Any]:
        chosen: set[Any] = set()
        others: set[Any] = set()
        for name, item in named:
            (chosen if inside(name, frozen) and not inside(name, thawed) else others).add(item)
        return chosen - others

    return (
        select((n, m) for n, m in module.named_modules(remove_duplicate=False) if n),
        select(module.named_parameters(remove_duplicate=False)),
    )


def check_freezing(
    module: nn.Module, frozen: Collection[str], thawed: Collection[str], optimizers: Iterable[Optimizer]
) -> list[str]:
    """Refuses a freezing under which training cannot begin, or go on as asked, and returns what is worth saying.

    Args:
        frozen: names that are frozen at the start.
        thawed: names that are unfrozen at some time.

    Raises:
        UserError: nothing trains at the start, or the optimisers lack a parameter that is to train later.
    """
    at_first = frozen_objects(module, frozen, ())[1]
    later = at_first - frozen_objects(module, frozen, thawed)[1]
    if not any(p.requires_grad and p not in at_first for p in module.parameters()):
        raise UserError(
            "FreezeLayers leaves nothing to train at the start of the run: every parameter is frozen; pass a later"
            " `until` or fewer patterns, or let one layer out of `unfreeze`"
        )
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = later - held
    left_out = [name for name, p in module.named_parameters() if p in missing and p.requires_grad]
    if left_out:
        raise UserError(
            f"configure_optimizers left out {', '.join(left_out[:3])}{' ...' if left_out[3:] else ''}, which are"
            f" to be unfrozen ({len(left_out)} in all): pass self.parameters(), frozen ones too"
        )
    return [
        f"{name} trains: it is shared with a layer that is not frozen"
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter not in at_first and inside(name, frozen)
    ]
