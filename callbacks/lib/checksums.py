"""Checksums of tensors: of the weights that the ranks compare, and of the state that a checkpoint does not hold."""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

# Elements of 8 bytes are read as halves. As one int64, the bits of 2.0 and 4.0 differ by 2**52, so that exchanging them
# could leave the weighted sum modulo 2**64 unchanged.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_BLOCK = 1 << 20


@lru_cache(maxsize=2)
def _odd_numbers(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _BLOCK, 2, device=device)


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, read as integers, times 1, 3, 5, ... modulo 2**64.

    It changes with any single bit, if two elements of up to 4 bytes change places, and between 0.0 and -0.0. Two NaN
    with the same bits are equal.

    Example:
        >>> a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
        >>> bool(checksum(a) == checksum(a.clone())), bool(checksum(a) == checksum(b))
        (True, False)
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    # As integers shorter than int64, and in blocks: the products then need 16 MiB, not four times the largest tensor.
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, block in enumerate(bits.split(_BLOCK)):
        weighted = (block * _odd_numbers(tensor.device)[: len(block)]).sum()
        total += weighted + 2 * _BLOCK * number * block.sum(dtype=torch.int64)
    return total


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the checksum of each tensor, int64 of shape (tensors,), on one device."""
    return torch.stack([checksum(tensor).to(device) for tensor in tensors])
