"""The optimiser of a recipe: by name, torch's or that of any module that is imported, over groups of parameters."""

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from callbacks.lib.hooks import attached_trainer
from datamodules.errors import UserError
from datamodules.notes import warn

# Adaptive optimisers divide by the size of the gradient, so noise grows only with the square root.
_LINEAR = {"sgd", "asgd"}

# Flags of their own: they are no keys of `optimizer_args`.
_OWN = ("lr", "weight_decay", "momentum", "fused")


def optimizer_class(name: str) -> type[Optimizer]:
    """An optimiser of ``torch.optim`` by its name, in any case, or one by its import path, such as lion_pytorch.Lion.

    Nothing is imported here, since a checkpoint may have named the module; the command line imports what is typed.

    Raises:
        UserError: torch has none of that name, the module is not imported, or the class does not fit.
    """
    if "." not in name:
        classes = {
            key.lower(): value
            for key, value in vars(torch.optim).items()
            if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
        }
        if name.lower() not in classes:
            names = ", ".join(sorted(classes))
            raise UserError(f"no optimizer {name!r}; expected one of {names}, or the import path of a class of yours")
        found: Any = classes[name.lower()]
    else:
        module, _, attribute = name.rpartition(".")
        if module not in sys.modules:
            raise UserError(f"optimizer={name!r}: {module} is not imported; write `import {module}` before")
        found = getattr(sys.modules[module], attribute, None)
        if not (isinstance(found, type) and issubclass(found, Optimizer)):
            what = "it is no subclass of torch.optim.Optimizer" if found else f"{module} has no class {attribute}"
            raise UserError(f"optimizer={name!r}: {what}")
    if callable(getattr(found, "train", None)) and callable(getattr(found, "eval", None)):
        raise UserError(
            f"optimizer={name!r}: it trains other weights than it is to be scored and saved with, and moving between"
            " them rounds, so that no resumed run would be exact; pass `ema` with another optimizer"
        )
    if issubclass(found, LBFGS):
        raise UserError(f"optimizer={name!r}: it evaluates the loss several times in an update; pass another one")
    if not _accepts(found, "lr"):
        raise UserError(f"optimizer={name!r}: it has no parameter lr, which schedules and the warm-up multiply")
    fitting: type[Optimizer] = found
    return fitting


def _accepts(cls: type[Optimizer], name: str) -> bool:
    parameters = inspect.signature(cls).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def check_optimizer(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse an optimiser that does not fit, and arguments that it does not have.

    A class in a module that is not imported is looked at later: nothing of it is needed to run inference.

    Raises:
        UserError: as `optimizer_class` does, or with the arguments that the optimiser has.
    """
    if "." in name and name.rpartition(".")[0] not in sys.modules:
        return
    cls = optimizer_class(name)
    if cls is torch.optim.SparseAdam:
        raise UserError("optimizer=sparseadam updates sparse gradients, and these networks have dense ones; pass adam")
    if own := [key for key in arguments if key in _OWN]:
        raise UserError(f"`optimizer_args`: {own[0]} is a parameter of its own; pass {own[0]}={arguments[own[0]]!r}")
    names = [key for key in list(inspect.signature(cls).parameters)[1:] if key not in _OWN]
    for key in arguments:
        if not _accepts(cls, key) or key == "params":
            raise UserError(f"`optimizer_args`: {cls.__name__} has no {key}; it takes {', '.join(names)}")


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two named groups: "decay" for weights, "no_decay" for the parameters of norms and for biases.

    Norms and biases are the parameters of at most one dimension. Frozen parameters are in the groups as well, so that
    the groups stay the same for the whole run. A group without parameters is left out.
    """
    parameters = list(dict.fromkeys(parameters))
    decayed = [p for p in parameters if p.ndim > 1]
    exempt = [p for p in parameters if p.ndim <= 1]
    groups = [
        {"name": "decay", "params": decayed, "weight_decay": weight_decay},
        {"name": "no_decay", "params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def layer_groups(
    layers: Sequence[tuple[str, Sequence[nn.Parameter]]],
    weight_decay: float,
    lr: float,
    layer_lr_decay: float = 1.0,
    head_lr_factor: float = 1.0,
) -> list[dict[str, Any]]:
    """Groups per layer with learning rates of their own (Howard and Ruder, 2018), named "layer4.decay" and so on.

    Args:
        layers: name and parameters, from the input to the head, which is the last.
        lr: of the layer below the head; that below it has `layer_lr_decay` times as much, and so on down.
        head_lr_factor: how much faster the head learns.

    Example:
        >>> layers = [(name, [nn.Parameter(torch.ones(2, 2))]) for name in ("layer3", "layer4", "fc")]
        >>> [(g["name"], g["lr"]) for g in layer_groups(layers, 0.01, lr=1.0, layer_lr_decay=0.5, head_lr_factor=10)]
        [('layer3.decay', 0.5), ('layer4.decay', 1.0), ('fc.decay', 10.0)]
    """
    layers = [(name, parameters) for name, parameters in layers if parameters]
    groups = []
    for depth, (name, parameters) in enumerate(reversed(layers)):
        rate = lr * head_lr_factor if depth == 0 else lr * layer_lr_decay ** (depth - 1)
        part = parameter_groups(parameters, weight_decay)
        groups.append([group | {"name": f"{name}.{group['name']}", "lr": rate} for group in part])
    return [group for part in reversed(groups) for group in part]


def build_optimizer(parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], recipe: Any) -> Optimizer:
    """The optimiser that the parameters of a recipe name, for its `configure_optimizers`.

    Args:
        parameters: of the network, which `parameter_groups` splits; or groups, whose rate and weight decay are the
            recipe's where they have none of their own.
        recipe: its ``hparams`` are those of `Recipe`: optimizer, lr, weight_decay, momentum and optimizer_args.

    Raises:
        UserError: as `optimizer_by_name` does.
    """
    options = recipe.hparams
    groups: list[Any] = list(parameters)
    if groups and not isinstance(groups[0], dict):
        groups = parameter_groups(groups, options.weight_decay)
    groups = [{"weight_decay": options.weight_decay, **group} for group in groups]
    # Under AMP a fused one with clipped gradients raises inside Lightning (Lightning-AI/pytorch-lightning#21435).
    clips = getattr(attached_trainer(recipe), "gradient_clip_val", None)
    fused = False if clips else None
    return optimizer_by_name(options.optimizer, groups, options.lr, options.momentum, fused, options.optimizer_args)


def optimizer_by_name(
    name: str,
    groups: Iterable[dict[str, Any]],
    lr: float,
    momentum: float = 0.9,
    fused: bool | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Optimizer:
    """An optimiser by name over parameter groups, without a recipe.

    A checkpoint restores its moments only: rates, decay and kernels are those of the arguments, so a resumed run can
    change them, or the device.

    Args:
        momentum: for those that have it (SGD then uses Nesterov's); for the others it is ignored.
        fused: one kernel for all parameters; None takes it where every parameter's device has it.
        arguments: further arguments of the optimiser.

    Raises:
        UserError: as `check_optimizer` does, or the optimiser refuses the parameters or its arguments.
    """
    groups, cls = list(groups), optimizer_class(name)
    check_optimizer(name, arguments or {})
    if not _accepts(cls, "weight_decay"):
        if any(group.get("weight_decay") for group in groups):
            warn("%s has no weight decay, so none is applied", cls.__name__)
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    accepted = inspect.signature(cls).parameters
    options: dict[str, Any] = {"lr": lr}
    if "momentum" in accepted:
        options["momentum"] = momentum
        if "nesterov" in accepted and momentum > 0:
            options["nesterov"] = True
    if "fused" in accepted:
        parameters = [p for group in groups for p in group["params"]]
        possible = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in parameters)
        options["fused"] = possible if fused is None else fused
    try:
        optimizer = cls(groups, **options | dict(arguments or {}))
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"optimizer={name!r}: {error}") from error
    # What is no argument is state, which some keep in their groups.
    asked_for = [
        {key: value for key, value in group.items() if key in accepted and key != "params"}
        for group in optimizer.param_groups
    ]

    def keep_settings(loaded: Optimizer) -> None:
        for group, settings in zip(loaded.param_groups, asked_for):
            group.update(settings)
            if "initial_lr" in group:  # A scheduler's; what it begins from is asked for here, too.
                group["initial_lr"] = settings["lr"]

    optimizer.register_load_state_dict_post_hook(keep_settings)
    return optimizer


def learning_rate_scale(
    rule: Literal["auto", "none", "linear", "sqrt"], optimizer: str
) -> Literal["linear", "sqrt"] | None:
    """The rule that "auto" stands for: linear for SGD (Goyal et al., 2017), square root for adaptive optimisers."""
    if rule == "auto":
        return "linear" if optimizer.rpartition(".")[2].lower() in _LINEAR else "sqrt"
    return None if rule == "none" else rule
