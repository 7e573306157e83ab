"""Bytes of pixels to the floats that networks take."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from datamodules.errors import UserError


class Normalise(nn.Module):
    """Maps uint8 images of shape (batch, channels, height, width) to floats of about mean 0 and standard deviation 1.

    It has no parameters and nothing to save. It does not resize: the images have the size of the network's inputs.

    Args:
        mean: of the pixels of each channel, which are from 0 to 1; one number for each channel.
        std: their standard deviations.

    Example:
        >>> Normalise([0.5], [0.25])(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).round()
        tensor([[[[-2.,  2.]]]])
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.std = tuple(mean), tuple(std)
        means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        self.register_buffer("scale", 1 / (255 * stds), persistent=False)
        self.register_buffer("shift", -means / stds, persistent=False)
        # Without a dimension it is a number, whatever device the images are on.
        self._offset = torch.tensor(-self.mean[0] / self.std[0])

    def forward(self, images: Tensor) -> Tensor:
        if len(self.mean) == 1:
            # x / (255 std) - mean / std in one pass over the memory.
            return torch.add(self._offset, images, alpha=1 / (255 * self.std[0]))
        return (images * self.scale).add_(self.shift)


@lru_cache(maxsize=4)
def normaliser(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> Normalise:
    """The `Normalise` of these statistics on a device, made once."""
    # It outlives the validation, in inference mode, that may be the first to need it.
    with torch.inference_mode(False):
        return Normalise(mean, std).to(device)


def check_statistics(name: str, numbers: Sequence[float] | None, least: float) -> list[float] | None:
    """A parameter with a number for each of three channels, as it is saved.

    Raises:
        UserError: they are not three, or not from `least` to 1.
    """
    if numbers is None:
        return None
    if len(numbers) != 3 or not all(least <= number <= 1 for number in numbers):
        raise UserError(f"{name}={numbers}: expected three numbers from 0 to 1, such as [0.485, 0.456, 0.406]")
    return list(numbers)
