"""The networks that ``arch`` names, and the stages that freezing, learning rates and cached features refer to."""

import difflib
from collections.abc import Callable, Sequence
from functools import partial

import torchvision.models
from torch import Tensor, nn
from torchvision.models import ResNet

from datamodules.errors import UserError
from recipes.resnet.cifar import CIFAR_DEPTHS, build_cifar_resnet
from recipes.resnet.cifarnet import build_cifarnet

__all__ = [
    "ARCHITECTURES",
    "SMALL_NETWORKS",
    "Stage",
    "build_network",
    "build_resnet",
    "resnet_stages",
    "run_stages",
    "weights_statistics",
]

Stage = tuple[str, Sequence[nn.Module]]
"""A name, and the modules that run one after the other."""

RESNETS = tuple(name for name in torchvision.models.list_models() if name.startswith(("res", "wide")))
"""resnet18 to resnet152, resnext and wide_resnet."""

SMALL_NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    **{f"resnet{depth}": partial(build_cifar_resnet, depth) for depth in CIFAR_DEPTHS},
    **{f"resnet{depth}b": partial(build_cifar_resnet, depth, projections=True) for depth in CIFAR_DEPTHS},
    "cifarnet": build_cifarnet,
}
"""Networks of our own for images of about 32 pixels, by name: each is built from the number of classes."""

ARCHITECTURES = (*SMALL_NETWORKS, *RESNETS)
"""What `build_network` takes."""


def build_network(arch: str, num_classes: int, small_images: bool = False) -> nn.Module:
    """A network with new weights, which maps images of shape (batch, 3, height, width) to logits.

    Args:
        arch: one of `ARCHITECTURES`.
        num_classes: number of logits.
        small_images: as for `build_resnet`; `SMALL_NETWORKS` are made for them already.

    Raises:
        UserError: there is no such architecture.
    """
    if arch in SMALL_NETWORKS:
        return SMALL_NETWORKS[arch](num_classes)
    if arch not in ARCHITECTURES:
        close = difflib.get_close_matches(arch, ARCHITECTURES) or ARCHITECTURES
        raise UserError(f"no architecture {arch!r}; did you mean {', '.join(close)}?")
    network: nn.Module = build_resnet(arch, num_classes, small_images)
    return network


def build_resnet(arch: str, num_classes: int, small_images: bool = False) -> ResNet:
    """A ResNet with new weights (He et al., 2016), whose tensors are named as torchvision's.

    The last normalisation of each block begins at zero, so that a block begins as the identity (Goyal et al., 2017).

    Args:
        arch: one of `RESNETS`.
        num_classes: number of logits.
        small_images: begin with a 3 x 3 convolution instead of one of 7 x 7 that skips pixels, and without pooling, as
            the authors do for CIFAR: 32 pixels come to 4 before the mean over positions, not to 1.

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


def weights_statistics(arch: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The mean and the standard deviation of pixels, from 0 to 1, that an architecture's ImageNet weights expect.

    Returns:
        Three numbers each; None where there are no such weights.
    """
    if arch not in torchvision.models.list_models():
        return None
    transforms = torchvision.models.get_model_weights(arch).DEFAULT.transforms()
    return tuple(transforms.mean), tuple(transforms.std)


def resnet_stages(network: nn.Module) -> list[Stage]:
    """The network from the images to the logits: run one after the other they are its forward pass."""
    children = dict(network.named_children())
    layers = [name for name in children if name.startswith("layer")]
    stem = list(children)[: list(children).index(layers[0])]
    head = list(children)[-1]
    return [
        ("stem", [children[name] for name in stem]),
        *((name, [children[name]]) for name in layers),
        ("pool", [children["avgpool"], nn.Flatten(1)]),
        (head, [children[head]]),
    ]


def run_stages(stages: Sequence[Stage], inputs: Tensor) -> Tensor:
    """Pass a batch through stages."""
    for _, modules in stages:
        for module in modules:
            inputs = module(inputs)
    return inputs
