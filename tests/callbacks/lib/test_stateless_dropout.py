import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from callbacks import StatelessDropout, dropout_factors, sample_keys, sample_noise, stateless_dropout
from callbacks.lib.sample_noise import repeat_noise
from datamodules.errors import UserError

PLACES = torch.arange(6)


@pytest.fixture(autouse=True)
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the noise of")
        yield


def dropped(
    p: float, seed: int = 1, epoch: int = 0, samples: int = 512, elements: int = 1024, **address: int
) -> Tensor:
    """Standardised: mean 0 and variance 1 for each element."""
    keys = sample_keys(seed, epoch, torch.arange(samples))
    zeros = (dropout_factors(keys, elements, p, **address) == 0).double()
    return (zeros - p) / math.sqrt(p * (1 - p))


def z_of_sum(values: Tensor) -> float:
    return float(values.sum() / math.sqrt(values.numel()))


def z_of_variances(sums: Tensor) -> float:
    return float(((sums**2).sum() - len(sums)) / math.sqrt(2 * len(sums)))


@pytest.mark.parametrize("p", [0.02, 0.3])
def test_masks_have_their_rate_and_elements_samples_layers_and_calls_are_independent(p: float):
    mask = dropped(p)
    found = {"rate": z_of_sum(mask)}
    for lag in (1, 2, 3, 7, 8, 64, 256):
        found[f"elements {lag}"] = z_of_sum(mask[:, lag:] * mask[:, :-lag])
        found[f"samples {lag}"] = z_of_sum(mask[lag:] * mask[:-lag])
    others = {
        "layer": {"layer": 1},
        "call": {"call": 1},
        "part": {"part": 1},
        "epoch": {"epoch": 1},
        "seed": {"seed": 2},
    }
    for name, address in others.items():
        found[name] = z_of_sum(mask * dropped(p, **address))
    found["sums of samples"] = z_of_variances(mask.sum(1) / math.sqrt(mask.shape[1]))
    found["sums of elements"] = z_of_variances(mask.sum(0) / math.sqrt(mask.shape[0]))
    if p >= 0.1:  # Products of rarer ones are far from normal.
        # Four corners of a rectangle: keys of rows and columns that were only added would show here.
        found["corners"] = z_of_sum(mask[::2, ::2] * mask[1::2, ::2] * mask[::2, 1::2] * mask[1::2, 1::2])
        layer = dropped(p, layer=1)
        found["corners of layers"] = z_of_sum(mask[:, ::2] * mask[:, 1::2] * layer[:, ::2] * layer[:, 1::2])
    # 23 numbers in each case: the largest of as many normal ones is beyond 4.2 once in 300 times.
    assert {name: z for name, z in found.items() if not abs(z) < 4.2} == {}


def test_one_bit_of_the_address_changes_every_element_with_probability_one_half():
    def mask(seed: int = 5, position: int = 1000, layer: int = 3, call: int = 0) -> Tensor:
        keys = sample_keys(seed, 0, torch.arange(32) * 64 + position)
        return dropout_factors(keys, 512, 0.5, layer, call)

    expected = mask()
    others = {f"seed, bit {bit}": mask(seed=5 ^ 1 << bit) for bit in range(48)}
    others |= {f"position, bit {bit}": mask(position=1000 + (1 << bit)) for bit in range(6)}
    others |= {f"layer, bit {bit}": mask(layer=3 ^ 1 << bit) for bit in range(8)}
    others |= {f"call, bit {bit}": mask(call=1 << bit) for bit in range(8)}
    changed = {name: z_of_sum(2.0 * (expected != other).double() - 1) for name, other in others.items()}
    assert {name: z for name, z in changed.items() if not abs(z) < 4.2} == {}


def test_factors_are_a_function_of_the_address_alone():
    keys = sample_keys(3, 2, torch.tensor([4, 9, 2]))
    whole = dropout_factors(keys, 60, 0.3, layer=2, call=1)
    assert torch.equal(dropout_factors(keys[[2, 0]], 40, 0.3, 2, 1), whole[[2, 0], :40])
    rows = torch.tensor([5, 0, 14, 13])  # Of (sample, time) = (1, 0), (0, 0), (2, 4), (2, 3)
    some = dropout_factors(keys, 12, 0.3, 2, 1, rows=rows, time=5)
    assert torch.equal(some, whole.view(15, 12)[rows])
    assert dropout_factors(keys[:0], 7, 0.3).shape == (0, 7)
    kept = "".join(str(int(factor != 0)) for factor in whole[0, :24])
    assert kept == "001011000011110101101111", "another hash changes what resumed runs draw"
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        other = dropout_factors(keys, 60, 0.3, 2, 1, dtype=dtype)
        assert other.dtype == dtype
        assert torch.equal(other, whole.double().div(whole.max()).mul(1 / 0.7).to(dtype))
    assert (dropout_factors(keys, 60, 1.0) == 0).all()
    assert (dropout_factors(keys, 60, 1e-12) == 1).all()


def test_without_noise_of_samples_it_is_nn_dropout():
    for ours, theirs, shape in [
        (StatelessDropout(0.3), nn.Dropout(0.3), (4, 5)),
        (stateless_dropout(nn.Dropout2d(0.3)), nn.Dropout2d(0.3), (4, 5, 3, 3)),
        (stateless_dropout(nn.Dropout3d(0.3, inplace=True)), nn.Dropout3d(0.3), (4, 5, 3, 3, 2)),
    ]:
        torch.manual_seed(1)
        expected = theirs(torch.ones(shape))
        torch.manual_seed(1)
        assert torch.equal(ours(torch.ones(shape)), expected)
        with sample_noise(1, 0, torch.arange(4)):
            assert torch.equal(ours.eval()(torch.ones(shape)), torch.ones(shape))
        torch.manual_seed(1)
        assert torch.equal(ours.train()(torch.ones(shape)), expected), "after the context as before"
        assert repr(ours).endswith(repr(theirs).split("(")[1].split(",")[0] + f", inplace={ours.inplace})")
        assert isinstance(ours, type(theirs))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout(0.5), (6, 4, 5)),
        (nn.Dropout(0.5), (6, 4, 3, 5)),
        (nn.Dropout(0.5, inplace=True), (6, 7)),
        (nn.Dropout2d(0.5), (6, 9, 2, 3)),
    ],
)
def test_a_sample_loses_the_same_elements_in_any_batch_and_gradients_are_masked_alike(
    layer: nn.Module, shape: tuple[int, ...]
):
    layer = stateless_dropout(copy.deepcopy(layer))
    inputs = torch.rand(shape).add(1).requires_grad_()
    with sample_noise(1, 0, PLACES):
        whole = layer(inputs * 1)
        again = layer(inputs * 1)
    whole.sum().backward()
    gradient = inputs.grad
    assert gradient is not None
    assert torch.equal(whole, inputs * gradient)
    assert set(gradient.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(whole, again), "a second call in a forward pass has a mask of its own"
    if isinstance(layer, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        assert (gradient.flatten(2) == gradient.flatten(2)[..., :1]).all(), "whole channels"
    for part in (slice(0, 2), slice(2, 6), slice(4, 4)):
        with sample_noise(1, 0, PLACES[part]):
            assert torch.equal(layer(inputs[part] * 1), whole[part])
    with sample_noise(1, 1, PLACES):
        assert not torch.equal(layer(inputs * 1), whole), "another epoch, another mask"
    if len(shape) == 4:
        with sample_noise(1, 0, PLACES):
            last = layer((inputs * 1).contiguous(memory_format=torch.channels_last))
        assert torch.equal(last, whole), "another layout in memory"
        assert last.is_contiguous(memory_format=torch.channels_last)


def test_padding_changes_no_mask_and_time_may_come_first():
    layer = stateless_dropout(nn.Dropout(0.5))
    inputs = torch.ones(6, 7, 5)
    with sample_noise(1, 0, PLACES):
        long = layer(inputs)
    with sample_noise(1, 0, PLACES):
        assert torch.equal(layer(inputs[:, :4]), long[:, :4])
    with sample_noise(1, 0, PLACES):
        rows = torch.tensor([0, 3, 8, 41])
        assert torch.equal(layer(inputs.flatten(0, 1)[rows], rows, time=7), long.flatten(0, 1)[rows])
    layer.batch_dim = 1
    with sample_noise(1, 0, PLACES):
        assert torch.equal(layer(inputs.transpose(0, 1)), long.transpose(0, 1))


def test_an_input_without_the_batch_falls_back_to_torch_with_one_warning_that_names_the_layer():
    network = stateless_dropout(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)))
    torch.manual_seed(1)
    expected = F.dropout(torch.ones(7, 5), 0.5)
    with sample_noise(1, 0, PLACES):
        torch.manual_seed(1)
        with pytest.warns(UserWarning, match=r"noise of layer '1' \(StatelessDropout\) .* shape \(7, 5\) .* 6 samples"):
            found = network[1](torch.ones(7, 5))
        network[1](torch.ones(8, 5))
    assert torch.equal(found, expected)
    with sample_noise(1, 0, PLACES), pytest.warns(UserWarning, match="was not in the network"):
        StatelessDropout(0.5)(torch.ones(6, 5))
    with sample_noise(1, 0, PLACES), pytest.warns(UserWarning, match=r"Dropout1d depends .* shape \(6, 5\)"):
        stateless_dropout(nn.Dropout1d(0.5))(torch.ones(6, 5))


RECURRENT = [
    (kind, settings)
    for kind in (nn.GRU, nn.LSTM)
    for settings in ({"bidirectional": True, "bias": False}, {"batch_first": True}, {"proj_size": 3})
    if kind is nn.LSTM or "proj_size" not in settings
]


@pytest.mark.parametrize(("kind", "settings"), RECURRENT)
def test_recurrent_layers_drop_between_layers_by_sample_padded_packed_and_alone(kind: Any, settings: dict[str, Any]):
    torch.manual_seed(2)
    layer = kind(5, 7, 3, dropout=0.4, **settings).double()
    plain = kind(5, 7, 3, **settings).double()
    plain.load_state_dict(layer.state_dict())
    stateless_dropout(layer)
    assert isinstance(layer, kind)
    time_first = not layer.batch_first
    inputs = torch.randn(4, 6, 5, dtype=torch.float64)
    lengths = torch.tensor([3, 6, 2, 5])

    def run(module: Any, batch: Tensor, of: slice = slice(0, 4), state: Any = None, packs: bool = False) -> tuple:
        batch = batch.transpose(0, 1) if time_first else batch
        if packs:
            batch = pack_padded_sequence(batch, lengths, batch_first=not time_first, enforce_sorted=False)
        with sample_noise(1, 0, PLACES[of]):
            outputs, final = module(batch, state)
        if packs:
            assert isinstance(outputs, PackedSequence)
            outputs = pad_packed_sequence(outputs, batch_first=not time_first)[0]
        return outputs.transpose(0, 1) if time_first else outputs, final

    def hidden(final: Any) -> Tensor:
        return final if kind is nn.GRU else final[0]

    packed, packed_final = run(layer, inputs, packs=True)
    padded, padded_final = run(layer, inputs)
    for i, length in enumerate(lengths.tolist()):
        alone, final = run(layer, inputs[i : i + 1, :length], slice(i, i + 1))
        torch.testing.assert_close(alone[0], packed[i, :length])
        torch.testing.assert_close(hidden(final)[:, 0], hidden(packed_final)[:, i])
        if not layer.bidirectional:
            torch.testing.assert_close(alone[0], padded[i, :length])
    assert not torch.allclose(padded, run(plain, inputs)[0])
    # So small a probability drops nothing, and what is left are torch's layers.
    layer.dropout = 1e-12
    for packs in (False, True):
        for state in (None, padded_final):
            found, expected = (run(module, inputs, state=state, packs=packs) for module in (layer, plain))
            torch.testing.assert_close(found, expected)
    layer.dropout = 0.4
    torch.manual_seed(1)
    before = layer(inputs)
    torch.manual_seed(1)
    plain.dropout = 0.4
    torch.testing.assert_close(before, plain(inputs), msg="without noise of samples torch's own")


class Twice(nn.Module):
    """A layer that is called twice, and one that is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shared, self.once = nn.Linear(5, 5), nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.once(self.shared(torch.tanh(self.linear(self.shared(inputs)))))


def gradient_of(module: nn.Module, loss: Callable[[], Tensor]) -> Tensor:
    module.zero_grad()
    loss().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations_are_computed_again_with_the_same_mask_or_refused(reentrant: bool):
    torch.manual_seed(0)
    network = stateless_dropout(Twice())
    inputs = torch.randn(6, 5, requires_grad=True)

    def rest(hidden: Tensor) -> Tensor:
        return network.once(torch.tanh(network.linear(hidden)))

    def loss(again: bool) -> Tensor:
        return (checkpoint(rest, inputs, use_reentrant=reentrant) if again else rest(inputs)).pow(2).sum()

    with sample_noise(1, 0, PLACES):
        expected = gradient_of(network, lambda: loss(False))
    with sample_noise(1, 0, PLACES):
        assert torch.equal(gradient_of(network, lambda: loss(True)), expected)
    with sample_noise(1, 0, PLACES):
        output = checkpoint(network, inputs, use_reentrant=reentrant)
        with pytest.raises(RuntimeError, match=r"layer 'shared' .* called 2 times .* checkpoint"):
            output.sum().backward()
    with sample_noise(1, 0, PLACES):
        output = loss(True)
    with pytest.raises(RuntimeError, match=r"call backward\(\) within sample_noise"):
        output.backward()


def test_copies_draw_on_their_own_and_a_repeated_pass_draws_again():
    network = stateless_dropout(Twice())
    twin = copy.deepcopy(network)
    inputs = torch.ones(6, 5)
    with sample_noise(1, 0, PLACES):
        first, of_twin = network(inputs), twin(inputs)
        repeat_noise()
        again = network(inputs)
        with sample_noise(2, 0, PLACES[:2]):
            network(inputs[:2])
        after = network(inputs)
    assert torch.equal(first, again)
    assert not torch.equal(first, of_twin)
    assert not torch.equal(first, after)
    with sample_noise(1, 0, PLACES):
        network(inputs)
        assert torch.equal(network(inputs), after), "a context within another leaves it as it was"


def test_layers_are_numbered_alike_in_wrapped_networks_and_keep_parameters_hooks_and_modes():
    network = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.LSTM(5, 4, 2, dropout=0.5))
    calls: list[int] = []
    network[1].register_forward_hook(lambda *_: calls.append(1))
    network[1].eval()
    parameters, names = list(network.parameters()), list(network.state_dict())
    layers = list(network)
    assert stateless_dropout(network) is network
    assert list(network) == layers
    assert list(network.state_dict()) == names
    assert all(a is b for a, b in zip(parameters, network.parameters(), strict=True))
    assert not network[1].training
    network[1](torch.ones(2, 5))
    assert calls == [1]
    numbers = [(layer.number, layer.name) for layer in network[1:]]
    assert numbers == [(0, "1"), (1, "2")]
    stateless_dropout(nn.ModuleDict({"module": torch.compile(network)}))
    assert [(layer.number, layer.name) for layer in network[1:]] == numbers


class Mine(nn.Dropout):
    """Its own kind of noise."""


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.MultiheadAttention(4, 2, dropout=0.1), r"1 \(MultiheadAttention\): .* inside the attention"),
        (nn.TransformerEncoderLayer(4, 2), r"1.self_attn \(MultiheadAttention\)"),
        (nn.AlphaDropout(0.1), r"1 \(AlphaDropout\)"),
        (Mine(0.1), r"1 \(Mine\): it has a forward pass of its own"),
        (nn.RReLU(), r"1 \(RReLU\)"),
        (nn.RNN(3, 3, 2, dropout=0.2), r"1 \(RNN\): only nn.GRU and nn.LSTM"),
    ],
)
def test_noise_that_cannot_be_addressed_is_refused_by_name_and_nothing_is_changed(layer: nn.Module, message: str):
    network = nn.Sequential(nn.Dropout(0.1), layer)
    with pytest.raises(UserError, match=message):
        stateless_dropout(network)
    assert type(network[0]) is nn.Dropout
    stateless_dropout(nn.Sequential(nn.RNN(3, 3, 2), nn.MultiheadAttention(4, 2), Mine(0.0)))


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_layers_whose_attention_drops_nothing_are_addressed_in_both_layouts(batch_first: bool):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=batch_first).double()
    layer.self_attn.dropout = 0.0
    stateless_dropout(layer)
    inputs = torch.randn(6, 3, 4, dtype=torch.float64)

    def run(part: slice) -> Tensor:
        batch = inputs[part] if batch_first else inputs[part].transpose(0, 1)
        with sample_noise(1, 0, PLACES[part]):
            outputs: Tensor = layer(batch)
        return outputs if batch_first else outputs.transpose(0, 1)

    whole = run(slice(0, 6))
    torch.testing.assert_close(torch.cat((run(slice(0, 2)), run(slice(2, 6)))), whole)
