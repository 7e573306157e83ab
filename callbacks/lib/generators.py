"""Code that draws random numbers of which nothing after it notices."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["untouched_generators"]


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Put Python's, NumPy's and torch's global generators back at the end, also after an exception.

    Lightning's ``isolate_rng`` does not after an exception.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
