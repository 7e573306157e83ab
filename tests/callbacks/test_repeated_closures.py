"""Optimisers that call their closure again, or use its loss, on two ranks: as plain PyTorch on the whole batch.

SAM (Foret et al., 2021) calls it twice per update, LBFGS many times, and with a line search as often as the loss says.
A Polyak step (Loizou et al., 2021) calls it once and multiplies by the loss.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.finite_weights import FiniteWeights
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lean_loop import LeanLoop
from callbacks.preemption import Preemption
from callbacks.rank_consistency import RankConsistency
from callbacks.seed_control import SeedControl
from callbacks.train_loss import TrainLoss
from callbacks.warmup_lr import WarmupLR
from datamodules.errors import RunFailedError, UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, on_ranks, silence

Batch = tuple[Tensor, Tensor]


class SAM(torch.optim.SGD):
    """Steps with the gradient at the point a little uphill."""

    @override
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        with torch.enable_grad():
            closure()
        uphill = [0.05 * p.grad / torch.stack([q.grad.norm() for q in parameters]).norm() for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, uphill)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, uphill)
        super().step()
        return loss


class Polyak(torch.optim.Optimizer):
    """Steps as far as the loss and the gradient's norm say."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            return None
        parameters = self.param_groups[0]["params"]
        squared = sum(p.grad.square().sum() for p in parameters)
        for parameter in parameters:
            parameter -= self.param_groups[0]["lr"] * 0.3 * float(loss) / squared * parameter.grad
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SAM": lambda parameters: SAM(parameters, lr=0.2, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4),
    "LBFGS, line search": lambda parameters: torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe"),
    "Polyak": lambda parameters: Polyak(parameters),
}

# Chaos: a line search multiplies a difference in the last bit by hundreds.
ROUNDING = {"SAM": 1e-14, "LBFGS": 1e-10, "LBFGS, line search": 1e-10, "Polyak": 1e-13}


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)).double()


class Closures(pl.LightningModule):
    """Counts the calls of `training_step` in each update; in skipped epochs the third batch gives no loss."""

    def __init__(self, optimizer: str, dropout: float = 0.0, skipped_epochs: int = 0) -> None:
        super().__init__()
        self.network, self.optimizer, self.skipped_epochs = network(dropout), optimizer, skipped_epochs
        self.calls: dict[int, int] = {}
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if batch_idx == 2 and self.current_epoch < self.skipped_epochs:
            return None
        self.calls[self.trainer.global_step] = self.calls.get(self.trainer.global_step, 0) + 1
        logits = self.network(batch[0])
        self.outputs.append(logits.detach())
        return F.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.network.parameters())


def batches(*sizes: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, 4, dtype=torch.float64, generator=generator) for size in sizes]
    return [(x, x[:, :3].argmax(1)) for x in inputs]


def fit(
    optimizer: str,
    share: Any,
    *callbacks: pl.Callback,
    world_size: int = 1,
    dropout: float = 0.0,
    skipped_epochs: int = 0,
    ckpt_path: Any = None,
    **options: Any,
) -> Closures:
    silence()
    bare = {"enable_progress_bar": False, "max_epochs": 2, "plugins": [VerifiedCheckpointIO()]}
    bare["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = pl.Trainer(callbacks=list(callbacks), **(QUIET | bare | on_ranks(world_size) | options))
    model = Closures(optimizer, dropout, skipped_epochs)
    loader = DataLoader(share, batch_size=None) if isinstance(share, list) else share
    trainer.fit(model, loader, ckpt_path=ckpt_path, weights_only=True)
    return model


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def error(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(left, right, strict=True))


def plain_loop(name: str, updates: list[Batch], factors: list[float] | None = None) -> list[Tensor]:
    """Two epochs of PyTorch's own loop, each update on its whole batch."""
    module = network()
    optimizer = OPTIMIZERS[name](module.parameters())
    for (inputs, targets), factor in zip(updates * 2, factors or [1.0] * 2 * len(updates), strict=True):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(inputs), targets)
            loss.backward()
            return loss

        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.step(closure)
        optimizer.param_groups[0]["lr"] = rate
    return weights(module)


def joined(*parts: Batch) -> Batch:
    inputs, targets = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(targets)


EQUAL = batches(6, 6, 6, seed=1), batches(6, 6, 6, seed=2)
UNEQUAL = batches(9, 2, 5, seed=3), batches(1, 7, 0, seed=4)


def together() -> list[pl.Callback]:
    """What else looks at a step, with the flag of Preemption among the counts."""
    return [
        GradientAccumulation(),
        SeedControl(1),
        TrainLoss(),
        FiniteWeights(),
        RankConsistency(),
        Preemption(),
        LeanLoop(),
    ]


def two_ranks(folder: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    answers: dict[str, Any] = {}
    for name in OPTIMIZERS:
        answers[name, "unequal"] = fit(name, UNEQUAL[rank], GradientAccumulation(), world_size=2)
        answers[name, "together"] = fit(name, UNEQUAL[rank], *together(), world_size=2, log_every_n_steps=1)
    for name, callbacks in {"ours": [GradientAccumulation()], "stock": []}.items():
        answers["SAM", name] = fit("SAM", EQUAL[rank], *callbacks, world_size=2)
    answers["Polyak", "accumulated"] = fit("Polyak", UNEQUAL[rank], GradientAccumulation(3), world_size=2)
    found = {key: (weights(model), model.calls) for key, model in answers.items()}
    try:
        fit("SAM", UNEQUAL[rank], GradientAccumulation(2), world_size=2)
    except RunFailedError as refused:
        found["refused"] = str(refused)
    return found


def test_two_ranks_call_alike_and_take_the_step_of_plain_pytorch_on_the_whole_batch(tmp_path: Path) -> None:
    first, second = run_ranks(two_ranks, 2, tmp_path)
    whole = [joined(*pair) for pair in zip(*UNEQUAL, strict=True)]
    for name in OPTIMIZERS:
        expected = plain_loop(name, whole)
        alone = fit(name, whole, GradientAccumulation())
        for key in ((name, "unequal"), (name, "together")):
            assert error(first[key][0], expected) < ROUNDING[name], key
            assert all(torch.equal(a, b) for a, b in zip(first[key][0], second[key][0], strict=True))
            assert first[key][1] == second[key][1] == alone.calls
        assert max(alone.calls.values()) > 1 or name == "Polyak"
    # Equal batches are all that stock Lightning gets right.
    assert error(first["SAM", "ours"][0], first["SAM", "stock"][0]) < 1e-15
    assert error(first["Polyak", "accumulated"][0], plain_loop("Polyak", [joined(*UNEQUAL[0], *UNEQUAL[1])])) < 1e-13
    assert "SAM calls its closure several times per update" in first["refused"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_one_rank_every_call_is_the_ordinary_mean(name: str) -> None:
    expected = plain_loop(name, UNEQUAL[0])
    assert error(weights(fit(name, UNEQUAL[0], *together())), expected) < 1e-15
    assert error(weights(fit(name, UNEQUAL[0])), expected) < 1e-15


def test_the_optimiser_gets_the_mean_loss_over_all_micro_batches_also_after_one_without_loss() -> None:
    expected = plain_loop("Polyak", [joined(*UNEQUAL[0])])
    assert error(weights(fit("Polyak", UNEQUAL[0], GradientAccumulation(3))), expected) < 1e-14

    model = fit("Polyak", UNEQUAL[0], GradientAccumulation(3), max_epochs=4, skipped_epochs=2)
    assert error(weights(model), expected) < 1e-14


def test_several_micro_batches_are_refused_where_they_cannot_be_computed_again() -> None:
    with pytest.raises(RunFailedError, match="SAM calls its closure several times per update") as refused:
        fit("SAM", UNEQUAL[0], GradientAccumulation(2))
    assert "pass steps=1 and a `batch_size` that holds the whole update" in str(refused.value)
    with pytest.raises(RunFailedError, match="of the 2 micro-batches"):
        fit("SAM", UNEQUAL[0], GradientAccumulation({0: 1, "1 epochs": 2}), LeanLoop())
    with pytest.raises(UserError, match="LBFGS calls its closure") as at_once:
        fit("LBFGS", UNEQUAL[0], GradientAccumulation({0: 1, "1 epochs": 2}))
    assert at_once.type is UserError, "before the first update"


def test_warm_up_multiplies_the_rate_once_per_step_however_often_the_closure_is_called() -> None:
    factors = [min(1.0, 0.2 + 0.8 * update / 4) for update in range(6)]
    for name in OPTIMIZERS:
        warmup = WarmupLR("4 steps", start_factor=0.2)
        model = fit(name, UNEQUAL[0], GradientAccumulation(), warmup)
        assert warmup.updates == [6]
        assert error(weights(model), plain_loop(name, UNEQUAL[0], factors)) < 1e-15, name


def test_each_call_draws_anew_as_in_pytorch_and_a_rerun_draws_the_same() -> None:
    first, rerun = (fit("SAM", [EQUAL[0][0]] * 2, SeedControl(1), dropout=0.5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.outputs, rerun.outputs, strict=True))
    still = fit("SAM", [EQUAL[0][0]] * 2, SeedControl(1), dropout=0.5, limit_train_batches=1, max_epochs=1)
    once, again = still.outputs
    assert float((once - again).abs().max()) > 0.5, "another mask, and not only the small step uphill"


def loader() -> TrainLoader:
    inputs, targets = joined(*EQUAL[0])
    return TrainLoader(inputs, targets, torch.arange(18), 6, 1, 0, 1)


@pytest.mark.parametrize("name", ["SAM", "LBFGS", "LBFGS, line search"])
@pytest.mark.parametrize("stops", [2, 3])
def test_a_resume_continues_the_optimisers_state_to_the_bit(name: str, stops: int, tmp_path: Path) -> None:
    whole = fit(name, loader(), *together(), dropout=0.2)
    saves = ExactCheckpoint(tmp_path, filename="saved", every_n_train_steps=stops, enable_version_counter=False)
    fit(name, loader(), *together(), saves, dropout=0.2, limit_train_batches=3, max_steps=stops)
    resumed = fit(name, loader(), *together(), dropout=0.2, ckpt_path=tmp_path / "saved.ckpt")
    assert min(resumed.calls) == stops
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
