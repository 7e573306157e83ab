"""Load weights of any origin into a module: read without running code, matched by name and shape, reported in a line.

A file is either wrong (another file, half a file, another network), or most of its tensors fit and those of the head do
not. The first is refused before the module changes; of the second, the tensors that fit are loaded.
"""

import itertools
import json
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.lib.layers import inside, matching_names, module_names
from datamodules.errors import UserError

__all__ = [
    "WeightsReport",
    "load_weights",
    "match_names",
    "read_settings_beside",
    "read_weights",
    "some_names",
]

# Averaged weights first, as in timm: where a file has both, the published scores are of the averaged ones.
_CONTAINERS = (
    *("state_dict_ema", "model_ema", "params_ema", "state_dict", "model_state_dict", "model_state"),
    *("model", "module", "network", "net", "weights", "params"),
)
_KINDS = (".ckpt", ".safetensors", ".pt", ".pth")

# Attributes that hold a whole network: a file and a module may have different ones, or none.
_WRAPPERS = {"module", "model", "network", "net", "backbone", "trunk", "_forward_module"}
# torch's own wrappers stand anywhere in a name.
_INNER_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def _check_file(path: Path) -> None:
    """Refuse files that hold no weights, whatever their suffix."""
    if path.is_dir():
        inside = [file for kind in _KINDS for at in ("", "checkpoints/") for file in path.glob(f"{at}*{kind}")]
        example = min(inside, default=path / "weights.pt")
        raise UserError(f"{path} is a folder; name a file in it, such as weights={str(example)!r}")
    if not path.is_file():
        raise UserError(f"there is no file {path}; pass weights='FILE' ({', '.join(_KINDS)}) or weights='none'")
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if not start:
        raise UserError(f"{path} is empty; download it again")
    if start.lstrip().startswith(b"<"):
        raise UserError(f"{path} is a web page, not weights: its address needs a log-in or a click; download it again")
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a pointer of Git LFS, not weights; run git lfs pull in its folder")
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise UserError(f"{path} is damaged: it ends too early; download it again")


def _read_torch(path: Path) -> Any:
    try:
        return load_plain(path)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(f"{path} is damaged, or was not written by torch.save(); download it again") from error


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged, or no safetensors file ({error}); download it again") from error


def _tensors_in(content: Any, depth: int = 3) -> dict[str, Tensor]:
    """The tensors by name in what a file holds: a state dict, or a dict with one in one of the usual places."""
    if not isinstance(content, Mapping):
        return {}
    for key in _CONTAINERS if depth else ():
        if tensors := _tensors_in(content.get(key), depth - 1):
            return tensors
    return {name: value.detach() for name, value in content.items() if isinstance(name, str) and torch.is_tensor(value)}


def read_settings_beside(path: str | Path) -> dict[str, Any]:
    """The settings of the run in a file of weights, as the export command writes them; empty where there are none.

    Raises:
        UserError: as `read_weights` does.
    """
    path = Path(path).expanduser()
    _check_file(path)
    if path.suffix == ".safetensors":
        _read_safetensors(path)  # It refuses a damaged file.
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            texts = file.metadata() or {}
        try:
            content = {name: json.loads(texts[name]) for name in ("config", "hyper_parameters") if name in texts}
        except ValueError as error:
            raise UserError(f"{path} is damaged: its settings cannot be read; pass another file") from error
    else:
        content = _read_torch(path)
    found = [content.get(name) for name in ("config", "hyper_parameters")] if isinstance(content, Mapping) else []
    return next((dict(settings) for settings in found if isinstance(settings, Mapping) and settings), {})


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors in a file by name, on the CPU; no code from the file is run.

    Args:
        path: .safetensors, or what `torch.save` wrote: a state dict, a checkpoint of Lightning's, of ours or of timm's,
            or another dict with a state dict in one of the usual places. Large files are mapped, not copied.

    Raises:
        UserError: there is no such file, it is damaged, holds no tensors, or holds code.
    """
    path = Path(path).expanduser()
    _check_file(path)
    content = (_read_safetensors if path.suffix == ".safetensors" else _read_torch)(path)
    tensors = _tensors_in(content)
    if not tensors:
        found = f"a {type(content).__name__}"
        if isinstance(content, Mapping):
            found += f" of {some_names([str(key) for key in content])}"
        raise UserError(f"{path} holds no tensors by name: found {found}, expected a module's state_dict()")
    return tensors


def some_names(names: Sequence[str], limit: int = 4) -> str:
    """The first few names, and how many more there are.

    >>> some_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more


def _leads(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The chains of wrappers that names begin with, the shortest first.

    >>> _leads(["model.net.conv.weight", "model.step"])
    [(), ('model',), ('model', 'net')]
    """
    leads: set[tuple[str, ...]] = {()}
    for name in names:
        parts = name.split(".")[:-1]
        depth = next((i for i, part in enumerate(parts) if part not in _WRAPPERS), len(parts))
        leads.update(tuple(parts[:i]) for i in range(1, depth + 1))
    return sorted(leads, key=lambda lead: (len(lead), lead))


def _bare_names(names: Iterable[str], lead: tuple[str, ...]) -> dict[str, str]:
    """Names without as much of `lead` as they begin with, and what they were.

    >>> _bare_names(["fc.bias", "model.fc.bias", "model.net.conv.bias"], ("model", "net"))
    {'fc.bias': 'model.fc.bias', 'conv.bias': 'model.net.conv.bias'}
    """
    bare = {}
    for name in names:
        parts = name.split(".")
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(parts[:-1], lead)))
        bare[name] = ".".join(parts[shared:])
    # Of two that become one, such as a network and its copy, the one with the longer lead is used: it comes last.
    return {bare[name]: name for name in sorted(bare, key=lambda name: len(name) - len(bare[name]))}


def match_names(state: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Which tensor of the file belongs to which of the module: {name in the module: name in the file}.

    Leading wrappers (``module.``, ``model.``, ``network.``, ``net.``, ``backbone.``, ...) are left out on either side
    where that makes more tensors agree in name and shape; of equally good ways that which leaves out least.

    >>> conv = torch.zeros(3)
    >>> match_names({"module.model.conv.bias": conv}, {"network.conv.bias": conv})
    {'network.conv.bias': 'module.model.conv.bias'}
    """

    def ways(tensors: Mapping[str, Tensor]) -> list[dict[str, str]]:
        inner = {_INNER_WRAPPERS.sub("", name): name for name in tensors}
        return [{bare: inner[name] for bare, name in _bare_names(inner, lead).items()} for lead in _leads(inner)]

    def agreement(matches: dict[str, str]) -> tuple[int, int]:
        return sum(state[name].shape == targets[to].shape for to, name in matches.items()), len(matches)

    candidates = [
        {module_names[bare]: names[bare] for bare in module_names.keys() & names.keys()}
        for module_names, names in itertools.product(ways(targets), ways(state))
    ]
    best = max(candidates, key=agreement)
    return {name: best[name] for name in targets if name in best}


def _misfit(value: Tensor, target: Tensor) -> str:
    """Why a tensor cannot replace another; empty where it can."""
    if value.shape != target.shape:
        return f"{tuple(value.shape)} instead of {tuple(target.shape)}"
    # Quantised integers are not weights without their scales.
    if (value.is_floating_point(), value.is_complex()) != (target.is_floating_point(), target.is_complex()):
        return f"{value.dtype} instead of {target.dtype}".replace("torch.", "")
    return ""


@dataclass(frozen=True)
class WeightsReport:
    """Which weights of a file were loaded; the counters of BatchNorm (``num_batches_tracked``) are left out.

    >>> print(WeightsReport("a.pt", ["conv.weight"], {"fc.bias": "(9,) instead of (2,)"}, ["fc.bias"]))
    weights from a.pt: 1 loaded, 1 skipped (fc.bias (9,) instead of (2,)), 1 new (fc.bias)

    Attributes:
        source: where they came from.
        loaded: names in the module that got the file's values.
        skipped: names in the file that were not loaded, and why.
        new: names in the module that keep their values because the file has none that fit.
        not_chosen: names in the module that keep their values because that was asked for.
    """

    source: str
    loaded: list[str]
    skipped: dict[str, str]
    new: list[str]
    not_chosen: Sequence[str] = ()

    def line(self) -> str:
        """The report in one line; the first few names stand for long lists."""
        skipped = [f"{name} {reason}" for name, reason in self.skipped.items()]
        rest = [
            f"{len(names)} {what}" + f" ({some_names(names)})" * bool(names)
            for what, names in (("skipped", skipped), ("new", self.new), ("not chosen", self.not_chosen))
            if what != "not chosen" or names
        ]
        return f"weights from {self.source}: {len(self.loaded)} loaded, {', '.join(rest)}"

    @override
    def __str__(self) -> str:
        return self.line()


def _chosen_names(module: nn.Module, tensors: Collection[str], skip: str | Sequence[str] | None) -> set[str]:
    """The names of tensors without those that match the patterns `skip`.

    Raises:
        UserError: a pattern matches nothing, or nothing is left.
    """
    patterns = (skip,) if isinstance(skip, str) else skip or ()
    # Checkpoints and patterns for freezing have the names of the recipe, whose network this is.
    bare = [pattern.removeprefix("network.") for pattern in patterns]
    skipped = matching_names(bare, [*module_names(module), *tensors], "skip")
    chosen = {name for name in tensors if not inside(name, skipped)}
    if not chosen:
        raise UserError("`skip` leaves no tensor of the module; pass other patterns, or weights='none'")
    return chosen


def _compare(
    state: Mapping[str, Tensor], targets: Mapping[str, Tensor], source_name: str, chosen: Collection[str]
) -> tuple[dict[str, Tensor], WeightsReport]:
    """The tensors that are chosen and fit, under the module's names, and the report."""
    matches = match_names(state, targets)
    misfits = {name: _misfit(state[source], targets[name]) for name, source in matches.items() if name in chosen}
    fitting = {name: state[matches[name]] for name, reason in misfits.items() if not reason}
    skipped = {name: reason for name, reason in misfits.items() if reason}
    used = set(matches.values())
    skipped |= {name: "is not in the network" for name in state if name not in used}
    # Tied weights are one tensor with two names, and files may hold either.
    arrived = {id(targets[name]) for name in fitting}
    kept = [name for name, value in targets.items() if id(value) not in arrived]
    new, not_chosen = ([name for name in kept if (name in chosen) is asked] for asked in (True, False))

    def counted(names: Iterable[str]) -> list[str]:
        return [name for name in names if not name.endswith("num_batches_tracked")]

    skipped = {name: skipped[name] for name in counted(skipped)}
    return fitting, WeightsReport(source_name, counted(fitting), skipped, counted(new), counted(not_chosen))


def _refuse_too_few(report: WeightsReport, min_share: float) -> None:
    total = len(report.loaded) + len(report.new)
    share = len(report.loaded) / max(1, total)
    if report.loaded and share >= min_share:
        return
    skipped = [f"{name} {reason}" for name, reason in report.skipped.items()]
    raise UserError(
        f"weights from {report.source}: {len(report.loaded)} of the network's {total} tensors match by name and shape, "
        f"expected at least {min_share:.0%}. Not in the file: {some_names(report.new)}. "
        f"Not taken: {some_names(skipped)}. "
        "Check that both are of the same architecture; weights='none' trains from scratch"
    )


def load_weights(
    module: nn.Module,
    state: Mapping[str, Tensor],
    source_name: str,
    min_share: float = 0.5,
    skip: str | Sequence[str] | None = None,
) -> WeightsReport:
    """Copy what fits by name and shape into a module, in the module's precision and on its device.

    >>> report = load_weights(nn.Linear(3, 2), {"module.weight": torch.ones(2, 3)}, "a.pt")
    >>> report.line()
    'weights from a.pt: 1 loaded, 0 skipped, 1 new (bias)'
    >>> state = {"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}
    >>> layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> load_weights(layers, state, "a.pt", skip="1.*").line()
    'weights from a.pt: 1 loaded, 0 skipped, 0 new, 1 not chosen (1.weight)'

    Args:
        state: tensors by name, such as `read_weights` returns; `match_names` decides which names agree.
        source_name: for messages.
        min_share: the least share of the chosen tensors that has to match; tensors are counted, not elements.
        skip: layers and tensors of the module whose name, or an end of it, matches one of these patterns, such as
            "encoder.*", keep their values.

    Raises:
        UserError: fewer match, or none, or a pattern matches nothing, or a matching tensor has NaN or infinite values.
            The module is not changed then.
    """
    everything = module.state_dict(keep_vars=True)
    targets = {name: value for name, value in everything.items() if torch.is_tensor(value)}
    chosen = _chosen_names(module, targets, skip)
    fitting, report = _compare(state, targets, source_name, chosen)
    _refuse_too_few(report, min_share)
    for name, value in fitting.items():
        # A mask of minus infinities may be part of the module.
        target = targets[name]
        if not value.to(target.dtype).isfinite().all() and target.isfinite().all():
            raise UserError(f"weights from {source_name}: {name} has NaN or infinite values; pass another file")
    # With the values that the module keeps, and its version numbers, so that nothing is converted from an older format.
    everything.update(fitting)
    module.load_state_dict(everything, strict=False)
    return report
