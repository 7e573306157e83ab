"""Networks for images of about 32 pixels: residual networks, and a network that learns fast.

The ResNets follow He et al. (2016), section 4.2: a stem of 3 x 3, three stages, no pooling. Their tensors have the same
names as the published weights of `akamaster/pytorch_resnet_cifar10`; their shortcuts have no parameters.

The fast network is airbench's (Jordan, 2024), but narrower and deeper. Its first layer whitens patches of 2 x 2 pixels,
and its convolutions begin as the identity. Its last two blocks have a residual connection, as in airbench's larger
network, and its logits are small. airbench computes the filters of the first layer from the training set. Here they are
constants for all photographs, because pixels and channels correlate similarly in all of them. So the initial network
does not depend on the data.

Tested in `tests/recipes/resnet/test_recipe.py`.
"""

from collections import OrderedDict
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

CIFAR_DEPTHS = (20, 32, 44, 56, 110)
"""The paper's depths: 0.27, 0.46, 0.66, 0.85 and 1.7 million parameters."""


class _ResidualBlock(nn.Module):
    """Two convolutions and a shortcut. If the size changes, it skips every other pixel and adds zero channels."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels else 2
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.stride = stride
        self.new_channels = channels - channels_in

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        shortcut = inputs
        if self.new_channels:
            side = self.new_channels // 2
            shortcut = F.pad(inputs[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, side, side))
        outputs: Tensor = self.relu(self.bn1(self.conv1(inputs)))
        outputs = self.bn2(self.conv2(outputs))
        outputs = self.relu(outputs + shortcut)
        return outputs


def build_cifar_resnet(depth: int, num_classes: int) -> nn.Sequential:
    """Build a ResNet with new weights for small images of any size (He et al., 2015).

    Args:
        depth: 6 n + 2, such as one of `CIFAR_DEPTHS`.
        num_classes: number of logits.

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
        layers[f"layer{number}"] = nn.Sequential(*(_ResidualBlock(a, b) for a, b in pairwise(widths)))
        channels_in = channels
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten(1)
    layers["linear"] = nn.Linear(channels_in, num_classes)
    network = nn.Sequential(layers)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network


# The principal components of photographs of 32 pixels, and their variances for channels of variance 1.
_PATCHES = (((1, 1, 1, 1), 3.74), ((1, -1, 1, -1), 0.12), ((1, 1, -1, -1), 0.12), ((1, -1, -1, 1), 0.02))
_COLORS = (((1, 1, 1), 2.8), ((1, 0, -1), 0.17), ((1, -2, 1), 0.036))
_LEAST_VARIANCE = 0.01


def whitening_filters() -> Tensor:
    """Return filters whose outputs for normalized photographs are nearly uncorrelated, with about equal variances.

    The filters are the mean of 2 x 2 pixels and their horizontal, vertical and diagonal differences, each for
    brightness, red against blue, and green against both. Each is divided by its standard deviation. Their negatives
    follow.

    Returns:
        float32 of shape (24, 3, 2, 2).
    """
    filters = []
    for patch, patch_variance in _PATCHES:
        for color, color_variance in _COLORS:
            component = torch.outer(torch.tensor(color), torch.tensor(patch)).float()
            deviation = (patch_variance * color_variance + _LEAST_VARIANCE) ** 0.5
            filters.append(component.view(3, 2, 2) / component.norm() / deviation)
    negatives = [-component_filter for component_filter in filters]
    return torch.stack(filters + negatives)


class _SmallLogits(nn.Linear):
    """Linear layer without bias and with outputs divided by 9, so that the loss is smooth for large learning rates."""

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight) / 9


def _convolution(channels_in: int, channels: int) -> nn.Conv2d:
    """Build a 3 x 3 convolution that is initially the identity in the first channels (Dirac)."""
    convolution = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight[:channels_in])
    return convolution


class _PooledBlock(nn.Module):
    """Convolution and pooling to half the size, then one convolution, or two parallel to a shortcut."""

    def __init__(self, channels_in: int, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.conv1 = _convolution(channels_in, channels)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        if shortcut:
            self.conv3 = _convolution(channels, channels)
            self.bn3 = nn.BatchNorm2d(channels)
        self.shortcut = shortcut

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        halved = F.gelu(self.bn1(F.max_pool2d(self.conv1(inputs), 2)))
        outputs = self.bn2(self.conv2(halved))
        if self.shortcut:
            outputs = halved + self.bn3(self.conv3(F.gelu(outputs)))
        return F.gelu(outputs)


def build_cifarnet(num_classes: int, widths: tuple[int, ...] = (32, 96, 192)) -> nn.Sequential:
    """Build the fast network with new weights, for images of 16 pixels or more.

    Args:
        num_classes: number of logits.
        widths: channels of the blocks; airbench has 64, 256 and 256.

    Example:
        >>> build_cifarnet(num_classes=10)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(3, 24, 2)
    layers["conv1"].load_state_dict({"weight": whitening_filters(), "bias": torch.zeros(24)})
    layers["gelu"] = nn.GELU()
    channels_in = 24
    for number, width in enumerate(widths, 1):
        layers[f"layer{number}"] = _PooledBlock(channels_in, width, shortcut=number > 1)
        channels_in = width
    layers["avgpool"] = nn.AdaptiveMaxPool2d(1)
    layers["flatten"] = nn.Flatten(1)
    layers["fc"] = _SmallLogits(channels_in, num_classes, bias=False)
    return nn.Sequential(layers)
