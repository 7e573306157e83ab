"""Optimizer of a recipe: by name or import path, over groups of parameters.

Tested in `tests/recipes/test_schedules.py`.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from callbacks.lib.lightning_internals import attached_trainer
from datamodules.errors import UserError, spelled
from datamodules.notes import warn

# Optimizers whose rate grows linearly with the batch size. Adaptive optimizers divide by the size of the gradient, so
# their rate grows with the square root.
_LINEAR = {"sgd", "asgd"}

# Arguments with their own flag, which `optimizer_args` must not contain.
_ARGUMENTS_WITH_FLAG = ("lr", "weight_decay", "momentum", "fused")


def optimizer_class(name: str) -> type[Optimizer]:
    """Return an optimizer of ``torch.optim`` by its name, in any case, or a class by its import path.

    No module is imported here, because the name may come from a checkpoint; the command line imports a typed path.

    Raises:
        UserError: torch has no such optimizer, the module has not been imported, or the class is not supported.
    """
    if "." not in name:
        classes = {
            key.lower(): value
            for key, value in vars(torch.optim).items()
            if isinstance(value, type) and issubclass(value, Optimizer) and value not in (Optimizer, SparseAdam)
        }
        if name.lower() not in classes:
            names = ", ".join(sorted(classes))
            raise UserError(f"no optimizer {name!r}; expected one of {names}, or the import path of a class of yours")
        cls: Any = classes[name.lower()]
    else:
        module, _, attribute = name.rpartition(".")
        if module not in sys.modules:
            raise UserError(
                f"{module} is not imported; write `import {module}` before", setting="optimizer", value=name
            )
        cls = getattr(sys.modules[module], attribute, None)
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            problem = "it is no subclass of torch.optim.Optimizer" if cls else f"{module} has no class {attribute}"
            raise UserError(problem, setting="optimizer", value=name)
    # Schedule-free optimizers have these methods.
    if callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None)):
        raise UserError(
            "it trains and evaluates different weights, and switching between them rounds, so no resumed run would be"
            " exact",
            setting="optimizer",
            value=name,
            to_type=f"pass {spelled('ema')} with another optimizer",
        )
    if not _accepts(cls, "lr"):
        problem = "it has no parameter lr, which schedules and the warm-up multiply"
        raise UserError(problem, setting="optimizer", value=name)
    fitting: type[Optimizer] = cls
    return fitting


def _accepts(cls: type[Optimizer], name: str) -> bool:
    parameters = inspect.signature(cls).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def check_optimizer(name: str, arguments: Mapping[str, Any]) -> None:
    """Reject an unsupported optimizer, and arguments that it does not have.

    A class in a module that is not imported is checked later: inference does not need the optimizer.

    Raises:
        UserError: see `optimizer_class`; or the optimizer has no such argument.
    """
    if "." in name and name.rpartition(".")[0] not in sys.modules:
        return
    cls = optimizer_class(name)
    names = [key for key in list(inspect.signature(cls).parameters)[1:] if key not in _ARGUMENTS_WITH_FLAG]
    for key in arguments:
        if key in _ARGUMENTS_WITH_FLAG:
            problem = f"{key} is a separate parameter"
            raise UserError(problem, setting="optimizer_args", to_type=f"pass {spelled(key, arguments[key])}")
    for key in arguments:
        if not _accepts(cls, key) or key == "params":
            problem = f"{cls.__name__} has no {key}; it takes {', '.join(names)}"
            raise UserError(problem, setting="optimizer_args")


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two named groups: "decay" for weights, "no_decay" for the parameters of norms and for biases.

    Parameters of norms and biases have at most one dimension. Frozen parameters are included, so that the groups are
    the same during the whole run. A group without parameters is left out.
    """
    # Without duplicates, such as tied weights: an optimizer rejects a parameter that is in its groups twice.
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
    """Return groups with a learning rate per layer (Howard and Ruder, 2018), named "layer4.decay" and so on.

    Args:
        layers: names and parameters of the layers, from the input to the head.
        weight_decay: weight decay of weights.
        lr: learning rate of the layer below the head.
        layer_lr_decay: factor on the rate from each layer to the one below it.
        head_lr_factor: factor on the rate for the head.

    Example:
        >>> layers = [(name, [nn.Parameter(torch.ones(2, 2))]) for name in ("layer3", "layer4", "fc")]
        >>> [(g["name"], g["lr"]) for g in layer_groups(layers, 0.01, lr=1.0, layer_lr_decay=0.5, head_lr_factor=10)]
        [('layer3.decay', 0.5), ('layer4.decay', 1.0), ('fc.decay', 10.0)]
    """
    layers = [(name, parameters) for name, parameters in layers if parameters]
    groups = []
    for depth, (name, parameters) in enumerate(reversed(layers)):
        rate = lr * head_lr_factor if depth == 0 else lr * layer_lr_decay ** (depth - 1)
        layer = parameter_groups(parameters, weight_decay)
        groups.append([group | {"name": f"{name}.{group['name']}", "lr": rate} for group in layer])
    return [group for layer in reversed(groups) for group in layer]


def build_optimizer(parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], recipe: Any) -> Optimizer:
    """Build the optimizer from the hyperparameters of a recipe, for its `configure_optimizers`.

    Args:
        parameters: the parameters of the network, to be split by `parameter_groups`; or groups, which get the recipe's
            learning rate and weight decay if they have none.
        recipe: a recipe with the hyperparameters optimizer, lr, weight_decay, momentum and optimizer_args.

    Raises:
        UserError: see `optimizer_by_name`.
    """
    options = recipe.hparams
    groups: list[Any] = list(parameters)
    if groups and not isinstance(groups[0], dict):
        groups = parameter_groups(groups, options.weight_decay)
    groups = [{"weight_decay": options.weight_decay, **group} for group in groups]
    # Lightning raises an error for a fused optimizer with clipped gradients under AMP
    # (Lightning-AI/pytorch-lightning#21435).
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
    """Build an optimizer by name over parameter groups, without a recipe.

    A checkpoint restores the moments only. The arguments determine rates, weight decay and kernels, so a resumed run
    can change these and the device.

    Args:
        groups: the parameter groups.
        momentum: momentum, ignored if the optimizer has none; SGD uses Nesterov's.
        fused: whether one kernel updates all parameters; None: if the devices of all parameters support it.
        arguments: other arguments of the optimizer.

    Raises:
        UserError: see `check_optimizer`; or the optimizer rejects the parameters or its arguments.
    """
    groups = list(groups)
    cls = optimizer_class(name)
    check_optimizer(name, arguments or {})
    if not _accepts(cls, "weight_decay"):
        if any(group.get("weight_decay") for group in groups):
            warn("%s has no weight decay, so none is applied", cls.__name__)
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    if issubclass(cls, LBFGS):
        groups = _one_group(groups, name)
    accepted = inspect.signature(cls).parameters
    options: dict[str, Any] = {"lr": lr}
    if "momentum" in accepted:
        options["momentum"] = momentum
        if "nesterov" in accepted and momentum > 0:
            options["nesterov"] = True
    if "fused" in accepted:
        parameters = [p for group in groups for p in group["params"]]
        supports_fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in parameters)
        options["fused"] = supports_fused if fused is None else fused
    try:
        optimizer = cls(groups, **options | dict(arguments or {}))
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(str(error), setting="optimizer", value=name) from error
    # Only arguments: some optimizers also keep state in their groups, and a checkpoint has to restore it.
    settings_of_groups = [
        {key: value for key, value in group.items() if key in accepted and key != "params"}
        for group in optimizer.param_groups
    ]

    def keep_settings(loaded: Optimizer) -> None:
        for group, settings in zip(loaded.param_groups, settings_of_groups):
            group.update(settings)
            if "initial_lr" in group:  # The base rate of the scheduler has to follow a changed lr.
                group["initial_lr"] = settings["lr"]

    optimizer.register_load_state_dict_post_hook(keep_settings)
    return optimizer


def _one_group(groups: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return one group with all parameters, for an optimizer that searches along one direction.

    Raises:
        UserError: the groups have different rates, or a weight is in channels_last, which torch cannot flatten into a
            vector.
    """
    rates = {group.get("lr") for group in groups}
    if len(rates) > 1:
        problem = "it has one rate for all layers"
        to_type = f"leave out {spelled('head_lr_factor')} and {spelled('layer_lr_decay')}"
        raise UserError(problem, setting="optimizer", value=name, to_type=to_type)
    (rate,) = rates
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not all(parameter.is_contiguous() for parameter in parameters):
        problem = "torch's LBFGS cannot read weights in channels_last"
        raise UserError(problem, setting="optimizer", value=name, to_type=f"pass {spelled('channels_last', False)}")
    merged = {"params": parameters}
    return [merged if rate is None else merged | {"lr": rate}]


def learning_rate_scale(
    rule: Literal["auto", "none", "linear", "sqrt"], optimizer: str
) -> Literal["linear", "sqrt"] | None:
    """Return the scaling rule: "auto" is linear for SGD (Goyal et al., 2017), sqrt for adaptive optimizers."""
    if rule == "auto":
        return "linear" if optimizer.rpartition(".")[2].lower() in _LINEAR else "sqrt"
    return None if rule == "none" else rule
