"""A recurrent layer as one operation has torch's outputs to the bit, and torch's gradients."""

import pytest
import torch
from torch import Tensor, nn

from callbacks.lib.recurrent_op import recurrent_layer


def _loss(outputs: list[Tensor]) -> Tensor:
    return sum((output.float() ** power).sum() for power, output in enumerate(outputs, 2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 0.02)])
def test_outputs_are_torchs_and_gradients_too(kind, bias: bool, dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    layer = kind(4, 6, batch_first=True, bias=bias).to(dtype)
    data = torch.randn(3, 7, 4, dtype=dtype, requires_grad=True)
    states = [torch.randn(1, 3, 6, dtype=dtype, requires_grad=True) for _ in range(2 if kind is nn.LSTM else 1)]
    weights = list(layer.parameters())
    outputs, ends = layer(data, tuple(states) if kind is nn.LSTM else states[0])
    expected = [outputs, *(ends if kind is nn.LSTM else [ends])]
    found = recurrent_layer(kind.__name__, data, states, weights)
    assert all(map(torch.equal, found, expected))
    inputs = [data, *states, *weights]
    pairs = zip(torch.autograd.grad(_loss(found), inputs), torch.autograd.grad(_loss(expected), inputs), strict=True)
    for mine, torchs in pairs:
        assert float((mine - torchs).abs().max() / torchs.abs().max()) < tolerance


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_the_operation_is_what_torch_asks_of_one_in_a_graph(kind):
    layer = kind(4, 6, batch_first=True).double()
    states = [torch.randn(1, 3, 6, dtype=torch.float64) for _ in range(2 if kind is nn.LSTM else 1)]
    data = torch.randn(3, 7, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(recurrent_layer, (kind.__name__, data, states, list(layer.parameters())))
