"""`recipes.dropout.Dropout`: masks of the rate, independent, repeated by a seed, and torch's own elsewhere."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recipes.compilation import compile_network
from recipes.dropout import Dropout


def masks(p: float, seed: int = 1, rows: int = 512, elements: int = 1024) -> Tensor:
    """Standardized: mean 0 and variance 1 for each element."""
    torch.manual_seed(seed)
    zeros = (Dropout(p)(torch.ones(rows, elements)) == 0).double()
    return (zeros - p) / math.sqrt(p * (1 - p))


def z_of_sum(values: Tensor) -> float:
    return float(values.sum() / math.sqrt(values.numel()))


@pytest.mark.parametrize("p", [0.02, 0.3])
def test_the_elements_of_a_mask_are_independent(p: float) -> None:
    mask, other = masks(p), masks(p, seed=2)
    found = {"rate": z_of_sum(mask), "seed": z_of_sum(mask * other)}
    for lag in (1, 2, 3, 7, 8, 64, 256):
        found[f"elements {lag}"] = z_of_sum(mask[:, lag:] * mask[:, :-lag])
        found[f"rows {lag}"] = z_of_sum(mask[lag:] * mask[:-lag])
    for dim, name in enumerate(("rows", "elements")):
        sums = mask.sum(dim) / math.sqrt(mask.shape[dim])
        found[f"variance over {name}"] = z_of_sum(sums**2 - 1) / math.sqrt(2)
    if p >= 0.1:  # Products of rarer ones are far from normal.
        # Four corners of a rectangle: keys of rows and columns that were only added would show here.
        found["corners"] = z_of_sum(mask[::2, ::2] * mask[1::2, ::2] * mask[::2, 1::2] * mask[1::2, 1::2])
        found["corners of seeds"] = z_of_sum(mask[:, ::2] * mask[:, 1::2] * other[:, ::2] * other[:, 1::2])
    # Twenty numbers in each case: the largest of as many normal ones is beyond 4.2 once in 350 times.
    assert {name: z for name, z in found.items() if not abs(z) < 4.2} == {}


def test_a_seed_repeats_a_mask_in_every_type() -> None:
    inputs = torch.randn(3, 8, 4, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    expected = Dropout(0.3)(inputs)
    expected.sum().backward()
    assert inputs.grad is not None
    assert sorted(inputs.grad.unique().tolist()) == [0, 1 / 0.7]
    assert torch.equal(expected, inputs * inputs.grad)
    for other in (inputs.detach().to(memory_format=torch.channels_last), inputs.detach().bfloat16()):
        torch.manual_seed(1)
        found = Dropout(0.3, inplace=True)(other)
        assert found is other
        assert torch.equal(found == 0, expected == 0)
    assert not torch.equal(Dropout(0.3)(inputs) == 0, expected == 0), "each call draws anew"
    assert Dropout(0.3)(inputs[:0]).shape == (0, 8, 4, 4)


def test_where_it_has_no_mask_of_its_own_it_is_nn_dropout() -> None:
    ones = torch.ones(4, 6)
    for p, inputs, training in ((0.3, ones, False), (0.0, ones, True), (1.0, ones, True), (0.3, ones[0, 0], True)):
        drawn = []
        for kind in (Dropout, nn.Dropout):
            torch.manual_seed(1)
            drawn.append(kind(p).train(training)(inputs))
        assert torch.equal(*drawn)
    assert repr(Dropout(0.3)) == repr(nn.Dropout(0.3))


def test_recomputed_activations_draw_the_same_masks() -> None:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(6, 6), Dropout(0.5), nn.Linear(6, 6), Dropout(0.5))
    inputs = torch.randn(4, 6)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        network.zero_grad()
        torch.manual_seed(5)
        run(inputs).square().sum().backward()
        return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]

    expected = gradients(network)
    assert len(expected) == 4
    recomputed = gradients(lambda x: checkpoint(network, x, use_reentrant=False))
    compile_network(network, backend="aot_eager")
    for found in (recomputed, gradients(network)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
