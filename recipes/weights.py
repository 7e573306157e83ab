"""Weights of a file for a module: read without running code, matched by name and shape, reported in one line.

Either every tensor except the head's matches the module, or the file is rejected before the module changes. A wrong
file is another file, half a file, or of another network.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.freezing import inside, matching_names, module_names
from datamodules.errors import UserError, spelled
from datamodules.lightning import pl
from datamodules.notes import warn
from recipes.weights_file import read_weights_file

# Names of attributes that hold a whole network; a file and a module may have different ones, or none.
_WRAPPERS = re.compile(r"^(?:(?:module|model|network|net|backbone)\.)+")


def skip_patterns(weights_skip: str | Sequence[str] | None) -> list[str]:
    """Return the patterns of `weights_skip`, by the names of the network's layers."""
    # Users may type the names in the recipe, as in checkpoints and in the patterns for freezing.
    patterns = [weights_skip] if isinstance(weights_skip, str) else weights_skip or ()
    return [pattern.removeprefix("network.") for pattern in patterns]


def read_beside(path: str | None) -> Mapping[str, Any]:
    """Return the content of a checkpoint or exported file, such as ``class_names``; without a file, an empty dict."""
    return read_weights_file(path) if path and Path(path).expanduser().is_file() else {}


def read_settings_beside(path: str | None) -> dict[str, Any]:
    """Return the settings of the run in a file of weights that the export command wrote; else an empty dict."""
    content = read_beside(path)
    for name in ("config", "hyper_parameters"):
        settings = content.get(name)
        if isinstance(settings, Mapping) and settings:
            return dict(settings)
    return {}


def _tensors(content: Any) -> dict[str, Tensor]:
    items = content.items() if isinstance(content, Mapping) else ()
    return {name: value.detach() for name, value in items if isinstance(name, str) and torch.is_tensor(value)}


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors in a file by name, on the CPU; no code in the file is run.

    Args:
        path: a file with any suffix: safetensors, or a file of `torch.save` with a checkpoint, a state dict, or a dict
            that contains a state dict. Large files are memory-mapped, not copied.

    Raises:
        UserError: the file is missing or damaged, or holds no named tensors, several state dicts, or code.
    """
    content = read_weights_file(path)
    states = {key: _tensors(value) for key, value in content.items()}
    states = {key: state for key, state in states.items() if state}
    # A checkpoint with averaged weights has the unaveraged weights as a second state dict.
    if "pytorch-lightning_version" in content:
        states = {"state_dict": _tensors(content["state_dict"])}
    tensors = _tensors(content)
    if tensors and not states:
        return tensors
    if len(states) != 1:
        description = f"several state dicts, {some_names(list(states))}" if states else "no tensors by name"
        raise UserError(f"{path} holds {description}; pass a file with the state_dict() of one module")
    return next(iter(states.values()))


def some_names(names: Sequence[str], limit: int = 4) -> str:
    """Return the first few names, and the number of the remaining names.

    >>> some_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more


def _bare(name: str) -> str:
    """Return a name without leading wrappers and without torch.compile's prefix.

    >>> _bare("module.model._orig_mod.fc.bias"), _bare("network.step")
    ('fc.bias', 'step')
    """
    return _WRAPPERS.sub("", name.replace("_orig_mod.", ""))


def match_names(state: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the matching names of a module and a file: {name in the module: name in the file}.

    Leading wrappers (``module.``, ``model.``, ``network.``, ``net.``, ``backbone.``) are ignored on both sides, unless
    two tensors would then have the same name.

    >>> conv = torch.zeros(3)
    >>> match_names({"module.model.conv.bias": conv}, {"network.conv.bias": conv})
    {'network.conv.bias': 'module.model.conv.bias'}
    """
    in_file = {_bare(name): name for name in state}
    in_module = {_bare(name): name for name in targets}
    if len(in_file) < len(state) or len(in_module) < len(targets):
        return {name: name for name in targets if name in state}
    return {name: in_file[bare] for bare, name in in_module.items() if bare in in_file}


def _misfit(value: Tensor, target: Tensor) -> str:
    """Return why a tensor cannot replace another tensor; "" if it can."""
    if value.shape != target.shape:
        return f"{tuple(value.shape)} instead of {tuple(target.shape)}"
    # Quantized integers are not weights without their scales.
    if value.is_floating_point() != target.is_floating_point():
        return f"{value.dtype} instead of {target.dtype}".replace("torch.", "")
    return ""


@dataclass(frozen=True)
class WeightsReport:
    """Lists of loaded and skipped weights of a file; BatchNorm's counters (``num_batches_tracked``) are left out.

    >>> WeightsReport("a.pt", ["conv.weight"], {"fc.bias": "(9,) instead of (2,)"}, ["fc.bias"]).line()
    'weights from a.pt: 1 loaded, 1 skipped (fc.bias (9,) instead of (2,)), 1 new (fc.bias)'

    Attributes:
        source: the file or another source of the weights.
        loaded: names in the module with values of the file.
        skipped: names in the file that were not loaded, with the reason.
        new: names in the module that keep their values because the file has no fitting tensor.
        not_chosen: names in the module that keep their values on request.
    """

    source: str
    loaded: list[str]
    skipped: dict[str, str]
    new: list[str]
    not_chosen: Sequence[str] = ()

    def line(self) -> str:
        """Return the report in one line, with only the first few names of long lists."""
        skipped = [f"{name} {reason}" for name, reason in self.skipped.items()]
        counts = [_count_of("skipped", skipped), _count_of("new", self.new)]
        if self.not_chosen:
            counts.append(_count_of("not chosen", self.not_chosen))
        return f"weights from {self.source}: {len(self.loaded)} loaded, {', '.join(counts)}"


def _count_of(label: str, names: Sequence[str]) -> str:
    return f"{len(names)} {label} ({some_names(names)})" if names else f"0 {label}"


def _counted(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith("num_batches_tracked")]


def _part(name: str) -> str:
    return _bare(name).partition(".")[0]


def _compare(
    state: Mapping[str, Tensor], targets: Mapping[str, Tensor], head: str
) -> tuple[dict[str, Tensor], dict[str, str], list[str], list[str]]:
    """Return the fitting tensors, the skipped names with reasons, the new names, and evidence of another network.

    A head with a different number of classes, or with a different name, is expected in fine-tuning: it is not evidence
    of another network.

    Args:
        state: the tensors of the file.
        targets: the tensors of the module.
        head: the first part of the names of the module's last layer.
    """
    matches = match_names(state, targets)
    reasons = {name: _misfit(state[source], targets[name]) for name, source in matches.items()}
    misfits = {name: reason for name, reason in reasons.items() if reason}
    fitting = {name: state[source] for name, source in matches.items() if name not in misfits}
    used = set(matches.values())
    unused = _counted(name for name in state if name not in used)
    missing = _counted(name for name in targets if name not in matches)
    loaded = {_part(name) for name in fitting}
    renamed = head not in loaded and any(_part(name) == head for name in missing)
    changed = {name: (state[matches[name]].shape, targets[name].shape) for name in misfits}
    # The rows of the head and of auxiliary outputs are classes. A different number of rows elsewhere, as in the
    # position biases of a Swin with another window, means another network.
    head_rows = {(in_file[:1], in_module[:1]) for name, (in_file, in_module) in changed.items() if _part(name) == head}
    resized = []
    for name, (in_file, in_module) in changed.items():
        if in_file[1:] == in_module[1:] and (in_file[:1], in_module[:1]) in head_rows and in_file != in_module:
            resized.append(name)
    foreign = [f"{name} is not in the network" for name in unused if not renamed or _part(name) in loaded]
    foreign += [f"{name} is not in the file" for name in missing if not renamed or _part(name) != head]
    foreign += [f"{name} {reason}" for name, reason in misfits.items() if name not in resized]
    skipped = misfits | dict.fromkeys(unused, "is not in the network")
    return fitting, skipped, _counted(name for name in targets if name not in fitting), foreign


def _fitting_prefix(state: Mapping[str, Tensor], targets: Mapping[str, Tensor], best_count: int) -> str:
    """Return a prefix whose removal makes more than `best_count` tensors of the file fit, and most of the module's.

    Other projects wrap a network in modules with prefixes such as "encoder." and "module.encoder_q.".
    """
    names = {_bare(name): value.shape for name, value in targets.items()}
    # A prefix is the text before the name of the module's first tensor.
    first_name = next(iter(names), "")
    best = ""
    # The first prefix in the file wins a tie: MoCo's query encoder comes before its key encoder.
    for prefix in [name.removesuffix(first_name) for name in state if name.endswith(f".{first_name}")]:
        fits = 0
        for name, value in state.items():
            if name.startswith(prefix) and names.get(name.removeprefix(prefix)) == value.shape:
                fits += 1
        if fits > best_count:
            best = prefix
            best_count = fits
    return best if 2 * best_count > len(names) else ""


def load_weights(
    module: nn.Module,
    state: Mapping[str, Tensor],
    source_name: str,
    exact: bool = False,
    weights_skip: str | Sequence[str] | None = None,
    with_head: bool = True,
) -> WeightsReport:
    """Copy the tensors that fit by name and shape into a module, in its precision and on its device.

    >>> report = load_weights(nn.Linear(3, 2), {"module.weight": torch.ones(2, 3), "bias": torch.ones(9)}, "a.pt")
    >>> report.line()
    'weights from a.pt: 1 loaded, 1 skipped (bias (9,) instead of (2,)), 1 new (bias)'

    Args:
        module: the module to change.
        state: tensors by name, for example from `read_weights`; `match_names` matches the names.
        source_name: the name of the source in messages.
        exact: whether the head has to fit as well.
        weights_skip: patterns such as "encoder.*". A layer or tensor is ignored in the file, and keeps its values in
            the module, if its name or the end of its name matches a pattern.
        with_head: whether the last layer is loaded; if not, it is skipped as by `weights_skip`.

    Raises:
        UserError: nothing matches, tensors outside of a new head do not match, a pattern matches nothing, or a matching
            tensor has NaN or infinite values. The module is then unchanged.
    """
    full_state = module.state_dict(keep_vars=True)
    targets = {name: value for name, value in full_state.items() if torch.is_tensor(value)}
    patterns = skip_patterns(weights_skip)
    # The names of modules and tensors in the file: "layer1", "layer1.0", "layer1.0.weight" and so on.
    names_in_file = (prefix for name in state for prefix in accumulate(name.split("."), "{}.{}".format))
    left_out = matching_names(patterns, [*module_names(module), *targets, *names_in_file])
    head = _part([*targets][-1])
    state = {name: value for name, value in state.items() if not inside(name, left_out)}
    if not with_head:
        # The full name: a pattern also matches the ends of other names.
        left_out = {*left_out, head_of(module)}
        matches = match_names(state, targets)
        of_head = {source for name, source in matches.items() if inside(name, left_out)}
        state = {name: value for name, value in state.items() if name not in of_head}
    not_chosen = _counted(name for name in targets if inside(name, left_out))
    targets = {name: value for name, value in targets.items() if not inside(name, left_out)}
    if not targets:
        raise UserError(
            f"{spelled('weights_skip')} leaves no tensor of the module; pass other patterns, or"
            f" {spelled('weights', 'none')}"
        )
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
            f" as in {spelled('weights_skip', layer)}"
        )
    for name, value in fitting.items():
        # After the conversion: a large value may become infinite in the module's precision.
        if not value.to(targets[name].dtype).isfinite().all():
            raise UserError(f"weights from {source_name}: {name} has NaN or infinite values; pass another file")
    # The full state dict has the module's version numbers, so that torch converts nothing from an older format.
    full_state.update(fitting)
    module.load_state_dict(full_state, strict=False)
    return report


def head_of(network: nn.Module) -> str:
    """Return the name of the last layer, the layer with the last tensor of a network.

    >>> head_of(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Flatten(), nn.Linear(8, 2)))
    '2'
    """
    names: list[str] = [*network.state_dict()]
    return names[-1].rpartition(".")[0]


def order_head(network: nn.Module, order: Sequence[int]) -> bool:
    """Reorder the rows of the last layer, one for each class; return whether this was possible.

    It is impossible if the previous layer has as many rows, as in networks with two heads; then nothing changes.

    Args:
        network: the network.
        order: the present row of each class.
    """
    matrices = {name: value for name, value in network.named_parameters() if value.ndim > 1}
    *before, (name, head) = [*matrices.items()][-2:]
    if name.rpartition(".")[0] != head_of(network) or len(head) != len(order):
        return False
    if any(len(matrix) == len(order) for _, matrix in before):
        return False
    with torch.no_grad():
        for parameter in network.get_submodule(head_of(network)).parameters(recurse=False):
            parameter.copy_(parameter[list(order)])
    return True


def _has_head(network: nn.Module, state: Mapping[str, Tensor], weights_skip: str | Sequence[str] | None) -> bool:
    """Return whether a file has a last layer for a network that `weights_skip` does not exclude."""
    head = [*network.state_dict()][-1]
    targets = {name: value for name, value in network.state_dict().items() if torch.is_tensor(value)}
    source = match_names(state, targets).get(head)
    left_out = matching_names(skip_patterns(weights_skip), [*module_names(network), *targets]) if weights_skip else ()
    return source is not None and not _misfit(state[source], targets[head]) and not inside(head, left_out)


def load_initial_weights(recipe: Any, exact: bool = False) -> WeightsReport | None:
    """Load the ``weights`` of a recipe into its network, log a report and return it; return None for "none".

    The rows of a classifier's last layer are its classes. If these are not known, the layer is not loaded.

    Args:
        recipe: the recipe.
        exact: whether the head has to fit as well.

    Raises:
        UserError: see `read_weights` and `load_weights`.
    """
    options = recipe.hparams
    if options.weights is None or options.weights == "none":
        return None
    state, source = recipe.pretrained_weights(options.weights)
    content = read_beside(options.weights)
    problem = recipe.problem_of_head(content) if content else ""
    has_head = _has_head(recipe.network, state, options.weights_skip)
    leaves_head_out = bool(problem) and has_head
    only_head = {name.rpartition(".")[0] for name in recipe.network.state_dict()} == {head_of(recipe.network)}
    if leaves_head_out and (exact or only_head):
        raise UserError(f"{options.weights} {problem}")
    report = load_weights(recipe.network, state, source, exact, options.weights_skip, with_head=not leaves_head_out)
    warn(report.line())
    if leaves_head_out:
        warn(f"note: {head_of(recipe.network)} begins with new weights: {options.weights} {problem}")
    elif content and [*recipe.network.state_dict()][-1] in report.loaded:
        recipe.set_names_of_weights(content)
    return report


class InitialWeights(pl.Callback):
    """Callback that loads a recipe's ``weights`` at its first training, unless it resumes from a checkpoint.

    Runs on: `on_fit_start`.
    """

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.initialize_weights(resumes=trainer.ckpt_path is not None)
