import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from callbacks import sync_batchnorm
from callbacks.lib.batch_norm import OrderedStatistics
from callbacks.lib.gradient_sum import GradientSum
from tests.support.tables import equal


def micro_batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 6, 3, generator=torch.Generator().manual_seed(count)).mul(3))


def state_after(layer: nn.Module, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """The weights and buffers after two updates of these micro-batches."""
    statistics = OrderedStatistics(layer)
    for _ in range(2):
        for batch in batches:
            statistics.begin()
            outputs = layer(batch)
            statistics.collect()
            outputs.square().sum().backward()
            statistics.restore()
        statistics.finish(len(batches))
    return layer.state_dict()


def test_a_step_that_raises_leaves_the_layer_as_it_was() -> None:
    layer, (batch, other) = nn.BatchNorm1d(3), micro_batches(2)
    layer(batch)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(KeyboardInterrupt), GradientSum(layer).micro_batch(2, OrderedStatistics(layer)):
        layer(other)
        raise KeyboardInterrupt
    assert layer.momentum == 0.1
    assert equal(layer.state_dict(), before)


def test_a_micro_batch_that_is_not_collected_counts_for_nothing() -> None:
    layer, other, (batch,) = nn.BatchNorm1d(3), nn.BatchNorm1d(3), micro_batches(1)
    statistics = OrderedStatistics(layer)
    statistics.begin()
    layer(batch)
    statistics.collect()
    statistics.restore()
    statistics.begin()
    layer(torch.full((4, 3), float("nan")))
    statistics.restore()
    statistics.finish(2)
    other(batch)
    torch.testing.assert_close(layer.state_dict(), other.state_dict())


def test_synchronized_or_frozen_layers_are_left_alone() -> None:
    frozen, synchronized = nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3)
    sync_batchnorm(synchronized)
    network = nn.Sequential(frozen, nn.BatchNorm1d(3, track_running_stats=False), synchronized)
    statistics = OrderedStatistics(network)
    statistics.begin()
    assert [layer.momentum for layer in network] == [0.1] * 3
    frozen(torch.randn(4, 3))
    statistics.collect()
    statistics.restore()
    statistics.finish(1)
    assert torch.equal(frozen.running_mean, torch.zeros(3))
    assert frozen.num_batches_tracked == 0


class Checkpointed(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(super().forward, inputs, use_reentrant=False)


def test_activation_checkpointing_counts_a_micro_batch_once() -> None:
    batches = [batch.requires_grad_() for batch in micro_batches(3)]
    found, expected = (state_after(kind(nn.BatchNorm1d(3)), batches) for kind in (Checkpointed, nn.Sequential))
    assert equal(found, expected)


def test_a_layer_used_twice_counts_its_last_call() -> None:
    layer, once, (first, second) = nn.BatchNorm1d(3), nn.BatchNorm1d(3), micro_batches(2)
    statistics = OrderedStatistics(layer)
    statistics.begin()
    layer(first)
    assert statistics.repeated() == []
    layer(second)
    assert statistics.repeated() == [layer]
    statistics.collect()
    statistics.restore()
    statistics.finish(1)
    once(second)
    torch.testing.assert_close(layer.state_dict(), once.state_dict())


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_statistics_of_an_update_equal_micro_batches_in_turn(momentum, dtype, bound) -> None:
    torch.manual_seed(1)
    layer = nn.BatchNorm1d(3, momentum=momentum, dtype=dtype)
    plain, statistics = copy.deepcopy(layer), OrderedStatistics(layer)
    for _ in range(2):
        before = copy.deepcopy(layer.state_dict())
        for samples in (4, 4, 2):
            inputs = torch.randn(samples, 3, dtype=dtype)
            statistics.begin()
            assert torch.equal(layer(inputs), plain(inputs))
            statistics.collect()
            statistics.restore()
            assert equal(layer.state_dict(), before)
        statistics.finish(3)
        torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=bound, atol=bound)


class Freezing(nn.Module):
    """A network whose forward pass freezes one of its layers, as a feature extractor is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, batch: Tensor) -> Tensor:
        self.frozen.eval()
        return self.norm(self.frozen(batch))  # type: ignore[no-any-return]


def test_a_layer_that_the_forward_pass_freezes_stays_as_it_is() -> None:
    network, stock = Freezing(), Freezing()
    statistics = OrderedStatistics(network)
    for batch in micro_batches(2):
        statistics.begin()
        network(batch)
        statistics.collect()
        statistics.restore()
        stock(batch)
    statistics.finish(2)
    assert int(network.frozen.num_batches_tracked) == 0
    assert (network.frozen.momentum, network.norm.momentum) == (0.1, 0.1)
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(network.state_dict()[name], value)
