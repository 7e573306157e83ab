"""Targets that weigh a micro-batch: those of none add nothing, and an update of none is no step."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ExactCheckpoint, GradientAccumulation, SeedControl, TrainLoss, WarmupLR, WeightAveraging
from callbacks.lib.optimizers import skip_step_on_device
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

SAMPLES = 16
EMPTY = range(4, 8)
"""Samples without a target: a whole update of 2 micro-batches of 2."""


def data(empty: Any = EMPTY) -> TensorDataset:
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    masks = torch.ones(SAMPLES, dtype=torch.float64)
    masks[[*empty, 8, 9]] = 0  # The latter are a micro-batch of an update with targets.
    return TensorDataset(inputs, inputs.sum(1), masks)


class Masked(pl.LightningModule):
    """The mean of squared errors over the samples of a mask, which is 0 / 0 without one."""

    def __init__(
        self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, counts: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        self.optimizer = optimizer
        self.counts = counts
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets, mask = batch
        errors = (self.layer(inputs).flatten() - targets).square()
        loss = (errors * mask).sum() / mask.sum()
        return {"loss": loss, "count": mask.sum()} if self.counts else loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def mask_of(batch: Any) -> Tensor:
    return batch[2].sum()


def train(model: Masked, *callbacks: pl.Callback, rows: Any = range(SAMPLES), **options: Any) -> Any:
    loader = DataLoader(torch.utils.data.Subset(data(), [*rows]), options.pop("batch_size", 2))
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(model, loader)
    return trainer


OPTIMIZERS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "LBFGS": torch.optim.LBFGS, "fused": torch.optim.Adam}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("optimizer", ["AdamW", "LBFGS"])
def test_an_update_without_targets_is_no_step(optimizer: str, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    def run(rows: Any) -> tuple[Any, Masked, list[float]]:
        model = Masked(OPTIMIZERS[optimizer])
        callbacks = [GradientAccumulation(steps), WarmupLR("3 steps"), WeightAveraging(ema=0.5), TrainLoss()]
        return train(model, *callbacks, rows=rows, batch_size=4 // steps), model, model.losses

    trainer, model, losses = run(range(SAMPLES))
    trainer_without, model_without, _ = run([row for row in range(SAMPLES) if row not in EMPTY])
    assert (trainer.fit_loop.total_batch_idx, trainer.global_step) == (3, 3)
    assert trainer_without.global_step == 3
    assert torch.equal(model.layer.weight, model_without.layer.weight)
    assert trainer.optimizers[0].param_groups[0]["lr"] == trainer_without.optimizers[0].param_groups[0]["lr"]
    assert trainer.callback_metrics["train/loss_epoch"] == trainer_without.callback_metrics["train/loss_epoch"]
    assert sum(loss != loss for loss in losses) == 1, "the loss of the update without targets"
    assert caplog.text.count("update 1 of epoch 0 had no target") == 1


def on_ranks() -> list[Tensor]:
    return [weights_of(Masked(), GradientAccumulation(global_batch_size=4), world_size=2, use_distributed_sampler=True)]


def weights_of(model: Masked, *callbacks: pl.Callback, **options: Any) -> Tensor:
    train(model, *callbacks, **options)
    return model.layer.weight.detach().clone()


def test_ranks_leave_out_micro_batches_without_targets_alike() -> None:
    alone = weights_of(Masked(), GradientAccumulation(global_batch_size=4))
    assert alone.isfinite().all()
    for (weight,) in run_ranks(on_ranks, 2):
        assert torch.equal(weight, alone)


def test_a_function_counts_for_a_step_that_does_not() -> None:
    expected = weights_of(Masked(), GradientAccumulation(2))
    assert torch.equal(weights_of(Masked(counts=False), GradientAccumulation(2, count=mask_of)), expected)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_skips_a_step_marked_on_the_device(optimizer: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    fused = optimizer([weight], lr=0.1, weight_decay=0.1, fused=True)
    weight.grad = torch.zeros(3)
    skip_step_on_device(fused, torch.ones(()))
    fused.step()
    assert torch.equal(weight, torch.ones(3))
    skip_step_on_device(fused, None)
    fused.step()
    assert not torch.equal(weight, torch.ones(3))


class Kill(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            raise ZeroDivisionError


def test_a_resumed_run_drops_the_samples_that_it_dropped(tmp_path: Path) -> None:
    class Seen(Masked):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.losses += batch[0][:, 0].tolist()
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            pass

    def run(name: str, size: int, *more: pl.Callback, resume: Any = None) -> list[float]:
        callbacks = [SeedControl(1), GradientAccumulation(global_batch_size=8), *more]
        trainer = quiet_trainer(*callbacks, ExactCheckpoint(tmp_path / name, save_last=True), max_epochs=3)
        loader = DataLoader(TensorDataset(*(tensor[:14] for tensor in data(()).tensors)), size, True, drop_last=True)
        model = Seen()
        with contextlib.suppress(ZeroDivisionError):
            trainer.fit(model, loader, ckpt_path=resume)
        return model.losses

    whole = run("whole", 4)
    assert len(whole) == 3 * 12
    run("killed", 4, Kill())
    assert run("resumed", 8, resume=tmp_path / "killed" / "last.ckpt") == whole[12:]
