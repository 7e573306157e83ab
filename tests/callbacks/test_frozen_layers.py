"""Layers that are frozen stay as they are in a plain PyTorch loop, until they are unfrozen."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callbacks import freeze_layers
from callbacks.freezing import FrozenLayers


def network() -> nn.Module:
    torch.manual_seed(1)
    stem = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return nn.ModuleDict({"stem": stem, "body": body, "head": nn.Linear(4, 2)})


def forward(net: Any, inputs: Tensor) -> Tensor:
    return net["head"](net["body"](net["stem"](inputs)))


def train(net: nn.Module, updates: int = 3) -> None:
    """Plain steps with momentum and weight decay, each after `train()`."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(updates):
        net.train()
        optimizer.zero_grad()
        forward(net, torch.randn(8, 4) + 3).square().mean().backward()
        optimizer.step()


def changed(net: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """The layers whose weights or statistics differ."""
    return {".".join(name.split(".")[:2]) for name, value in net.state_dict().items() if not value.equal(before[name])}


def test_a_copy_of_frozen_layers_stays_frozen() -> None:
    net = network()
    freeze_layers(net, until="body")
    net = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    before, inputs = copy.deepcopy(net.state_dict()), torch.randn(5, 4)
    expected = net["stem"].eval()(inputs)  # type: ignore[index]
    train(net)
    assert changed(net, before) == {"body.0", "body.1", "head.weight", "head.bias"}
    net.train()
    assert torch.equal(net["stem"](inputs), expected)  # type: ignore[index]
    assert not net["stem"](inputs).requires_grad  # type: ignore[index]


def test_unfrozen_layers_train_in_the_mode_that_they_had() -> None:
    net = network()
    net["stem"][2].eval()  # type: ignore[index]
    frozen = freeze_layers(net, until="head")
    frozen.unfreeze("stem")
    assert [layer.training for layer in net["stem"]] == [True, True, False]  # type: ignore[index]
    before = copy.deepcopy(net.state_dict())
    train(net)
    assert changed(net, before) == {"stem.0", "stem.1", "head.weight", "head.bias"}
    frozen.unfreeze("*")
    before = copy.deepcopy(net.state_dict())
    train(net)
    assert {"body.0", "body.1"} <= changed(net, before)


def test_batch_norm_statistics_stay_while_its_weights_train() -> None:
    net = network()
    frozen = freeze_layers(net, train_bn=False)
    before = copy.deepcopy(net.state_dict())
    train(net)
    after = net.state_dict()
    assert all(after[name].equal(before[name]) for name in after if "running" in name)
    assert not any(after[f"{layer}.1.weight"].equal(before[f"{layer}.1.weight"]) for layer in ("stem", "body"))
    frozen.unfreeze("*")
    assert not net["stem"][1].training  # type: ignore[index]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_frozen_recurrent_layers_drop_nothing(kind) -> None:
    torch.manual_seed(1)
    net = nn.ModuleDict({"first": nn.Linear(3, 4), "middle": kind(4, 4, num_layers=2, dropout=0.5)})
    inputs, rnn = torch.randn(5, 2, 3), net["middle"]

    def gradient() -> Tensor:
        net.zero_grad()
        rnn(net["first"](inputs))[0].square().sum().backward()
        return net["first"].weight.grad.clone()  # type: ignore[union-attr]

    net.eval()
    expected = gradient()
    frozen = FrozenLayers(net, {"middle"})
    frozen.freeze()
    net.train()
    assert torch.equal(gradient(), expected)
    assert rnn.training
    assert rnn.dropout == 0
    assert torch.equal(copy.deepcopy(rnn)(net["first"](inputs))[0], rnn(net["first"](inputs))[0])
    frozen.restore()
    assert rnn.dropout == 0.5
