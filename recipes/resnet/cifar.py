"""The ResNets for images of about 32 pixels (He et al., 2016, section 4.2): 3 x 3 stem, three stages, no pooling.

Tensors have the names under which others publish weights: those of `akamaster/pytorch_resnet_cifar10`, whose shortcuts
have no parameters as in the paper, and of `chenyaofo/pytorch-cifar-models`, whose shortcuts are 1 x 1 convolutions.
"""

from collections import OrderedDict
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["CIFAR_DEPTHS", "build_cifar_resnet"]

CIFAR_DEPTHS = (20, 32, 44, 56, 110)
"""The paper's depths: 0.27, 0.46, 0.66, 0.85 and 1.7 million parameters."""


class _Block(nn.Module):
    """Two convolutions and a shortcut; where the size changes, it skips every other pixel and adds zero channels."""

    def __init__(self, channels_in: int, channels: int, projects: bool) -> None:
        super().__init__()
        stride = 1 if channels_in == channels else 2
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.stride, self.new_channels = stride, channels - channels_in
        self.downsample: nn.Module | None = None
        if projects and stride > 1:
            convolution = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        shortcut = inputs
        if self.downsample is not None:
            shortcut = self.downsample(inputs)
        elif self.new_channels:
            side = self.new_channels // 2
            shortcut = F.pad(inputs[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, side, side))
        outputs: Tensor = self.relu(self.bn1(self.conv1(inputs)))
        outputs = self.bn2(self.conv2(outputs))
        outputs = self.relu(outputs + shortcut)
        return outputs


def build_cifar_resnet(depth: int, num_classes: int, projections: bool = False) -> nn.Sequential:
    """A ResNet for small images with new weights (He et al., 2015), of any height and width.

    Args:
        depth: 6 n + 2, such as one of `CIFAR_DEPTHS`.
        num_classes: number of logits.
        projections: shortcuts between stages are 1 x 1 convolutions (the paper's option B); by default they skip pixels
            and pad channels with zeros (option A), without parameters.

    Example:
        >>> import torch
        >>> build_cifar_resnet(20, num_classes=10)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    layers["bn1"] = nn.BatchNorm2d(16)
    layers["relu"] = nn.ReLU(inplace=True)
    channels_in = 16
    for number, channels in enumerate((16, 32, 64), 1):
        widths = [channels_in] + [channels] * ((depth - 2) // 6)
        layers[f"layer{number}"] = nn.Sequential(*(_Block(a, b, projections) for a, b in pairwise(widths)))
        channels_in = channels
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten(1)
    layers["fc" if projections else "linear"] = nn.Linear(channels_in, num_classes)
    network = nn.Sequential(layers)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network
