"""Random numbers as pure functions of ``(seed, purpose, epoch, index)``, equal on every device.

A stateful generator would give a sample other numbers if batches are split over more processes or a run resumes. The
hash function is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), in wrapping int64 arithmetic. Integer
arithmetic is exact, so CPU and GPU draw the same bits.
"""

import hashlib
import operator
import random

import numpy as np
import torch
from torch import Tensor


def signed(value: int, bits: int = 64) -> int:
    """Return the signed integer with the same lowest `bits` bits.

    Example:
        >>> signed(0xFFFFFFFF, bits=32)
        -1
    """
    value &= (1 << bits) - 1
    is_negative = value >> (bits - 1)
    return value - (1 << bits) if is_negative else value


WITHOUT_FLOAT64 = ("mps",)
"""Types of devices without float64, on which a float64 tensor raises a TypeError: Apple's GPUs."""


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has no float64.

    >>> widest_float(torch.device("mps")), widest_float(torch.device("cpu"))
    (torch.float32, torch.float64)
    """
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


_GOLDEN = signed(0x9E3779B97F4A7C15)
_MIX_1 = signed(0xBF58476D1CE4E5B9)
_MIX_2 = signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 to int64. The masks clear the copies of the sign bit that torch shifts in."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def derive_seed(seed: int, *address: int | str) -> int:
    """Return a seed for an ordinary generator (torch, NumPy, Python) at an address.

    Args:
        seed: the run's seed.
        address: purpose and position of the numbers, such as ``("dropout", rank, update, micro_batch)``.

    Returns:
        A non-negative integer below 2**63, the same on every machine and Python version.
    """
    components = []
    for component in (seed, *address):
        if isinstance(component, str):
            components.append(f"str:{component}")
        else:
            # `operator.index`, because equal integers of NumPy, torch and Python must give equal seeds.
            components.append(f"int:{operator.index(component)}")
    # A separator that no purpose contains, so that ("a", "b") and ("ab",) are different addresses.
    text = "\x1f".join(components)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derive_seed_at(seed: int, *numbers: int) -> int:
    """Return a seed from a derived seed and integers, for thousands of seeds per second.

    This mixes integers in 1 microsecond; `derive_seed` hashes text in 10 microseconds.

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
    """Return 64 random bits for each index and draw.

    Args:
        index: sample numbers, int64 of shape (n,), on the device of the result.
        draws: number of random numbers per sample.

    Returns:
        int64 of shape (n, draws).
    """
    key = signed(derive_seed(seed, purpose, epoch) << 1)
    column = torch.arange(1, draws + 1, device=index.device, dtype=torch.int64) * _GOLDEN
    return _mix(_mix(index.to(torch.int64) * _GOLDEN + key).unsqueeze(1) + column)


def uniform(seed: int, purpose: str, epoch: int, index: Tensor, draws: int = 1) -> Tensor:
    """Return uniform float32 numbers in [0, 1) of shape (n, draws). The arguments are the same as of `random_bits`."""
    # 24 bits are exact in float32. With more bits a number could be rounded up to 1.
    bits = (random_bits(seed, purpose, epoch, index, draws) >> 40) & ((1 << 24) - 1)
    return bits.to(torch.float32) * (1.0 / (1 << 24))


def permutation(n: int, seed: int, purpose: str, epoch: int = 0) -> Tensor:
    """Return the numbers 0..n-1 in random order, sorted by random bits, int64 of shape (n,)."""
    # Not torch.randperm, whose algorithm depends on the device and may change with the version.
    return torch.argsort(random_bits(seed, purpose, epoch, torch.arange(n)).squeeze(1), stable=True)


def alternating_flips(seed: int, epoch: int, index: Tensor) -> Tensor:
    """Return which samples are mirrored: a random half in even epochs, and the other half in odd epochs.

    Two successive epochs contain both forms of each sample, as in airbench (Jordan, 2024).

    Args:
        index: sample numbers, int64 of shape (n,).

    Returns:
        bool of shape (n,).
    """
    return ((random_bits(seed, "flip", 0, index).squeeze(1) + epoch) & 1).bool()


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of Python, NumPy, torch and one accelerator, in about 8 microseconds.

    Example:
        >>> seed_generators(5)
        >>> first = torch.rand(2)
        >>> seed_generators(5)
        >>> bool((first == torch.rand(2)).all())
        True
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not `torch.manual_seed`, which takes 100 microseconds because it checks every kind of device.
    # The state of a CUDA generator is on the host, so seeding it does not synchronize.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
