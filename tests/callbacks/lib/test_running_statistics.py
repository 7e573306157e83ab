import copy

import pytest
import torch
from torch import nn

from callbacks import OrderedStatistics


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_the_statistics_of_updates_are_those_of_their_micro_batches_in_turn(momentum, dtype, bound):
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
            assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
        statistics.finish(3)
        torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=bound, atol=bound)
