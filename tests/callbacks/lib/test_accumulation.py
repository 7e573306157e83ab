"""The weights of micro-batches give the gradient of the mean over all targets, in a plain PyTorch loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from callbacks.lib.accumulation import AccumulationWindow, batches_for_samples, scale_gradients


def gradients(parts: list[Tensor], window: AccumulationWindow | None, divided_by: int = 1) -> Tensor:
    """Of the mean over all samples, from the mean over each part, or where there is no window from all at once."""
    layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    if window is None:
        layer(torch.cat(parts)).square().mean().backward()
    else:
        for part in parts[:-1]:
            (layer(part).square().mean() / divided_by * window.weight(float(len(part)))).backward()
        earlier, last = window.last_weight(float(len(parts[-1])))
        scale_gradients(layer.parameters(), earlier)
        (layer(parts[-1]).square().mean() / divided_by * last).backward()
    assert layer.weight.grad is not None
    return layer.weight.grad


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 5))
def test_micro_batches_of_any_sizes_add_up_to_the_mean(sizes: list[int], divided_by: int) -> None:
    parts = list(torch.randn(sum(sizes), 3, dtype=torch.float64).split(sizes))
    window = AccumulationWindow(divided_by)
    torch.testing.assert_close(gradients(parts, window, divided_by), gradients(parts, None), rtol=1e-12, atol=1e-12)
    assert not window.is_open


def test_ranks_with_unequal_counts_average_to_the_mean_over_all() -> None:
    weights = [
        AccumulationWindow().last_weight(count, world_size=2, sum_over_ranks=lambda _: 8.0)[1] for count in (2.0, 6.0)
    ]
    assert [weight / 2 for weight in weights] == [0.25, 0.75]


def test_a_micro_batch_without_targets_has_no_weight() -> None:
    window = AccumulationWindow()
    assert [window.weight(count) for count in (0.0, 4.0)] == [0.0, 4.0]
    assert window.last_weight(0.0) == (0.25, 0.0)


def test_a_window_without_its_last_micro_batch_is_closed_with_the_mean_of_the_others() -> None:
    window = AccumulationWindow(divided_by=3)
    weights = [window.weight(count) for count in (2.0, 6.0)]
    assert [weight * window_weight / 3 for weight, window_weight in zip(weights, [window.close()] * 2)] == [0.25, 0.75]


def test_counts_on_a_device_stay_tensors() -> None:
    window = AccumulationWindow()
    first = window.weight(torch.tensor(2.0))
    earlier, last = window.last_weight(torch.tensor(6.0))
    assert isinstance(first * earlier, Tensor)
    assert (float(first * earlier), float(last)) == (0.25, 0.75)


@pytest.mark.parametrize(("old", "new", "batches"), [(8, 16, 3), (16, 8, 12), (8, 8, 6), (3, 4, 4)])
def test_a_place_in_the_epoch_is_that_of_as_many_samples(old: int, new: int, batches: int) -> None:
    assert batches_for_samples(6, old, new) == batches
