"""On a GPU the parts compute what they compute elsewhere: normalisation, loss scaling, noise, optimisers, layouts."""

import copy
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.finite_weights import FiniteWeights
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.batch_norm import sync_batchnorm
from callbacks.lib.sample_noise import dropout_factors, sample_keys
from callbacks.seed_control import SeedControl
from callbacks.training_monitor import TrainingMonitor
from callbacks.warmup_lr import WarmupLR
from recipes.optim import build_optimizer
from recipes.resnet.network import build_resnet
from tests.cuda.conftest import Device
from tests.support.devices import on_device, precision_on, run_on
from tests.support.tables import Tiny, image_network, noisy_images, silence


def _sync_bn_gaps(device: str, sizes: tuple[int, int]) -> dict[str, float]:
    """Differences to one process on the whole batch, of our layers and, on a GPU, of torch's."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    x, upstream = (torch.randn(sum(sizes), 3, 4, 4, dtype=torch.float64, device=device) for _ in range(2))
    x = x.to(memory_format=torch.channels_last) * 3 + 2
    plain = nn.BatchNorm2d(3).double().to(device)
    mine = slice(0, sizes[0]) if dist.get_rank() == 0 else slice(sizes[0], None)
    layers = {"ours": copy.deepcopy(plain)}
    sync_batchnorm(layers["ours"])
    if device == "cuda":
        layers["torch's"] = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    whole = x.clone().requires_grad_()
    expected = plain(whole)
    expected.backward(upstream)
    gaps: dict[str, float] = {}
    for name, layer in layers.items():
        part = x[mine].clone().requires_grad_()
        output = layer(part)
        output.backward(upstream[mine])
        pairs = {
            "output": (output, expected[mine]),
            "input gradient": (part.grad, whole.grad[mine]),  # type: ignore[index]
            "mean": (layer.running_mean, plain.running_mean),
            "variance": (layer.running_var, plain.running_var),
        }
        gaps |= {f"{name}, {key}": float((found - wanted).abs().max()) for key, (found, wanted) in pairs.items()}
    return gaps


def test_sync_bn_equals_torchs_and_one_process_on_the_whole_batch(device: Device) -> None:
    for gaps in run_on(device, _sync_bn_gaps, 2, device, (11, 5)):
        assert len(gaps) == (8 if device == "cuda" else 4)
        assert max(gaps.values()) < 1e-12, gaps


class _Overflowing(Tiny):
    """The second of the micro-batches of the third update has infinite gradients."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 5 else loss


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
    silence()
    records, warmup = _Records(), WarmupLR("12 steps")
    inputs, targets = noisy_images(48)
    trainer = pl.Trainer(
        max_epochs=1,
        enable_checkpointing=False,
        callbacks=[GradientAccumulation(2), warmup, FiniteWeights(), TrainingMonitor(every=1), records],
        **on_device(device) | precision_on(device, "16-mixed"),
    )
    module = _Overflowing(image_network().float(), torch.optim.AdamW, lr=0.01, fused=fused)
    trainer.fit(module, DataLoader(TensorDataset(inputs.float(), targets), 4))
    return records.weights, records.scales, warmup.state_dict()["updates"]


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_one_micro_batch_skips_the_whole_update_and_the_warm_up_waits(
    device: Device, fused: bool
) -> None:
    weights, scales, warmed_up = run_on(device, _overflow, 1, device, fused)[0]
    changed = [not torch.equal(before, after) for before, after in pairwise(weights)]
    assert changed == [True, False, True, True, True]
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
    assert warmed_up == [5], "the update that was skipped does not count"


class _Draws(Tiny):
    """What its steps draw on the device."""

    drawn: list[Tensor]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.drawn.append(torch.rand(4, device=self.device).cpu())
        return super().training_step(batch, batch_idx)


def _drawn(device: str, seed: int) -> list[Tensor]:
    silence()
    seeds = SeedControl(seed)
    trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, callbacks=[seeds], **on_device(device, 2))
    module = _Draws(image_network().double(), torch.optim.SGD, lr=0.1)
    module.drawn = []
    trainer.fit(module, DataLoader(TensorDataset(*noisy_images(16)), 4))
    return module.drawn


def _drawn_thrice(device: str) -> list[list[Tensor]]:
    return [_drawn(device, 1), _drawn(device, 1), _drawn(device, 2)]


def test_noise_on_the_device_is_equal_on_a_rerun_and_different_on_each_rank_and_step(device: Device) -> None:
    ranks = run_on(device, _drawn_thrice, 2, device)
    for first, second, other in ranks:
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
        assert not any(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    drawn = {tuple(values.tolist()) for first, _, _ in ranks for values in first}
    assert len(drawn) == 2 * len(ranks[0][0])


def test_masks_of_stateless_dropout_have_the_same_bits_on_every_device(device: Device) -> None:
    positions = torch.arange(64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        here, there = (
            dropout_factors(sample_keys(1, 3, positions.to(place)), 100, 0.3, layer=2, dtype=dtype).cpu()
            for place in (device, "cpu")
        )
        assert torch.equal(here, there)
        assert 0.25 < float((here == 0).float().mean()) < 0.35


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_fused_optimizer_takes_the_steps_of_the_one_that_is_not(device: Device, name: str) -> None:
    def steps(fused: bool | None) -> tuple[Tensor, bool]:
        torch.manual_seed(1)
        layer = nn.Linear(20, 10, dtype=torch.float64).to(device)
        inputs = torch.randn(8, 20, dtype=torch.float64).to(device)
        optimizer = build_optimizer(name, [{"params": list(layer.parameters())}], lr=0.01, fused=fused)
        for _ in range(5):
            optimizer.zero_grad()
            layer(inputs).square().sum().backward()
            optimizer.step()
        return layer.weight.detach().cpu(), bool(optimizer.defaults["fused"])

    (fused, is_fused), (plain, _) = steps(None), steps(False)
    assert is_fused, "by default, where the device has it"
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)


def test_channels_last_changes_nothing_but_the_layout(device: Device) -> None:
    def gradients(memory_format: torch.memory_format) -> list[Tensor]:
        torch.manual_seed(1)
        network = build_resnet("resnet18", 10, small_images=True).to(device, memory_format=memory_format)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)  # Where it is zero, nothing passes through the block.
        images = torch.randn(16, 3, 8, 8).to(device).contiguous(memory_format=memory_format)
        F.cross_entropy(network(images), torch.arange(16, device=device) % 10).backward()
        assert network.layer1[0].conv1.weight.is_contiguous(memory_format=memory_format)
        return [parameter.grad.cpu() for parameter in network.parameters() if parameter.grad is not None]

    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        pairs = list(zip(gradients(torch.contiguous_format), gradients(torch.channels_last), strict=True))
    assert max(float((one - other).norm() / one.norm()) for one, other in pairs) < 1e-2


def _peaks(device: str, micro_batches: list[int]) -> list[int]:
    """The most bytes that a run has taken on the device, by the number of micro-batches; 0 on a CPU."""
    silence()
    peaks = []
    wide = 2048 if device == "cuda" else 16
    for count in micro_batches:
        torch.manual_seed(1)
        network = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(wide, wide), nn.Tanh())))
        module = Tiny(network, torch.optim.SGD, lr=0.01)
        data = TensorDataset(torch.randn(16 * wide, wide), torch.zeros(16 * wide, dtype=torch.int64))
        trainer = pl.Trainer(
            max_steps=2, enable_checkpointing=False, callbacks=[GradientAccumulation(count)], **on_device(device)
        )
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.fit(module, DataLoader(data, wide))
        assert trainer.global_step == 2
        peaks.append(torch.cuda.max_memory_allocated() if device == "cuda" else 0)
    return peaks


def test_memory_does_not_grow_with_the_number_of_micro_batches(device: Device) -> None:
    few, many = run_on(device, _peaks, 1, device, [2, 8])[0]
    print(f"2 micro-batches {few / 2**20:.0f} MiB, 8 {many / 2**20:.0f} MiB")
    assert many <= 1.02 * few
    assert few > 2**28 or device == "cpu"
