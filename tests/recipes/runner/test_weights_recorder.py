"""Hashes of weights."""

import pytest
import torch
from torch import Tensor

from recipes.cli.weights_recorder import weights_hash


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_every_bit_of_every_type_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3).to(dtype)
    changed = tensor.clone()
    changed.view(torch.uint8).flatten()[-1] ^= 1
    assert weights_hash({"w": tensor}) == weights_hash({"w": tensor.T.contiguous().T})
    assert weights_hash({"w": tensor}) != weights_hash({"w": changed})
    assert weights_hash({"w": tensor}) != weights_hash({"w": tensor.reshape(3, 2)})
    assert weights_hash({"w": tensor}) != weights_hash({"v": tensor})


def test_a_conjugated_view_has_the_hash_of_its_values() -> None:
    value = torch.tensor([1 + 2j])
    assert weights_hash({"w": value.conj()}) == weights_hash({"w": torch.tensor([1 - 2j])})


def test_weights_of_which_a_rank_holds_a_part_have_no_hash() -> None:
    class Part(Tensor):
        """As torch's DTensor."""

    assert weights_hash({"w": torch.ones(2).as_subclass(Part)}) is None
