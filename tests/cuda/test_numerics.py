"""On a GPU the parts compute what they compute elsewhere: normalization, loss scaling, noise."""

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.step_metrics import FiniteWeights, TrainingMonitor
from callbacks.sync_bn import sync_batchnorm
from callbacks.warmup_lr import WarmupLR
from recipes.dropout import Dropout
from tests.callbacks.test_sync_bn import gaps_to_whole_batch
from tests.cuda.conftest import Device
from tests.support.devices import on_device, precision_on, run_on
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer


def _sync_bn_gaps(sizes: tuple[int, int]) -> list[dict[str, float]]:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    x, upstream = (torch.randn(sum(sizes), 3, 4, 4, dtype=torch.float64, device="cuda") for _ in range(2))
    x = x.to(memory_format=torch.channels_last) * 3 + 2
    layer = nn.BatchNorm2d(3).double().cuda()
    return [
        gaps_to_whole_batch(layer, x, upstream, sizes, convert)
        for convert in (sync_batchnorm, nn.SyncBatchNorm.convert_sync_batchnorm)
    ]


@pytest.mark.cuda  # On the CPU these are the layers of tests/callbacks/test_sync_bn.py.
def test_sync_bn_equals_one_process_on_the_whole_batch() -> None:
    for ours, torchs in run_on("cuda", _sync_bn_gaps, 2, (11, 5)):
        assert max(ours.values()) < 1e-12, ours
        assert max(torchs.values()) < 1e-12, torchs


class _Overflowing(Tiny):
    """The second of the micro-batches of the third update has infinite gradients."""

    micro_batches = 0

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.micro_batches += 1
        return loss * float("inf") if self.micro_batches == 6 else loss


class _Records(pl.Callback):
    """The weights and the loss's scale after each update."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.scales: list[float] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if len(self.weights) < trainer.global_step:
            self.weights.append(torch.cat([p.detach().flatten().cpu().clone() for p in pl_module.parameters()]))
            self.scales.append(trainer.precision_plugin.scaler.get_scale())


def _overflow(device: str, fused: bool) -> tuple[list[Tensor], list[float], list[float]]:
    records, warmup = _Records(), WarmupLR("12 steps")
    inputs, targets = noisy_images(48)
    ours = GradientAccumulation(2), warmup, FiniteWeights(), TrainingMonitor(), records
    trainer = quiet_trainer(*ours, log_every_n_steps=1, **on_device(device) | precision_on(device, "16-mixed"))
    module = _Overflowing(image_network().float(), torch.optim.AdamW, lr=0.01, fused=fused)
    trainer.fit(module, DataLoader(TensorDataset(inputs.float(), targets), 4))
    return records.weights, records.scales, warmup.state_dict()["updates"]


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_one_micro_batch_skips_the_whole_update(device, fused) -> None:
    weights, scales, warmed_up = run_on(device, _overflow, 1, device, fused)[0]
    changed = [not torch.equal(before, after) for before, after in pairwise(weights)]
    assert changed == [True, False, True, True, True]
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
    assert warmed_up == [5], "the update that was skipped does not count"


def test_dropout_of_the_recipes_is_that_of_torch_on_a_gpu(device: Device) -> None:
    drawn = []
    for layer in (Dropout(0.3), nn.Dropout(0.3)):
        torch.manual_seed(1)
        drawn.append(layer(torch.ones(64, 100, device=device)))
    assert torch.equal(*drawn) == (device != "cpu"), "a CPU has masks of its own"
