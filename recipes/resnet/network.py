"""torchvision's ResNets, cut into the stages that freezing, learning rates per layer and cached features refer to."""

from collections.abc import Sequence

import torchvision.models
from torch import Tensor, nn
from torchvision.models import ResNet

from datamodules.errors import UserError

__all__ = ["ARCHITECTURES", "Stage", "build_resnet", "resnet_stages", "run_stages"]

Stage = tuple[str, Sequence[nn.Module]]
"""A name, and the modules that run one after the other."""

ARCHITECTURES = tuple(name for name in torchvision.models.list_models() if name.startswith(("res", "wide")))
"""resnet18 to resnet152, resnext and wide_resnet."""


def build_resnet(arch: str, num_classes: int, small_images: bool = False) -> ResNet:
    """A ResNet with new weights (He et al., 2016), whose tensors are named as torchvision's.

    The last normalisation of each block begins at zero, so that a block begins as the identity (Goyal et al., 2017).

    Args:
        arch: one of `ARCHITECTURES`.
        num_classes: number of logits.
        small_images: begin with a 3 x 3 convolution instead of one of 7 x 7 that skips pixels, and without pooling, as
            the authors do for CIFAR: 32 pixels come to 4 before the mean over positions, not to 1.

    Raises:
        UserError: there is no such architecture.

    Example:
        >>> import torch
        >>> build_resnet("resnet18", num_classes=2)(torch.zeros(1, 3, 64, 64)).shape
        torch.Size([1, 2])
    """
    if arch not in ARCHITECTURES:
        raise UserError(f"no architecture {arch!r}; expected one of {', '.join(ARCHITECTURES)}")
    network: ResNet = torchvision.models.get_model(arch, num_classes=num_classes, zero_init_residual=True)
    if small_images:
        network.conv1 = nn.Conv2d(3, network.conv1.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        network.maxpool = nn.Identity()
    return network


def resnet_stages(network: ResNet) -> list[Stage]:
    """The network from the images to the logits: run one after the other they are its forward pass."""
    return [
        ("stem", [network.conv1, network.bn1, network.relu, network.maxpool]),
        *((name, [getattr(network, name)]) for name in ("layer1", "layer2", "layer3", "layer4")),
        ("pool", [network.avgpool, nn.Flatten(1)]),
        ("fc", [network.fc]),
    ]


def run_stages(stages: Sequence[Stage], inputs: Tensor) -> Tensor:
    """Pass a batch through stages."""
    for _, modules in stages:
        for module in modules:
            inputs = module(inputs)
    return inputs
