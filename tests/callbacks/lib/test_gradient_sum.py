"""The mean gradient of an update has the same bits on 1, 2 and 3 ranks, and the value of one large batch."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from callbacks import GradientSum, OrderedStatistics
from datamodules import UserError
from datamodules.loading.sampling import range_of_rank
from tests.support.ranks import run_ranks

CLASS_WEIGHTS = torch.tensor([0.3, 1.7, 0.9])
Batch = tuple[Tensor, Tensor]


def batch_of(number: int, count: int) -> Batch:
    """A micro-batch; the last one is short, and the one behind it, of a surplus step, is NaN."""
    size = 2 if number == count - 1 else 4
    draws = torch.Generator().manual_seed(number)
    images = torch.randn(size, 3, 6, 6, generator=draws)
    return images if number < count else images * torch.nan, torch.randint(3, (size,), generator=draws)


class Choosing(nn.Module):
    """A micro-batch uses one of the first three layers, and no micro-batch the last one but a surplus one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(108, 3) for _ in range(4))
        self.number = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers[3 if inputs.isnan().any() else min(self.number, 2)](inputs.flatten(1))


class Complex(nn.Module):
    """A layer of complex numbers between real ones, laid out in another order than its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(108, 3)
        self.phases = nn.ParameterList([torch.randn(3, 3, dtype=torch.complex64).T])

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.layer(inputs.flatten(1)).to(torch.complex64) @ self.phases[0]).abs()


def convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 3))


@dataclass(frozen=True)
class Case:
    network: Callable[[], nn.Module] = convolutions
    ddp: dict[str, Any] = field(default_factory=dict)
    count: int = 5
    weights: Tensor | None = None
    targets: Callable[[Tensor], float | Tensor] = len
    scale: float | None = None


CASES = {
    "float32": Case(),
    "1 micro-batch on each of 3": Case(count=3),
    "12 micro-batches": Case(count=12),
    "tensor counts": Case(targets=lambda labels: torch.tensor(len(labels))),
    "class weights": Case(weights=CLASS_WEIGHTS, targets=lambda labels: CLASS_WEIGHTS[labels].sum()),
    "a scaled loss": Case(scale=2.0**16),
    "bf16": Case(lambda: convolutions().bfloat16()),
    "float64": Case(lambda: convolutions().double()),
    "channels last": Case(lambda: convolutions().to(memory_format=torch.channels_last)),
    "views of buckets": Case(ddp={"gradient_as_bucket_view": True}),
    "running statistics": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    ),
    "several buckets": Case(ddp={"bucket_cap_mb": 0.001}),
    "unused parameters": Case(Choosing, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "complex numbers": Case(Complex),
    "frozen parameters": Case(lambda: nn.Sequential(convolutions().requires_grad_(False), nn.Linear(3, 3))),
}
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    del CASES["complex numbers"]  # With torch 2.9 its error ends a run of several devices.


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def loss_of(case: Case, model: nn.Module, number: int) -> tuple[Tensor, float | Tensor]:
    inputs, labels = batch_of(number, case.count)
    network = model.module if isinstance(model, DistributedDataParallel) else model
    if isinstance(network, Choosing):
        network.number = number
    parameter = next(network.parameters())
    if case.network is CASES["channels last"].network:
        inputs = inputs.to(memory_format=torch.channels_last)
    weights = case.weights if case.weights is None else case.weights.to(parameter.dtype)
    return F.cross_entropy(model(inputs.to(parameter.dtype)), labels, weights), case.targets(labels)


def new_network(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.network()


def gradients_of(case: Case, ranks: int, under_ddp: bool = False) -> list[Tensor | None]:
    """This rank's gradients and buffers after two updates; DDP makes its buckets anew in the second."""
    network, rank = new_network(case), dist.get_rank() if ranks > 1 else 0
    model = DistributedDataParallel(network, **case.ddp) if ranks > 1 or under_ddp else network
    gradients, statistics = GradientSum(model, expected_count=4), OrderedStatistics(network, ranks)
    first, end = range_of_rank(case.count, rank, ranks)
    steps = end - first
    for step in range(2 * steps):
        with gradients.micro_batch(case.count, statistics):
            loss, targets = loss_of(case, model, first + step % steps)
            gradients.scale_loss(loss, targets)
            (loss if case.scale is None else loss * case.scale).backward()
        assert gradients.is_last == (step % steps == steps - 1)
    for parameter in network.parameters():
        assert parameter.grad is None or parameter.grad.stride() == parameter.stride()
    return [*(parameter.grad for parameter in network.parameters()), *network.buffers()]


def without_numbers() -> list[Tensor]:
    """The gradients of two micro-batches on each rank, whose number in the update is known at the end only."""
    case = Case(count=4)
    network, rank = new_network(case), dist.get_rank()
    gradients = GradientSum(model := DistributedDataParallel(network))
    gradients.start_update(None)
    for number, last in ((rank, False), (rank + 2, True)):
        with contextlib.nullcontext() if last else model.no_sync():
            loss, targets = loss_of(case, model, number)
            gradients.scale_loss(loss, targets, last=last)
            loss.backward()
        gradients.collect()
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def everything() -> dict[str, Any]:
    """What all cases give on this rank."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    found: dict[str, Any] = {name: gradients_of(case, ranks) for name, case in CASES.items()}
    if ranks == 2:
        found["without numbers"] = without_numbers()
        GradientSum(hooked := DistributedDataParallel(nn.Linear(2, 1)))
        for model, message in (
            (hooked, "a communication hook already"),
            (DistributedDataParallel(nn.Linear(2, 1), static_graph=True), "static_graph=True"),
            (nn.Embedding(3, 2, sparse=True), "sparse=False"),
        ):
            with pytest.raises(UserError, match=message):
                GradientSum(model)
    return found


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    """The gradients on 1, 2 and 3 ranks; each of these starts once for all cases."""
    return {ranks: run_ranks(everything, ranks) for ranks in (1, 2, 3)}


def plain(case: Case) -> list[Tensor | None]:
    """The gradients of the mean over all targets, in float64."""
    network = new_network(case).double()
    parts = [loss_of(case, network, number) for number in range(case.count)]
    total = sum(torch.as_tensor(targets).double() for _, targets in parts)
    torch.stack([loss * targets for loss, targets in parts]).sum().div(total).backward()
    return [parameter.grad for parameter in network.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_bit_equal_on_any_number_of_ranks(name: str, found: Any) -> None:
    case, alone = CASES[name], found[1][0][name]
    for rank in (*found[2], *found[3]):
        for one, other in zip(alone, rank[name], strict=True):
            assert one is other is None or torch.equal(one, other)
    for one, expected in zip(alone, plain(case)):
        assert (one is None) == (expected is None)
        if one is not None and expected is not None:
            rounding = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-12}[real(one).dtype]
            error = real(one).double() / (case.scale or 1) - real(expected)
            assert error.abs().max() <= rounding * real(expected).abs().max()


def test_a_scale_changes_no_bit(found: Any) -> None:
    for one, scaled in zip(found[1][0]["float32"], found[1][0]["a scaled loss"], strict=True):
        assert torch.equal(one * 2.0**16, scaled)


def test_a_sum_in_half_precision_is_rounded_once(found: Any) -> None:
    case = CASES["bf16"]
    network, sums = new_network(case), 0
    for number in range(case.count):
        network.zero_grad()
        loss, targets = loss_of(case, network, number)
        loss.backward(torch.tensor(targets / 4, dtype=torch.bfloat16))
        sums = sums + next(network.parameters()).grad.float()
    expected = sums * (4 / 18)
    assert (found[1][0]["bf16"][0].float() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_unnumbered_micro_batches_give_the_mean_within_rounding(found: Any) -> None:
    expected = plain(Case(count=4))
    for rank in found[2]:
        for one, other in zip(rank["without numbers"], expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_gradients_are_the_same_under_ddp_of_one_process() -> None:
    (alone,) = run_ranks(_under_ddp_of_one_process, 1, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    pairs = [pair for name in alone for pair in zip(alone[name], gradients_of(CASES[name], 1), strict=True)]
    assert all(one is other is None or torch.equal(one, other) for one, other in pairs)


def _under_ddp_of_one_process() -> dict[str, Any]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return {name: gradients_of(CASES[name], 1, under_ddp=True) for name in ("views of buckets", "unused parameters")}
