"""Optimizers that call their closure several times: the closure is the whole update, on any number of ranks."""

import itertools
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
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import Tiny, quiet_trainer


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al., 2021) calls its closure twice."""

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
def test_one_batch_on_one_device_is_the_step_of_plain_pytorch(name: str) -> None:
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


def weights_on(world_size: int) -> list[list[Tensor]]:
    """The weights of each optimizer after updates of 5 micro-batches, the last of an epoch of 3, with dropout."""
    found = []
    for name in OPTIMIZERS:
        seeds = SeedControl(1)
        network_with_noise = nn.Sequential(network(), nn.Dropout(0.2))
        module = Tiny(network_with_noise, OPTIMIZERS[name])
        generator = torch.Generator().manual_seed(4)
        inputs = torch.randn(32, 4, dtype=torch.float64, generator=generator)
        trainer = quiet_trainer(seeds, GradientAccumulation(global_batch_size=20), world_size=world_size, max_epochs=2)
        rank = trainer.global_rank
        loader = TrainLoader(inputs, inputs[:, :3].argmax(1), torch.arange(32), 4, 1, rank, world_size)
        trainer.fit(module, loader)
        assert trainer.global_step == 4
        found.append([parameter.detach() for parameter in module.parameters()])
    return found


def test_updates_have_one_result_on_any_number_of_ranks() -> None:
    alone = weights_on(1)
    for rank in (*run_ranks(weights_on, 2, 2), *run_ranks(weights_on, 3, 3)):
        for one, other in zip(itertools.chain(*alone), itertools.chain(*rank), strict=True):
            assert torch.equal(one, other)


def test_a_step_logs_the_last_computation_of_its_update() -> None:
    class Counted(Tiny):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            self.log("call", float(self.calls))
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(GradientAccumulation(2))
    trainer.fit(Counted(network(), OPTIMIZERS["SAM"]), DataLoader(batches()[:2], batch_size=None))  # type: ignore[arg-type]
    assert trainer.callback_metrics["call"] == 3.5  # The mean of the third and the fourth call.
