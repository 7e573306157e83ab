"""Optimisers that call their closure several times: exact where an update is one batch on one device, else refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl
from callbacks.warmup_lr import WarmupLR
from datamodules.errors import UserError
from tests.support.ranks import run_ranks
from tests.support.tables import Tiny, quiet_trainer


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation (Foret et al., 2021) calls its closure twice."""

    def step(self, closure: Any = None) -> Any:
        torch.enable_grad()(closure)()
        loss = torch.enable_grad()(closure)()
        super().step()
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SAM": lambda parameters: SAM(parameters, lr=0.2, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4),
}


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(size, 4, dtype=torch.float64, generator=generator) for size in (9, 2, 5, 4)]
    return [(x, x[:, :3].argmax(1)) for x in inputs]


def fit(name: str, *callbacks: Any, world_size: int = 1) -> Tiny:
    module = Tiny(network(), OPTIMIZERS[name])
    quiet_trainer(*callbacks, world_size=world_size).fit(module, DataLoader(batches(), batch_size=None))
    return module


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_batch_on_one_device_is_the_step_of_plain_pytorch_with_warm_up_applied_once(name: str) -> None:
    module = network()
    optimizer = OPTIMIZERS[name](module.parameters())
    rate = optimizer.param_groups[0]["lr"]
    for update, (inputs, targets) in enumerate(batches()):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(inputs), targets)
            loss.backward()
            return loss

        optimizer.param_groups[0]["lr"] = rate * (0.01 + 0.99 * update / 4)
        optimizer.step(closure)
    warmup = WarmupLR("4 steps")
    found = fit(name, GradientAccumulation(), SeedControl(1), warmup)
    assert warmup.updates == [4]
    for weight, expected in zip(found.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-13, atol=1e-13)


def refused(micro_batches: int, world_size: int) -> None:
    for name in OPTIMIZERS:
        message = f"^{name} calls its closure several times per update, which is exact on one device .*"
        message += "pass devices=1, no accumulation and a `batch_size` that holds the whole update"
        with pytest.raises(UserError, match=message):
            fit(name, GradientAccumulation(micro_batches), world_size=world_size)


def test_several_devices_or_micro_batches_are_refused_in_one_line() -> None:
    refused(2, 1)
    run_ranks(refused, 2, 1, 2)
