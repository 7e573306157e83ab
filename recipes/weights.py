"""Load weights of any origin into a module: read without running code, matched by name and shape, reported in a line.

A file is either wrong (another file, half a file, another network), or all of its tensors fit but those of the head.
The first is refused before the module changes; of the second, the tensors that fit are loaded.
"""

import json
import logging
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from typing_extensions import override

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.lib.layers import inside, matching_names, module_names
from datamodules.errors import UserError

__all__ = [
    "InitialWeights",
    "WeightsReport",
    "load_initial_weights",
    "load_weights",
    "match_names",
    "read_settings_beside",
    "read_weights",
    "some_names",
]

log = logging.getLogger("lightning_recipes")

# Averaged weights first, as in timm: where a file has both, the published scores are of the averaged ones.
_AVERAGED = re.compile(r"(?:^|[._])(?:ema|average)", re.IGNORECASE)
_USUAL = {"state_dict", "model_state_dict", "model_state", "model", "module", "network", "net", "weights", "params"}
_OTHER_STATE = re.compile("optim|callbacks|sched")

# Attributes that hold a whole network: a file and a module may have different ones, or none.
_WRAPPERS = {"module", "model", "network", "net", "backbone", "trunk", "_forward_module"}
# torch's own wrappers stand anywhere in a name.
_INNER_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def _check_file(path: Path) -> None:
    """Refuse files that hold no weights, whatever their suffix."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it, such as weights={str(path / 'model.safetensors')!r}")
    if not path.is_file():
        raise UserError(f"there is no file {path}; pass weights='FILE' or weights='none'")
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


def _located(path: str | Path) -> tuple[Path, str]:
    """A file, and the name of the weights in it that may follow a colon, as in "checkpoint.pth:teacher"."""
    path = Path(path).expanduser()
    file, _, key = str(path).rpartition(":")
    return (Path(file), key) if not path.is_file() and Path(file).is_file() else (path, "")


def _read(path: Path) -> Any:
    """What a file holds, whatever its suffix; safetensors as a dict of their tensors and settings."""
    _check_file(path)
    with path.open("rb") as file:
        start = file.read(9)
    try:
        if start[8:] != b"{":  # Behind the length of the header in 8 bytes.
            return load_plain(path)
        from safetensors import safe_open

        with safe_open(path, "pt") as opened:
            texts = opened.metadata() or {}
            settings = {name: json.loads(texts[name]) for name in ("config", "hyper_parameters") if name in texts}
            return {"state_dict": {name: opened.get_tensor(name) for name in opened.keys()}, **settings}  # noqa: SIM118
    except UserError:
        raise
    except Exception as error:  # A damaged pickle raises anything.
        raise UserError(
            f"{path} is damaged, or neither torch.save() nor safetensors wrote it ({type(error).__name__}); download it"
            " again"
        ) from error


def read_settings_beside(path: str | Path) -> dict[str, Any]:
    """The settings of the run in a file of weights, as the export command writes them; empty where there are none.

    Raises:
        UserError: as `read_weights` does.
    """
    content = _read(_located(path)[0])
    found = [content.get(name) for name in ("config", "hyper_parameters")] if isinstance(content, Mapping) else []
    return next((dict(settings) for settings in found if isinstance(settings, Mapping) and settings), {})


def _state_dicts(content: Any, depth: int = 3) -> dict[str, dict[str, Tensor]]:
    """The tensors by name in what a file holds, by the keys that lead to them: "model.ema", or "" where none does."""
    if not isinstance(content, Mapping):
        return {}
    named = {name: value for name, value in content.items() if isinstance(name, str)}
    own = {name: value.detach() for name, value in named.items() if torch.is_tensor(value)}
    found = {"": own} if own else {}
    for key, value in named.items() if depth else ():
        if not _OTHER_STATE.search(key):
            found |= {f"{key}.{inner}".strip("."): state for inner, state in _state_dicts(value, depth - 1).items()}
    return found


def _chosen_state(path: Path, found: Mapping[str, dict[str, Tensor]]) -> str:
    """Which of the state dicts of a file is taken; small ones beside it, such as statistics, are no choice."""
    most = max(map(len, found.values()))
    large = [key for key in found if 2 * len(found[key]) >= most]
    averaged = [key for key in large if _AVERAGED.search(key)]
    usual = [key for key in found if key.rpartition(".")[2] in _USUAL]
    chosen = (averaged or usual or large)[0]
    others = [key or "the tensors beside them" for key in large if key != chosen]
    if not averaged and not usual and others:
        raise UserError(
            f"{path} holds several state dicts: {some_names([chosen, *others], 8)}; name one, as in"
            f" weights='{path}:{chosen}'"
        )
    if others:
        rank_zero_only(log.warning)(
            f"{path}: takes {chosen}; there is {some_names(others)}, too, which weights='{path}:NAME' takes"
        )
    return chosen


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors in a file by name, on the CPU; no code from the file is run.

    Of several state dicts the averaged one is taken, else one of a usual name (`state_dict`, `model`, ...), and that is
    logged; of other names one has to be chosen.

    Args:
        path: of any suffix: safetensors, or what `torch.save` wrote, which is a state dict, or a dict with one in it,
            such as a checkpoint. "FILE:NAME" chooses a state dict by its key, or the tensors whose names begin so, as
            in "dino.pth:teacher.backbone". Large files are mapped, not copied.

    Raises:
        UserError: there is no such file, it is damaged, holds no tensors of that name or several state dicts, or code.
    """
    path, key = _located(path)
    content = _read(path)
    found = _state_dicts(content)
    if key:
        every = {f"{lead}.{name}".strip("."): value for lead, state in found.items() for name, value in state.items()}
        for state in (every, *found.values()):
            if inner := {name.removeprefix(f"{key}."): state[name] for name in state if name.startswith(f"{key}.")}:
                return inner
        raise UserError(f"{path} holds no tensors below {key!r}; found {some_names([*filter(None, found), *every])}")
    if not found:
        keys = f" of {some_names([str(key) for key in content])}" if isinstance(content, Mapping) else ""
        raise UserError(
            f"{path} holds no tensors by name: found a {type(content).__name__}{keys}, expected a module's state_dict()"
        )
    return found[_chosen_state(path, found)]


def some_names(names: Sequence[str], limit: int = 4) -> str:
    """The first few names, and how many more there are.

    >>> some_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more


def _bare(name: str) -> str:
    """A name without the wrappers at its beginning, and with those of DenseNet's published files as they are today.

    >>> _bare("module.model.fc.bias"), _bare("network.step"), _bare("denselayer1.norm.1.bias")
    ('fc.bias', 'step', 'denselayer1.norm1.bias')
    """
    name = re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", name)
    parts = _INNER_WRAPPERS.sub("", name).split(".")
    wrappers = next((i for i, part in enumerate(parts[:-1]) if part not in _WRAPPERS), len(parts) - 1)
    return ".".join(parts[wrappers:])


def match_names(state: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Which tensor of the file belongs to which of the module: {name in the module: name in the file}.

    Leading wrappers (``module.``, ``model.``, ``network.``, ``net.``, ``backbone.``, ...) are left out on both sides
    where that makes more tensors agree in name and shape. Of a network and its copy the one with the shorter names is
    taken.

    >>> conv = torch.zeros(3)
    >>> match_names({"module.model.conv.bias": conv}, {"network.conv.bias": conv})
    {'network.conv.bias': 'module.model.conv.bias'}
    """

    def agreement(matches: dict[str, str]) -> tuple[int, int]:
        return sum(state[name].shape == targets[to].shape for to, name in matches.items()), len(matches)

    def matched(shorten: Callable[[str], str]) -> dict[str, str]:
        # Of two that become one, the one that comes last is used.
        longest_first = (sorted(names, key=lambda name: (-len(name), name)) for names in (state, targets))
        theirs, ours = ({shorten(name): name for name in names} for names in longest_first)
        return {ours[short]: theirs[short] for short in ours.keys() & theirs.keys()}

    best = max(matched(partial(_INNER_WRAPPERS.sub, "")), matched(_bare), key=agreement)
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

    >>> WeightsReport("a.pt", ["conv.weight"], {"fc.bias": "(9,) instead of (2,)"}, ["fc.bias"]).line()
    'weights from a.pt: 1 loaded, 1 skipped (fc.bias (9,) instead of (2,)), 1 new (fc.bias)'

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


def _counted(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith("num_batches_tracked")]


def _compare(
    state: Mapping[str, Tensor], targets: Mapping[str, Tensor], source_name: str, chosen: Collection[str]
) -> tuple[dict[str, Tensor], WeightsReport, list[str]]:
    """The tensors that are chosen and fit, under the module's names, the report, and what tells another network.

    A new head tells none: it has other names, or another number of rows, and nothing beside it was loaded.
    """
    matches = match_names(state, targets)
    misfits = {name: reason for name in matches if (reason := _misfit(state[matches[name]], targets[name]))}
    fitting = {name: state[source] for name, source in matches.items() if name in chosen and name not in misfits}
    # Tied weights are one tensor with two names, and files may hold either.
    arrived = {id(targets[name]) for name in fitting}
    kept = _counted(name for name, value in targets.items() if id(value) not in arrived)
    new, not_chosen = ([name for name in kept if (name in chosen) is asked] for asked in (True, False))
    used = set(matches.values())
    left = dict.fromkeys(_counted(name for name in state if name not in used), "is not in the network")
    skipped = {name: misfits[name] for name in misfits if name in chosen} | left

    def part(name: str) -> str:
        return _bare(name).partition(".")[0]

    loaded, parts = {part(name) for name in _counted(fitting)}, {part(name) for name in targets}
    unmatched = [name for name in new if name not in misfits]
    # What has another prefix is no part of the network, such as a loss or a copy.
    leads = tuple({_INNER_WRAPPERS.sub("", name).removesuffix(_bare(name)) for name in used})
    beside = [name for name in left if _INNER_WRAPPERS.sub("", name).startswith(leads)]
    others = [name for name in beside if part(name) not in parts]
    extra = [name for name in beside if part(name) in loaded] + others * (len(others) > len(unmatched))
    resized = [name for name in new if name in misfits and state[matches[name]].shape[:1] == targets[name].shape[:1]]
    foreign = [f"{name} {skipped[name]}" for name in (*extra, *resized)]
    foreign += [f"{name} is not in the file" for name in unmatched if part(name) in loaded]
    return fitting, WeightsReport(source_name, _counted(fitting), skipped, new, not_chosen), foreign


def _refuse_another_network(report: WeightsReport, foreign: Sequence[str], min_share: float) -> None:
    total = len(report.loaded) + len(report.new)
    share = len(report.loaded) / max(1, total)
    if not report.loaded or share < min_share:
        skipped = [f"{name} {reason}" for name, reason in report.skipped.items()]
        raise UserError(
            f"weights from {report.source}: {len(report.loaded)} of the network's {total} tensors match by name and"
            f" shape, expected at least {min_share:.0%}. Not in the file: {some_names(report.new)}. "
            f"Not taken: {some_names(skipped)}. "
            "Check that both are of the same architecture; weights='none' trains from scratch"
        )
    if foreign:
        layer = foreign[0].partition(" ")[0].rpartition(".")[0] or foreign[0].partition(" ")[0]
        raise UserError(
            f"weights from {report.source} are of another network: {len(report.loaded)} tensors match, and beside the"
            f" head {len(foreign)} do not: {some_names(foreign, 3)}. Pass the settings of that network, or leave layers"
            f" out on both sides, as in skip={layer!r}"
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

    Args:
        state: tensors by name, such as `read_weights` returns; `match_names` decides which names agree.
        source_name: for messages.
        min_share: the least share of the chosen tensors that has to match; tensors are counted, not elements.
        skip: layers and tensors whose name, or an end of it, matches one of these patterns, such as "encoder.*", are
            left out of the file, and keep their values in the module.

    Raises:
        UserError: fewer match, or none, or one of the two has tensors beyond a head that the other lacks, or a pattern
            matches nothing, or a matching tensor has NaN or infinite values. The module is not changed then.
    """
    everything = module.state_dict(keep_vars=True)
    targets = {name: value for name, value in everything.items() if torch.is_tensor(value)}
    # Checkpoints and patterns for freezing have the names of the recipe, whose network this is.
    patterns = [pattern.removeprefix("network.") for pattern in ([skip] if isinstance(skip, str) else skip or ())]
    in_file = (part for name in state for part in accumulate(name.split("."), "{}.{}".format))
    skipped = matching_names(patterns, [*module_names(module), *targets, *in_file])
    chosen = {name for name in targets if not inside(name, skipped)}
    if not chosen:
        raise UserError("`skip` leaves no tensor of the module; pass other patterns, or weights='none'")
    state = {name: value for name, value in state.items() if not inside(name, skipped)}
    fitting, report, foreign = _compare(state, targets, source_name, chosen)
    _refuse_another_network(report, foreign, min_share)
    for name, value in fitting.items():
        # A mask of minus infinities may be part of the module.
        target = targets[name]
        if not value.to(target.dtype).isfinite().all() and target.isfinite().all():
            raise UserError(f"weights from {source_name}: {name} has NaN or infinite values; pass another file")
    # With the values that the module keeps, and its version numbers, so that nothing is converted from an older format.
    everything.update(fitting)
    module.load_state_dict(everything, strict=False)
    return report


def load_initial_weights(recipe: Any, min_share: float = 0.5) -> WeightsReport | None:
    """Load what a recipe's ``weights`` names into its network, and log which tensors were loaded; None for "none".

    Args:
        min_share: the least share of the network's tensors that has to match.

    Raises:
        UserError: as `read_weights` and `load_weights` do.
    """
    options = recipe.hparams
    if options.weights is None or options.weights == "none":
        return None
    state, source = recipe.pretrained_weights(options.weights)
    report = load_weights(recipe.network, state, source, min_share, options.weights_skip)
    rank_zero_only(log.warning)(report.line())
    return report


class InitialWeights(pl.Callback):
    """Loads a recipe's ``weights`` when it is first trained, unless it resumes from a checkpoint.

    Runs on: `on_fit_start`.
    """

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # Some strategies load the checkpoint later.
        if not pl_module.has_weights and trainer.ckpt_path is None:
            load_initial_weights(pl_module)
        pl_module.has_weights = True
