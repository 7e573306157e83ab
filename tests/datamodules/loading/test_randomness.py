import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.loading.randomness import derive_seed, derive_seed_at, permutation, random_bits, uniform

N = 40_000
INDEX = torch.arange(N)


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())).double())[0, 1])


def test_the_bits_never_change():
    # A changed number would change every run's order and augmentation: old checkpoints would resume into another one.
    assert (derive_seed(1, "dropout", 0), derive_seed_at(1, 5, 0)) == (2769331655605917664, 9167171739299799523)
    bits = random_bits(1, "shift", 3, torch.tensor([0, 7, 59_999]), draws=2)
    assert bits.tolist() == [
        [-2871751451350818404, 6433101697599209529],
        [-6154156990411199505, -3066286041008562945],
        [5005449901780531981, 6341179942742999052],
    ]


@settings(max_examples=50)
@given(
    index=st.lists(st.integers(0, 10**6), min_size=1, max_size=70),
    seed=st.integers(-(2**63), 2**63),
    epoch=st.integers(0, 10_000),
    draws=st.integers(1, 5),
)
def test_a_number_does_not_depend_on_which_others_are_asked_for(index, seed, epoch, draws):
    together = torch.tensor(index)
    for function in (random_bits, uniform):
        numbers = function(seed, "p", epoch, together, draws)
        alone = torch.cat([function(seed, "p", epoch, together[i : i + 1], draws) for i in range(len(index))])
        assert torch.equal(numbers, alone)
        assert torch.equal(numbers.flip(0), function(seed, "p", epoch, together.flip(0), draws))


def test_every_part_of_the_address_counts():
    base = uniform(1, "p", 0, INDEX, 2)
    others = {
        "seed": uniform(2, "p", 0, INDEX, 2),
        "negative seed": uniform(-1, "p", 0, INDEX, 2),
        "purpose": uniform(1, "q", 0, INDEX, 2),
        "epoch": uniform(1, "p", 1, INDEX, 2),
        "index": uniform(1, "p", 0, INDEX + 1, 2),
        "draw": base.flip(1),
    }
    for name, other in others.items():
        assert abs(_correlation(base, other)) < 5 / math.sqrt(2 * N), name


def test_a_seed_is_the_same_for_equal_integers_of_any_type():
    expected = derive_seed(1, "dropout", 3)
    assert derive_seed(np.int64(1), "dropout", torch.tensor(3)) == expected
    assert derive_seed(1, "dropout", "3") != expected


def test_derived_seeds_do_not_collide():
    seeds = {
        derive_seed(s, "p", *address) for s in range(40) for address in ((i, j) for i in range(40) for j in (0, 1))
    }
    assert len(seeds) == 3_200
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))
    assert derive_seed(1, "ab", "c") != derive_seed(1, "a", "bc")
    assert derive_seed(1, 23) != derive_seed(12, 3)


@settings(max_examples=30)
@given(n=st.integers(0, 500), seed=st.integers(0, 2**40), epoch=st.integers(0, 1_000))
def test_a_permutation_holds_every_number_once(n, seed, epoch):
    order = permutation(n, seed, "order", epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert torch.equal(order, permutation(n, seed, "order", epoch))


@pytest.mark.cuda
def test_a_gpu_gives_the_same_bits():
    for function in (random_bits, uniform):
        assert torch.equal(function(1, "p", 2, INDEX.cuda(), 4).cpu(), function(1, "p", 2, INDEX, 4))
