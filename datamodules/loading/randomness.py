"""Random numbers that are pure functions of their address, ``(seed, purpose, epoch, index)``, on every device.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), in wrapping int64 arithmetic.
"""

import hashlib
import operator
import random

import numpy as np
import torch
from torch import Tensor


def signed(value: int, bits: int = 64) -> int:
    """The signed integer with the same bits.

    Example:
        >>> signed(0xFFFFFFFF, bits=32)
        -1
    """
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = signed(0x9E3779B97F4A7C15)
_MIX_1 = signed(0xBF58476D1CE4E5B9)
_MIX_2 = signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser. Torch shifts signed integers arithmetically, hence the masks."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def derive_seed(seed: int, *address: int | str) -> int:
    """A seed for an ordinary generator (torch, NumPy, Python) at an address.

    Args:
        seed: the run's seed.
        address: the purpose of the numbers and their place, such as ``("dropout", rank, update, micro_batch)``.

    Returns:
        A non-negative integer below 2**63, the same on every machine and Python version.
    """
    # NumPy's and torch's integers print under other type names: the same number has to give the same seed.
    parts = (f"str:{part}" if isinstance(part, str) else f"int:{operator.index(part)}" for part in (seed, *address))
    text = "\x1f".join(parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def derive_seed_at(seed: int, *numbers: int) -> int:
    """A further seed below a derived one, for places that need thousands of them a second.

    `derive_seed` hashes text, in 10 microseconds; this mixes integers, in 1.

    Example:
        >>> key = derive_seed(1, "step", 0)
        >>> derive_seed_at(key, 5, 0) == derive_seed_at(key, 5, 0) != derive_seed_at(key, 0, 5)
        True
    """
    mask = (1 << 64) - 1
    for number in numbers:
        seed = (seed + (number + 1) * _GOLDEN) & mask
        seed = ((seed ^ (seed >> 30)) * _MIX_1) & mask
        seed = ((seed ^ (seed >> 27)) * _MIX_2) & mask
        seed ^= seed >> 31
    return seed >> 1


def random_bits(seed: int, purpose: str, epoch: int, index: Tensor, draws: int = 1) -> Tensor:
    """64 random bits for each index and draw.

    Args:
        index: sample numbers, int64 of shape (n,); the result lives on their device.
        draws: how many numbers each sample needs.

    Returns:
        int64 of shape (n, draws).
    """
    key = signed(derive_seed(seed, purpose, epoch) << 1)
    column = torch.arange(1, draws + 1, device=index.device, dtype=torch.int64) * _GOLDEN
    return _mix(_mix(index.to(torch.int64) * _GOLDEN + key).unsqueeze(1) + column)


def uniform(seed: int, purpose: str, epoch: int, index: Tensor, draws: int = 1) -> Tensor:
    """Uniform float32 numbers in [0, 1), of shape (n, draws); 24 bits each. Arguments as in `random_bits`."""
    bits = (random_bits(seed, purpose, epoch, index, draws) >> 40) & ((1 << 24) - 1)
    return bits.to(torch.float32) * (1.0 / (1 << 24))


def permutation(n: int, seed: int, purpose: str, epoch: int = 0) -> Tensor:
    """The numbers 0..n-1 in random order, int64 of shape (n,): sorted by the random bits of each."""
    return torch.argsort(random_bits(seed, purpose, epoch, torch.arange(n)).squeeze(1), stable=True)


def alternating_flips(seed: int, epoch: int, index: Tensor) -> Tensor:
    """Which samples are mirrored: a random half in the even epochs, and the others in the odd ones.

    Two epochs show both forms of each sample, as in airbench (Jordan, 2024).

    Args:
        index: sample numbers, int64 of shape (n,).

    Returns:
        bool of shape (n,).
    """
    return ((random_bits(seed, "flip", 0, index).squeeze(1) + epoch) & 1).bool()


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seeds the global generators of Python, NumPy, torch and one accelerator, in about 8 microseconds.

    Example:
        >>> seed_generators(5)
        >>> first = torch.rand(2)
        >>> seed_generators(5)
        >>> bool((first == torch.rand(2)).all())
        True
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not `torch.manual_seed`, which takes 100 microseconds, since it asks for every kind of device that there might be.
    # A CUDA generator's state lives on the host.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
