"""Gradients are averaged over the ranks through buckets smaller than a network, of whichever parameters have any."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from callbacks.lib import gradient_mean
from callbacks.lib.gradient_mean import GradientMean
from tests.support.ranks import run_ranks

SIZES = 3, 5, 4, 9, 1


def _means() -> list[list[list[float]]]:
    dist.init_process_group("gloo")
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    parameters.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_mean, "_BYTES", 4 * 8)
        mean = GradientMean(parameters, 2)
    for chosen in (parameters, parameters[1:4], parameters):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, number + 10 * dist.get_rank())
        if dist.get_rank():
            chosen[0].grad = None
        mean(chosen)
        found.append([[] if p.grad is None else p.grad.tolist() for p in parameters])
    return found


def test_means_of_all_and_of_some_with_a_gradient_that_a_rank_lacks() -> None:
    of_ranks = run_ranks(_means, 2)
    for rank, (every, some, again) in enumerate(of_ranks):
        sizes = [*SIZES, 2]
        assert every == again == [[0.0 if n == 0 else n + 5.0] * size for n, size in enumerate(sizes)]
        kept = [[n + 10.0 * rank] * size for n, size in enumerate(sizes)]
        means = [[0.5 if n == 1 else n + 5.0] * size for n, size in enumerate(sizes)]
        assert some == [kept[0], *means[1:4], *kept[4:]]
