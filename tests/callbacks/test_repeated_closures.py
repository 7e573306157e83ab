"""Optimisers that call their closure several times: exact where an update is one batch on one device, else refused."""

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
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
from tests.support.tables import QUIET, Tiny, on_ranks, silence


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
    silence()
    module = Tiny(network(), OPTIMIZERS[name])
    trainer = pl.Trainer(
        **(QUIET | on_ranks(world_size)),
        callbacks=list(callbacks),
        max_epochs=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
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


def refusal(name: str, *callbacks: Any, world_size: int = 1) -> str:
    with pytest.raises(UserError) as refused:
        fit(name, *callbacks, world_size=world_size)
    return str(refused.value)


def on_two_ranks() -> list[str]:
    assert os.environ["WORLD_SIZE"] == "2"
    return [refusal(name, GradientAccumulation(), world_size=2) for name in OPTIMIZERS]


def test_several_devices_or_micro_batches_are_refused_in_one_line() -> None:
    alone = [refusal(name, GradientAccumulation(2)) for name in OPTIMIZERS]
    for lines in (alone, *run_ranks(on_two_ranks, 2)):
        for name, line in zip(OPTIMIZERS, lines, strict=True):
            assert line.startswith(f"{name} calls its closure several times per update, which is exact on one device")
            assert "pass devices=1, no accumulation and a `batch_size` that holds the whole update" in line
