"""Generators are put back to the bit, also NumPy's, of which a state that is known is not read again."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from callbacks.lib.generators import keep_generators
from callbacks.seed_control import seed_generators

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "uniform": np.random.rand,
    "one of a pair of normal numbers": np.random.randn,
    "a pair": lambda: np.random.randn(2),
    "a seed": lambda: seed_generators(7),
    "NumPy's seed": lambda: np.random.seed(9),
}


def draw() -> list[float]:
    return [random.random(), *np.random.randn(3), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("then", DRAWS)
def test_whatever_was_drawn_before_and_after_the_same_numbers_follow(first: str, then: str) -> None:
    seed_generators(1)
    for _ in range(3):
        DRAWS[first]()
        keep_generators(torch.device("cpu"))
        DRAWS[then]()
        restore = keep_generators(torch.device("cpu"))
        expected = draw()
        for _ in range(2):
            restore()
            assert draw() == expected


def test_another_kind_of_generator_is_put_back() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        restore = keep_generators(torch.device("cpu"))
        expected = draw()
        restore()
        assert draw() == expected
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
