"""Exact sums of floating-point numbers: equal to the bit in any order, so on any number of ranks.

A float32 is a whole number times a power of two. Written as the digits of a long whole number, in int64, numbers are
added without rounding: with ``+``, ``sum``, an all-reduce, or the ``dist_reduce_fx="sum"`` of torchmetrics.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DIGITS", "from_whole_numbers", "to_whole_numbers"]

_BITS = 16
DIGITS = 17
"""Whole numbers that stand for a floating-point number: 16 digits of base 2**16, and one if it is not finite."""


def to_whole_numbers(values: Tensor) -> Tensor:
    """The whole numbers of each value, int64 of shape (\\*values.shape, 17).

    2**23 values can be added up before an int64 overflows. The device is not waited for, and needs no float64.

    Args:
        values: of any shape and floating-point type, finite or not. Of float64 the first 48 bits count.

    Example:
        >>> values = torch.tensor([1e30, 1.0, -1e30, 1e-30])
        >>> values.sum().item(), from_whole_numbers(to_whole_numbers(values).sum(0).tolist())
        (1.0000000031710769e-30, 1.0)
    """
    rounded = values.detach().float()
    whole = _digits(rounded)
    return whole + _digits((values.detach() - rounded).float()) if values.dtype == torch.float64 else whole


def _digits(values: Tensor) -> Tensor:
    bits = values.view(torch.int32).long()
    exponent = (bits >> 23) & 255
    # The leading bit of the 24 is not stored, and that of numbers below 2**-126 is 0.
    mantissa = (bits & (2**23 - 1)) | ((exponent > 0).long() << 23)
    power = exponent.clamp(min=1) - 1
    number = (mantissa << (power % _BITS)) * (1 - 2 * (bits < 0).long())
    is_finite = exponent < 255
    number = torch.where(is_finite, number, 1)
    place = torch.where(is_finite, power // _BITS, DIGITS - 1)
    return number.unsqueeze(-1) * (place.unsqueeze(-1) == torch.arange(DIGITS, device=values.device))


def from_whole_numbers(whole: Sequence[int]) -> float:
    """The number that a sum of `to_whole_numbers` stands for, rounded once; NaN if a value was NaN or infinite.

    Args:
        whole: 17 integers, such as a tensor's ``tolist()``.
    """
    *digits, not_finite = whole
    total = sum(digit << (_BITS * place) for place, digit in enumerate(digits))
    return float("nan") if not_finite else total / 2**149
