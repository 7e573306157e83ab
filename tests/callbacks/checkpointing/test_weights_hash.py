"""Hashes of weights."""

import pytest
import torch
from torch import Tensor, nn

from callbacks.checkpointing.weights_hash import first_difference, weights_hash


def _weights() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_every_bit_of_every_type_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3).to(dtype)
    changed = tensor.clone()
    changed.view(torch.uint8).flatten()[-1] ^= 1
    assert weights_hash({"w": tensor}) == weights_hash({"w": tensor.T.contiguous().T})
    assert weights_hash({"w": tensor}) != weights_hash({"w": changed})
    assert weights_hash({"w": tensor}) != weights_hash({"w": tensor.reshape(3, 2)})
    assert weights_hash({"w": tensor}) != weights_hash({"v": tensor})


def test_the_first_tensor_that_differs_is_named_with_how_much() -> None:
    one, other = _weights(), _weights()
    assert first_difference(one, other) is None
    other["1.weight"] = other["1.weight"].clone()
    other["1.weight"][2] += 0.25
    other["1.running_mean"] = other["1.running_mean"] + 1
    assert first_difference(one, other) == "1.weight, in 1 of 4 elements, by up to 0.25"
    assert first_difference(one, {**_weights(), "2.bias": torch.ones(1)}) == "the entries are others: 2.bias"
    one["0.bias"] = one["0.bias"].double()
    assert first_difference(one, _weights()) == "0.bias is torch.float64 (4,), and was torch.float32 (4,)"


def test_a_conjugated_view_has_the_hash_of_its_values() -> None:
    value = torch.tensor([1 + 2j])
    assert weights_hash({"w": value.conj()}) == weights_hash({"w": torch.tensor([1 - 2j])})


def test_weights_of_which_a_rank_holds_a_part_have_no_hash() -> None:
    class Part(Tensor):
        """As torch's DTensor."""

    assert weights_hash({"w": torch.ones(2).as_subclass(Part)}) is None
