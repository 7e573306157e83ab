"""The arithmetic of the scaling section; that it runs is shown with the other sections."""

import pytest

from benchmarks.contenders.scaling_ranks import (
    ALONE,
    ALONE_ALL,
    PLAIN_SIDE_BY_SIDE,
    PLAIN_WEAK,
    SIDE_BY_SIDE,
    STRONG,
    WEAK,
    Job,
    Measured,
    run_world,
)
from benchmarks.harness.ring import Link, Reduction, fit_link, relative_errors
from benchmarks.sections.scaling import exposed_share, world_row
from datamodules.errors import UserError

SIZES = (4_096, 65_536, 1_048_576, 16_777_216)


def reductions(link: Link, worlds: tuple[int, ...], wrong: float = 1.0) -> list[Reduction]:
    return [Reduction(n, size, wrong * link.all_reduce_seconds(n, size)) for n in worlds for size in SIZES]


def test_a_link_fitted_to_small_worlds_predicts_large_ones() -> None:
    true = Link(latency=5e-5, bandwidth=2e9)
    found = fit_link(reductions(true, (2, 4)))
    assert found.latency == pytest.approx(true.latency)
    assert found.bandwidth == pytest.approx(true.bandwidth)
    assert max(relative_errors(found, reductions(true, (32, 1000)))) < 1e-6
    assert relative_errors(found, reductions(true, (8,), wrong=2.0)) == pytest.approx([0.5] * len(SIZES))


def test_neither_latency_nor_bandwidth_is_ever_negative() -> None:
    # Large sums that take less than small ones would need a negative time per byte.
    falling = [Reduction(2, 10**3, 2e-3), Reduction(2, 10**7, 1e-3)]
    found = fit_link(falling)
    assert found.latency > 0
    assert found.bandwidth > 0
    # Time in proportion to the bytes leaves nothing for the latency.
    steep = [Reduction(2, 10**3, 1e-9), Reduction(2, 10**6, 1e-3)]
    assert fit_link(steep).latency >= 0


def test_one_sum_is_not_enough_for_a_link() -> None:
    with pytest.raises(ValueError, match="found 1 all-reduces"):
        fit_link([Reduction(1, 10, 1.0), Reduction(1, 20, 1.0), Reduction(2, 10, 1.0)])


JOB = Job(
    devices=2,
    num_nodes=1,
    batch_size=4,
    global_batch_size=8,
    image_size=32,
    steps=1,
    rounds=2,
    sizes=(400,),
    threads=1,
    precision="32-true",
    cuda=False,
)
FOUND = Measured(
    {
        ALONE: [[1.0], [2.0]],
        ALONE_ALL: [[2.0], [4.0]],
        SIDE_BY_SIDE: [[1.5, 1.5], [2.0, 4.0]],
        WEAK: [[2.0, 2.0], [4.0, 4.0]],
        STRONG: [[1.0, 1.0], [4.0, 4.0]],
        PLAIN_SIDE_BY_SIDE: [[1.0, 3.0], [2.0, 2.0]],
        PLAIN_WEAK: [[4.0, 4.0], [2.5, 2.5]],
    },
    {400: [0.5, 0.5]},
    400,
)


def test_a_worlds_figures_are_formed_within_a_round() -> None:
    figures = [spread.values for spread in world_row(JOB, FOUND, Link(0.0, 1000.0)) if spread is not None]
    rate, alone, beside, plain, strong, summed, bound = figures
    assert rate == (4.0, 2.0)
    assert alone == (50.0, 50.0)
    assert beside == (75.0, 75.0)
    assert plain == (50.0, 80.0)
    assert strong == (2.0, 1.0)
    assert summed == (500.0, 500.0)
    assert bound == (400.0,)  # 2 processes pass all 400 bytes once.
    assert exposed_share(FOUND) == 1.5  # Half a second more in the first round, one in the second, for half a second.


@pytest.mark.slow
def test_a_rank_that_fails_is_named() -> None:
    job = Job(**{**vars(JOB), "devices": 1, "precision": "no-such-precision"})
    with pytest.raises(UserError, match=r"rank 0 of 1: .*no-such-precision"):
        run_world(job)
