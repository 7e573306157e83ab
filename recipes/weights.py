"""Load the weights of a file into a module: read without running code, matched by name and shape, reported in a line.

A file is either wrong (another file, half a file, another network), or all of its tensors fit but those of the head.
The first is refused before the module changes; of the second, the tensors that fit are loaded.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.lib.layers import inside, matching_names, module_names
from datamodules.errors import UserError
from datamodules.notes import warn

# Attributes that hold a whole network: a file and a module may have different ones, or none.
_WRAPPERS = re.compile(r"^(?:(?:module|model|network|net|backbone)\.)+")
# What the export command writes into safetensors as JSON, all else as text.
_JSON = ("config", "hyper_parameters", "class_names", "source_vocabulary", "target_vocabulary")


def _setting(name: str, text: str) -> Any:
    """What a text beside the tensors says; other programs than ours write anything under these names."""
    if name not in _JSON:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read(path: str | Path) -> Mapping[str, Any]:
    """What a file holds, whatever its suffix; safetensors as a dict of their tensors and settings."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {path}; pass weights='FILE' or weights='none'")
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if start[8:] == b"{":  # Behind the length of the header in 8 bytes.
            from safetensors import safe_open

            with safe_open(path, "pt") as opened:
                beside = {name: _setting(name, text) for name, text in (opened.metadata() or {}).items()}
                return {**beside, "state_dict": {name: opened.get_tensor(name) for name in opened.keys()}}  # noqa: SIM118
        content = load_plain(path)
    except UserError:
        raise
    except Exception as error:  # A damaged pickle raises anything.
        raise UserError(
            f"{path} is damaged, or neither torch.save() nor safetensors wrote it ({type(error).__name__}); download it"
            " again"
        ) from error
    return content if isinstance(content, Mapping) else {}


def skip_patterns(weights_skip: str | Sequence[str] | None) -> list[str]:
    """What `load_weights` leaves out, by the names of the network's layers."""
    # Checkpoints and patterns for freezing have the names of the recipe, whose network this is.
    patterns = [weights_skip] if isinstance(weights_skip, str) else weights_skip or ()
    return [pattern.removeprefix("network.") for pattern in patterns]


def read_beside(path: str | None) -> Mapping[str, Any]:
    """What a checkpoint or an exported file holds, such as ``class_names``; nothing of "none" and names of no file."""
    return _read(path) if path and Path(path).expanduser().is_file() else {}


def read_settings_beside(path: str | None) -> dict[str, Any]:
    """The settings of the run in a file of weights, as the export command writes them; empty where there are none."""
    found = map(read_beside(path).get, ("config", "hyper_parameters"))
    return next((dict(settings) for settings in found if isinstance(settings, Mapping) and settings), {})


def _tensors(content: Any) -> dict[str, Tensor]:
    named = content.items() if isinstance(content, Mapping) else ()
    return {name: value.detach() for name, value in named if isinstance(name, str) and torch.is_tensor(value)}


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors in a file by name, on the CPU; no code from the file is run.

    Args:
        path: of any suffix: safetensors, or what `torch.save` wrote, which is a checkpoint, a state dict, or a dict
            with one in it. Large files are mapped, not copied.

    Raises:
        UserError: there is no such file, it is damaged, holds no tensors by name or several state dicts, or code.
    """
    content = _read(path)
    found = {key: state for key, value in content.items() if (state := _tensors(value))}
    if "pytorch-lightning_version" in content:  # Of averaged weights the others are kept beside them.
        found = {"state_dict": _tensors(content["state_dict"])}
    if not found and (own := _tensors(content)):
        return own
    if len(found) != 1:
        what = f"several state dicts, {some_names(list(found))}" if found else "no tensors by name"
        raise UserError(f"{path} holds {what}; pass a file with the state_dict() of one module")
    return next(iter(found.values()))


def some_names(names: Sequence[str], limit: int = 4) -> str:
    """The first few names, and how many more there are.

    >>> some_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more


def _bare(name: str) -> str:
    """A name without the wrappers at its beginning, and without that of torch.compile.

    >>> _bare("module.model._orig_mod.fc.bias"), _bare("network.step")
    ('fc.bias', 'step')
    """
    return _WRAPPERS.sub("", name.replace("_orig_mod.", ""))


def match_names(state: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Which tensor of the file belongs to which of the module: {name in the module: name in the file}.

    Leading wrappers (``module.``, ``model.``, ``network.``, ``net.``, ``backbone.``) are left out on both sides, unless
    two tensors have the same name then.

    >>> conv = torch.zeros(3)
    >>> match_names({"module.model.conv.bias": conv}, {"network.conv.bias": conv})
    {'network.conv.bias': 'module.model.conv.bias'}
    """
    theirs, ours = ({_bare(name): name for name in names} for names in (state, targets))
    if len(theirs) < len(state) or len(ours) < len(targets):
        return {name: name for name in targets if name in state}
    return {name: theirs[bare] for bare, name in ours.items() if bare in theirs}


def _misfit(value: Tensor, target: Tensor) -> str:
    """Why a tensor cannot replace another; empty where it can."""
    if value.shape != target.shape:
        return f"{tuple(value.shape)} instead of {tuple(target.shape)}"
    # Quantised integers are not weights without their scales.
    if value.is_floating_point() != target.is_floating_point():
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


def _part(name: str) -> str:
    return _bare(name).partition(".")[0]


def _compare(
    state: Mapping[str, Tensor], targets: Mapping[str, Tensor], head: str
) -> tuple[dict[str, Tensor], dict[str, str], list[str], list[str]]:
    """The tensors that fit, under the module's names; what is skipped and why; what is new; what tells another network.

    A new head tells none. It has another number of rows; or the module's is missing, and the file may have one of
    another name.

    Args:
        head: the first part of the names of the module's last layer.
    """
    matches = match_names(state, targets)
    misfits = {name: reason for name in matches if (reason := _misfit(state[matches[name]], targets[name]))}
    fitting = {name: state[source] for name, source in matches.items() if name not in misfits}
    used = set(matches.values())
    left = _counted(name for name in state if name not in used)
    missing = _counted(name for name in targets if name not in matches)
    loaded = {_part(name) for name in fitting}
    renamed = head not in loaded and any(_part(name) == head for name in missing)
    changed = {name: (state[matches[name]].shape, targets[name].shape) for name in misfits}
    # The rows of the head are classes, as those of further outputs are. Those of other tensors, such as a Swin's
    # position biases of another window, are another network's.
    of_head = {(theirs[:1], ours[:1]) for name, (theirs, ours) in changed.items() if _part(name) == head}
    resized = []
    for name, (theirs, ours) in changed.items():
        if theirs != ours and theirs[1:] == ours[1:] and (theirs[:1], ours[:1]) in of_head:
            resized.append(name)
    foreign = [f"{name} is not in the network" for name in left if not renamed or _part(name) in loaded]
    foreign += [f"{name} is not in the file" for name in missing if not renamed or _part(name) != head]
    foreign += [f"{name} {reason}" for name, reason in misfits.items() if name not in resized]
    skipped = misfits | dict.fromkeys(left, "is not in the network")
    return fitting, skipped, _counted(name for name in targets if name not in fitting), foreign


def _fitting_prefix(state: Mapping[str, Tensor], targets: Mapping[str, Tensor], most: int) -> str:
    """The beginning of names without which more than `most` tensors of the file fit, and most of the module's.

    Trainers of other projects put a network into modules of theirs: "encoder.", "module.encoder_q.".
    """
    names = {_bare(name): value.shape for name, value in targets.items()}
    first = next(iter(names), "")
    best = ""
    # Of equal ones the first in the file: the query encoder of MoCo comes before that of the keys.
    for prefix in [name.removesuffix(first) for name in state if name.endswith(f".{first}")]:
        fits = 0
        for name, value in state.items():
            if name.startswith(prefix) and names.get(name.removeprefix(prefix)) == value.shape:
                fits += 1
        if fits > most:
            best = prefix
            most = fits
    return best if 2 * most > len(names) else ""


def load_weights(
    module: nn.Module,
    state: Mapping[str, Tensor],
    source_name: str,
    exact: bool = False,
    weights_skip: str | Sequence[str] | None = None,
) -> WeightsReport:
    """Copy what fits by name and shape into a module, in the module's precision and on its device.

    >>> report = load_weights(nn.Linear(3, 2), {"module.weight": torch.ones(2, 3), "bias": torch.ones(9)}, "a.pt")
    >>> report.line()
    'weights from a.pt: 1 loaded, 1 skipped (bias (9,) instead of (2,)), 1 new (bias)'

    Args:
        state: tensors by name, such as `read_weights` returns; `match_names` decides which names agree.
        source_name: for messages.
        exact: the head has to fit, too.
        weights_skip: layers and tensors whose name, or an end of it, matches one of these patterns, such as
            "encoder.*", are left out of the file, and keep their values in the module.

    Raises:
        UserError: nothing matches, or something beside a new head does not, or a pattern matches nothing, or a matching
            tensor has NaN or infinite values. The module is not changed then.
    """
    everything = module.state_dict(keep_vars=True)
    targets = {name: value for name, value in everything.items() if torch.is_tensor(value)}
    patterns = skip_patterns(weights_skip)
    in_file = (part for name in state for part in accumulate(name.split("."), "{}.{}".format))
    left_out = matching_names(patterns, [*module_names(module), *targets, *in_file])
    not_chosen, head = _counted(name for name in targets if inside(name, left_out)), _part([*targets][-1])
    targets = {name: value for name, value in targets.items() if not inside(name, left_out)}
    state = {name: value for name, value in state.items() if not inside(name, left_out)}
    if not targets:
        raise UserError("`weights_skip` leaves no tensor of the module; pass other patterns, or weights='none'")
    fitting, skipped, new, foreign = _compare(state, targets, head)
    report = WeightsReport(source_name, _counted(fitting), skipped, new, not_chosen)
    if exact or not fitting:
        foreign = [f"{name} {reason}" for name, reason in skipped.items()]
        foreign += [f"{name} is not in the file" for name in new if name not in skipped]
    if foreign:
        prefix = _fitting_prefix(state, targets, len(fitting))
        if prefix:
            raise UserError(
                f"weights from {source_name} are of another network by their names; without the prefix {prefix!r} they"
                f" fit: save {{name.removeprefix({prefix!r}): value for name, value in state_dict.items() if"
                f" name.startswith({prefix!r})}}"
            )
        layer = foreign[0].partition(" ")[0].rpartition(".")[0] or foreign[0].partition(" ")[0]
        raise UserError(
            f"weights from {source_name} are of another network: {len(report.loaded)} tensors match, and {len(foreign)}"
            f" do not: {some_names(foreign, 3)}. Pass the settings of that network, or leave layers out on both sides,"
            f" as in weights_skip={layer!r}"
        )
    if broken := [name for name, value in fitting.items() if not value.to(targets[name].dtype).isfinite().all()]:
        raise UserError(f"weights from {source_name}: {broken[0]} has NaN or infinite values; pass another file")
    # With the values that the module keeps, and its version numbers, so that nothing is converted from an older format.
    everything.update(fitting)
    module.load_state_dict(everything, strict=False)
    return report


def load_initial_weights(recipe: Any, exact: bool = False) -> WeightsReport | None:
    """Load what a recipe's ``weights`` names into its network, and log which tensors were loaded; None for "none".

    Args:
        exact: the head has to fit, too.

    Raises:
        UserError: as `read_weights` and `load_weights` do.
    """
    options = recipe.hparams
    if options.weights is None or options.weights == "none":
        return None
    state, source = recipe.pretrained_weights(options.weights)
    report = load_weights(recipe.network, state, source, exact, options.weights_skip)
    warn(report.line())
    if [*recipe.network.state_dict()][-1] in report.loaded:  # The rows of a classifier's last layer are classes.
        recipe.take_names_of_weights(read_beside(options.weights).get("class_names", ()))
    return report


class InitialWeights(pl.Callback):
    """Loads a recipe's ``weights`` when it is first trained, unless it resumes from a checkpoint.

    Runs on: `on_fit_start`.
    """

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.take_initial_weights(resumes=trainer.ckpt_path is not None)
