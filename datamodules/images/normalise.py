"""Normalises uint8 pixels to the float inputs of a network."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from datamodules.errors import UserError


class Normalise(nn.Module):
    """Normalisation of uint8 images of shape (batch, channels, height, width) to float32 with about mean 0 and std 1.

    The module has no parameters and saves nothing. It does not resize images.

    Args:
        mean: mean of each channel, of pixels from 0 to 1.
        std: standard deviation of each channel.

    Example:
        >>> Normalise([0.5], [0.25])(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).round()
        tensor([[[[-2.,  2.]]]])
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean = tuple(mean)
        self.std = tuple(std)
        means = torch.tensor(self.mean).view(-1, 1, 1)
        stds = torch.tensor(self.std).view(-1, 1, 1)
        self.register_buffer("scale", 1 / (255 * stds), persistent=False)
        self.register_buffer("shift", -means / stds, persistent=False)
        # A tensor without dimensions counts as a number, so it need not be on the device of the images.
        self._offset = torch.tensor(-self.mean[0] / self.std[0])

    def forward(self, images: Tensor) -> Tensor:
        if len(self.mean) == 1:
            # Computes x / (255 std) - mean / std in one pass over the memory.
            return torch.add(self._offset, images, alpha=1 / (255 * self.std[0]))
        return (images * self.scale).add_(self.shift)


@lru_cache(maxsize=4)
def normaliser(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> Normalise:
    """Return the cached `Normalise` of these statistics on a device."""
    # A validation in inference mode may be the first caller. Its tensors could not be used in training later.
    with torch.inference_mode(False):
        return Normalise(mean, std).to(device)


def check_statistics(name: str, numbers: Sequence[float] | None, least: float) -> list[float] | None:
    """Check a parameter with a number for each of three channels, and return it as a list, as it is saved.

    Raises:
        UserError: there are not three numbers, or they are not from `least` to 1.
    """
    if numbers is None:
        return None
    if len(numbers) != 3 or not all(least <= number <= 1 for number in numbers):
        raise UserError(
            "expected three numbers from 0 to 1, such as [0.485, 0.456, 0.406]", setting=name, value=numbers
        )
    return list(numbers)
