"""Code that draws random numbers of which nothing after it notices."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["keep_generators", "untouched_generators"]


def keep_generators(device: torch.device) -> Callable[[], None]:
    """Notes the state of Python's, NumPy's and torch's global generators, of the CPU and one device; in 20 us.

    Returns:
        How to put them back.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    there = accelerator.get_rng_state(device) if accelerator is not None else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
        if accelerator is not None:
            accelerator.set_rng_state(there, device)

    return restore


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Put Python's, NumPy's and torch's global generators back at the end, also after an exception.

    Lightning's ``isolate_rng`` does not after an exception.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
