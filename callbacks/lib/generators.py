"""Code that draws random numbers of which nothing after it notices."""

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["keep_generators", "seed_numpy", "untouched_generators"]

_KEYS = 624
"""Numbers of 32 bits in the state of a Mersenne Twister; the place among them follows."""

_without_normal = b""
"""The state of NumPy's global generator when it was last known to hold no normal number for the next draw."""


def _numpy_bytes() -> bytes:
    """The state of NumPy's global generator in 1 us, without that number; nothing where it is no Mersenne Twister."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 4 * (_KEYS + 1))


def seed_numpy(seed: int) -> None:
    """Seeds NumPy's global generator; the next `keep_generators` is faster for it."""
    global _without_normal
    np.random.seed(seed)
    _without_normal = _numpy_bytes()


def _keep_numpy() -> Callable[[], None]:
    # `get_state` takes 30 us, and 60 between steps; only it tells whether there is a normal number. None can be added
    # without a change of the bytes, since they are drawn in pairs.
    global _without_normal
    found = _numpy_bytes()
    state: Any = None
    if not found or found != _without_normal:
        state = np.random.get_state(legacy=False)
        _without_normal = b"" if state["has_gauss"] else found

    def restore() -> None:
        key = np.frombuffer(found, np.uint32)
        np.random.set_state(state or ("MT19937", key[:_KEYS], int(key[_KEYS]), 0, 0.0))

    return restore


def keep_generators(device: torch.device) -> Callable[[], None]:
    """Notes the state of Python's, NumPy's and torch's global generators, of the CPU and one device.

    Returns:
        How to put them back.
    """
    python, restore_numpy, cpu = random.getstate(), _keep_numpy(), torch.default_generator.get_state()
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    there = accelerator.get_rng_state(device) if accelerator is not None else None

    def restore() -> None:
        random.setstate(python)
        restore_numpy()
        torch.default_generator.set_state(cpu)
        if accelerator is not None:
            accelerator.set_rng_state(there, device)

    return restore


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Put Python's, NumPy's and torch's global generators back at the end, also after an exception.

    Lightning's ``isolate_rng`` does not after an exception.
    """
    restore = keep_generators(torch.device("cpu"))
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        restore()
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
