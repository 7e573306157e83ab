"""Test-time augmentation: an image is classified by the mean of the probabilities of several views of it.

The mean of softmax outputs over ten views is that of Krizhevsky et al. (2012). The views are the network's inputs,
shifted and mirrored: batch-wise on the device, without random numbers, so the result is the same on any split.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.errors import UserError

__all__ = ["TTA", "check_views", "mean_log_probabilities", "views"]

TTA = Literal["none", "flip", "crops"]


def views(images: Tensor, tta: TTA, flip: bool = True) -> Iterator[Tensor]:
    """The views of a batch of images, of the same shape: the images themselves come first.

    "flip" adds the mirror images. "crops" are the centre and the four corners of the images after reflection padding
    with a 32nd of their side, one pixel at least, and the mirror images of these five: shifts as small as that keep the
    object in a view, whose scale and size are those of training.

    Args:
        images: of shape (batch, channels, height, width).
        flip: False mirrors none.

    Example:
        >>> [len(list(views(torch.zeros(1, 3, 32, 32), tta, flip=True))) for tta in ("none", "flip", "crops")]
        [1, 2, 10]
    """
    crops = [images]
    if tta == "crops":
        height, width = images.shape[-2:]
        pad = max(1, min(height, width) // 32)
        padded = F.pad(images, (pad, pad, pad, pad), mode="reflect")
        corners = [(top, left) for top in (0, 2 * pad) for left in (0, 2 * pad)]
        crops += [padded[..., top : top + height, left : left + width] for top, left in corners]
    for crop in crops:
        yield crop
        if flip and tta != "none":
            yield crop.flip(-1)


def check_views(inputs: Tensor, tta: TTA, flip: bool, title: str) -> None:
    """Refuse inputs of which there are no such views.

    Args:
        flip: whether the images may be mirrored.
        title: what the images are, in messages.

    Raises:
        UserError: the inputs are no images, or "flip" is to mirror those that may not be.
    """
    if inputs.dim() != 4:
        found = tuple(inputs.shape)
        raise UserError(
            f"tta={tta!r} needs images of shape (batch, channels, height, width), found {found}; pass tta='none'"
        )
    if tta == "flip" and not flip:
        raise UserError(f"tta='flip' mirrors images, and a mirror image of {title} is of no class; pass tta='crops'")


def mean_log_probabilities(network: Callable[[Tensor], Tensor], images: Tensor, tta: TTA, flip: bool = True) -> Tensor:
    """The logarithms of the mean probabilities over the views of each image, float32 of shape (batch, classes).

    The network gets one view of the batch after the other, so it takes no more memory than one.

    Args:
        network: maps images to logits of shape (batch, classes).
        images: of shape (batch, channels, height, width).
        flip: as of `views`.
    """
    logs = torch.stack([network(view).float().log_softmax(1) for view in views(images, tta, flip)])
    # The mean in this form has no probability that is rounded to 0, whose loss would be infinite.
    return logs.logsumexp(0) - math.log(len(logs))
