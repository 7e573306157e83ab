"""A network for images of about 32 pixels that learns fast: that of airbench (Jordan, 2024), narrower and deeper.

Its first layer whitens patches of 2 x 2 pixels, its convolutions begin as the identity, its last two blocks have a
residual connection, as airbench's larger network has them, and its logits are small.
airbench computes the filters of the first layer from the training set. Here they are those of photographs in general,
whose pixels and channels correlate much alike, so the network begins the same for any data.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["build_cifarnet", "whitening_filters"]

# The principal components of photographs of 32 pixels, and their variances where each channel's is 1.
_PATCHES = (((1, 1, 1, 1), 3.74), ((1, -1, 1, -1), 0.12), ((1, 1, -1, -1), 0.12), ((1, -1, -1, 1), 0.02))
_COLOURS = (((1, 1, 1), 2.8), ((1, 0, -1), 0.17), ((1, -2, 1), 0.036))
_LEAST_VARIANCE = 0.01


def whitening_filters() -> Tensor:
    """Filters whose outputs for normalised photographs hardly correlate, and vary about equally.

    The mean of 2 x 2 pixels and their differences across, down and diagonally, for each of brightness, red against
    blue, and green against both; each divided by its standard deviation; then the negatives of all.

    Returns:
        float32 of shape (24, 3, 2, 2).
    """
    filters = []
    for patch, patch_variance in _PATCHES:
        for colour, colour_variance in _COLOURS:
            component = torch.outer(torch.tensor(colour), torch.tensor(patch)).float()
            deviation = (patch_variance * colour_variance + _LEAST_VARIANCE) ** 0.5
            filters.append(component.view(3, 2, 2) / component.norm() / deviation)
    return torch.stack([*filters, *(-each for each in filters)])


class _SmallLogits(nn.Linear):
    """A linear layer without bias, whose outputs are divided by 9: the loss is smooth for large learning rates."""

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight) / 9


def _convolution(channels_in: int, channels: int) -> nn.Conv2d:
    """3 x 3, which at first passes its inputs on in the first channels (Dirac)."""
    convolution = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight[:channels_in])
    return convolution


class _Block(nn.Module):
    """A convolution at the size of the inputs, then one at half of it or, beside a shortcut, two."""

    def __init__(self, channels_in: int, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(channels_in, channels), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _convolution(channels, channels), nn.BatchNorm2d(channels)
        if shortcut:
            self.conv3, self.bn3 = _convolution(channels, channels), nn.BatchNorm2d(channels)
        self.shortcut = shortcut

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        halved = F.gelu(self.bn1(F.max_pool2d(self.conv1(inputs), 2)))
        outputs = self.bn2(self.conv2(halved))
        if self.shortcut:
            outputs = halved + self.bn3(self.conv3(F.gelu(outputs)))
        return F.gelu(outputs)


def build_cifarnet(num_classes: int, widths: tuple[int, ...] = (32, 96, 192)) -> nn.Sequential:
    """The network with new weights; images are of 16 pixels or more.

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
        layers[f"layer{number}"] = _Block(channels_in, width, shortcut=number > 1)
        channels_in = width
    layers["avgpool"] = nn.AdaptiveMaxPool2d(1)
    layers["flatten"] = nn.Flatten(1)
    layers["fc"] = _SmallLogits(channels_in, num_classes, bias=False)
    return nn.Sequential(layers)
