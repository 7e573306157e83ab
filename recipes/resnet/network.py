"""Networks for the values of ``arch``: torchvision's, timm's, and our small networks."""

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

import torchvision.models
from torch import nn
from torchvision.models import ResNet

from datamodules.errors import UserError, spelled
from recipes.version import install_command

from .small_networks import CIFAR_DEPTHS, build_cifar_resnet, build_cifarnet

SMALL_NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    **{f"resnet{depth}": partial(build_cifar_resnet, depth) for depth in CIFAR_DEPTHS},
    "cifarnet": build_cifarnet,
    "cifarnet_wide": partial(build_cifarnet, widths=(64, 128, 256)),
}
"""Our networks for images of about 32 pixels by name: functions of the number of classes."""

_TORCHVISION = torchvision.models.list_models(module=torchvision.models)
TIMM = "timm:"
"""The prefix of the names of timm's models."""

RESNETS = tuple(name for name in _TORCHVISION if name.startswith(("res", "wide")))
"""resnet18 to resnet152, resnext and wide_resnet."""

ARCHITECTURES = (*SMALL_NETWORKS, *_TORCHVISION)
"""The architectures of `build_network`, except timm's."""


def timm_config(name: str) -> Any:
    """Return timm's configuration of the pretrained weights of a model.

    Raises:
        UserError: timm is not installed, or has no such model.
    """
    try:
        import timm
    except ImportError as error:
        raise UserError(f"{spelled('arch', TIMM + name)} needs timm; run {install_command('timm')}") from error
    names = {*timm.list_models(), *timm.list_pretrained()}
    if name not in names:
        raise UserError(f"timm {timm.__version__} has no model {name!r}; {_did_you_mean(name, names, TIMM)}")
    return timm.get_pretrained_cfg(name)


def _did_you_mean(name: str, names: Any, lead: str = "") -> str:
    close = difflib.get_close_matches(name, names) or sorted(names)[:3]
    return f"did you mean {', '.join(lead + candidate for candidate in close)}?"


def build_timm(name: str, image_size: int, **options: Any) -> nn.Module:
    """Build a model of timm, for the image size if its weights depend on it."""
    if timm_config(name).fixed_input_size:
        options["img_size"] = image_size
    import timm

    network: nn.Module = timm.create_model(name, **options)
    return network


def build_resnet(arch: str, num_classes: int, small_images: bool = False) -> ResNet:
    """Build a ResNet with new weights (He et al., 2016) and torchvision's names of the tensors.

    The weights of the last norm in each block are initially zero, so that the block is initially the identity (Goyal et
    al., 2017).

    Args:
        arch: resnet18 to resnet152, resnext or wide_resnet, by torchvision's name.
        num_classes: number of logits.
        small_images: whether the first layer is the CIFAR stem, a 3 x 3 convolution without stride and pooling, instead
            of a 7 x 7 convolution with stride 2: 32 pixels become 4 before the mean over positions, not 1.

    Example:
        >>> import torch
        >>> build_resnet("resnet18", num_classes=2)(torch.zeros(1, 3, 64, 64)).shape
        torch.Size([1, 2])
    """
    network: ResNet = torchvision.models.get_model(arch, num_classes=num_classes, zero_init_residual=True)
    if small_images:
        network.conv1 = nn.Conv2d(3, network.conv1.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        network.maxpool = nn.Identity()
    return network


def _build_torchvision(arch: str, num_classes: int, image_size: int) -> nn.Module:
    options: dict[str, Any] = {}
    if arch.startswith("vit_"):
        options["image_size"] = image_size
    elif arch.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    elif arch in ("googlenet", "inception_v3"):
        # Auxiliary outputs in training would need separate losses. Published weights expect another normalization;
        # `transform_input` converts from the usual normalization.
        options = {"aux_logits": False, "init_weights": True, "transform_input": True}
    network: nn.Module = torchvision.models.get_model(arch, num_classes=num_classes, **options)
    return network


def _begin_heads(network: nn.Module, num_classes: int) -> nn.Module:
    """Re-initialize a head like `nn.Linear` if the standard deviation of its weights is more than twice `nn.Linear`'s.

    Some networks initialize their head for ImageNet's 1,000 classes, with 1 / sqrt(classes) or similar. For 2 classes,
    the logits are 25 times as large, and the learning rate of a head is too small to correct them.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    # A network may end in several heads, for example a head for each token.
    for head in reversed(layers):
        if len(head.weight) != num_classes:
            break
        # `nn.Linear` draws from a uniform distribution with the standard deviation 1 / sqrt(3 * inputs).
        if head.weight.std() > 2 * (3 * head.weight[0].numel()) ** -0.5:
            head.reset_parameters()
    return network


def build_network(arch: str, num_classes: int, image_size: int = 224, small_images: bool = False) -> nn.Module:
    """Build a network with new weights that maps images of shape (batch, 3, height, width) to logits.

    Args:
        arch: one of `ARCHITECTURES`, or "timm:" and the name of a model of timm.
        num_classes: number of logits.
        image_size: side of the images in pixels, for networks whose weights depend on it.
        small_images: see `build_resnet`; only for ResNets of torchvision.

    Raises:
        UserError: there is no such architecture, or it does not support images of this size.

    Example:
        >>> import torch
        >>> build_network("mobilenet_v3_small", num_classes=2)(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 2])
    """
    if arch in SMALL_NETWORKS:
        return SMALL_NETWORKS[arch](num_classes)
    if small_images and arch not in RESNETS:
        raise UserError(
            f"{spelled('small_images', True)} changes the first layer of torchvision's ResNets, and {arch} is none of"
            f" them; pass {spelled('small_images', False)}, or {spelled('arch', 'resnet20')}, which is made for small"
            " images"
        )
    if not arch.startswith(TIMM) and arch not in _TORCHVISION:
        raise UserError(f"no architecture {arch!r}; {_did_you_mean(arch, ARCHITECTURES)} Those of timm are timm:NAME")
    try:
        if arch.startswith(TIMM):
            network = build_timm(arch.removeprefix(TIMM), image_size, num_classes=num_classes)
        elif arch in RESNETS:
            network = build_resnet(arch, num_classes, small_images)
        else:
            network = _build_torchvision(arch, num_classes, image_size)
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{arch} cannot be built for images of {image_size} pixels ({str(error) or type(error).__name__}); pass"
            f" another {spelled('image_size')}"
        ) from error
    return _begin_heads(network, num_classes)
