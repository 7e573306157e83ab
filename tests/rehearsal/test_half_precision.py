"""Half precision: autocast and the loss scaler on both devices, and an update that overflows, skipped as a whole.

float16 with loss scaling runs on the CPU here through torch's own GradScaler, where ``precision="16-mixed"`` would take
bfloat16, and on the stand-in device. Neither shows what overflows in CUDA's kernels.
"""

from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.finite_weights import FiniteWeights
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl
from callbacks.sync_bn import SyncBN
from callbacks.train_loss import TrainLoss
from callbacks.training_monitor import TrainingMonitor
from callbacks.warmup_lr import WarmupLR
from callbacks.weight_averaging import RAW_WEIGHTS, WeightAveraging
from datamodules.loading.loaders import TrainLoader
from tests.rehearsal.runs import fit, largest_difference
from tests.rehearsal.stand_in import NAME, stand_in_device
from tests.rehearsal.test_no_synchronisation import _loaders, refused
from tests.support.ranks import run_ranks
from tests.support.tables import CALLBACKS, QUIET, Tiny, image_network, noisy_images, on_ranks, silence

Precision = Literal["16-mixed", "bf16-mixed"]
SKIPPED = 2
"""The update whose gradients overflow, from 0."""


class Overflows(Tiny):
    """In the first epoch one micro-batch gives gradients that float16 cannot hold, on one rank."""

    at: int | None = None
    rank = 0

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        here = (self.trainer.current_epoch, batch_idx, self.trainer.global_rank) == (0, self.at, self.rank)
        return loss * 1e38 if here else loss


class Scales(pl.Callback):
    """The scale of the loss after each batch, read when the run has ended."""

    def __init__(self) -> None:
        self.scales: list[Any] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        scaler: Any = trainer.precision_plugin.scaler
        self.scales.append(scaler._scale.clone())

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scales = [float(scale) for scale in self.scales]


def _half(precision: Precision, fused: bool, names: Any) -> Any:
    """A run in mixed precision on the CPU and on the device: scales, difference, waits in training steps, faults."""
    recorded: list[Scales] = []

    def make() -> Any:
        inputs, targets = noisy_images(22)
        module = Overflows(image_network().float(), torch.optim.SGD, lr=0.05, fused=fused)
        callbacks = [CALLBACKS[name]() for name in names]
        if precision == "16-mixed":
            module.at = 1
            recorded.append(Scales())
            callbacks.append(recorded[-1])
        return module, _loaders((inputs.float(), targets)), callbacks

    settings = {"enable_progress_bar": False, "max_epochs": 1}

    def plugin(device: str) -> MixedPrecision:
        scaler = torch.amp.GradScaler(device, init_scale=1024.0) if precision == "16-mixed" else None
        return MixedPrecision(precision, device, scaler)

    on_cpu = fit(make, plugins=[plugin("cpu")], **settings)
    with stand_in_device() as device:
        on_device = fit(make, device, plugins=[plugin(NAME)], **settings)
    waits = [repr(wait) for wait in on_device.waits if wait.phase == "training step"]
    scales = [callback.scales for callback in recorded]
    return scales, largest_difference(on_cpu, on_device), waits, refused(on_device.waits)


def _halves() -> dict[str, Any]:
    return {
        "bf16": _half("bf16-mixed", True, ["TrainLoss", "GradientAccumulation"]),
        "fp16": _half("16-mixed", False, ["GradientAccumulation"]),
        "fp16, fused": _half("16-mixed", True, ["WarmupLR"]),
    }


def test_autocast_and_the_loss_scaler_do_the_same_on_both_devices() -> None:
    """The scaler skips the update whose gradients overflow, and no other, on the CPU as on the device."""
    found = run_ranks(_halves, 1)[0]
    for name, (scales, difference, _, _) in found.items():
        # Which operations run in half precision differs between the lists of the two devices.
        assert difference < 0.02, name
        if name != "bf16":
            assert scales[0] == scales[1]
            assert sum(later < earlier for earlier, later in zip(scales[0], scales[0][1:])) == 1, scales
    assert not found["bf16"][3]
    # torch's scaler reads whether to step, once an update, unless the optimiser decides on the device.
    assert len([wait for wait in found["fp16"][2] if "_maybe_opt_step" in wait]) == 3
    # `RateFactor` looks whether an update was skipped, in the four of the warm-up and the one that was.
    waits = found["fp16, fused"][3]
    assert len(waits) == 5
    assert all("skipped_on_device" in wait for wait in waits), waits


def _run(
    folder: Path,
    resume: Path | None = None,
    at: int | None = 2 * SKIPPED + 1,
    rank: int = 0,
    fused: bool = False,
    devices: int = 1,
    left_out: bool = False,
) -> dict[int, dict[str, Any]]:
    """Two epochs of six updates of two micro-batches, with what counts updates; the checkpoint after each update.

    Args:
        at: the micro-batch of the first epoch that overflows; None for none.
        rank: where it does.
        left_out: one epoch on batches without those of the update that would be skipped.
    """
    silence()
    seeds = SeedControl(1)
    module = Overflows(image_network().float(), torch.optim.AdamW, lr=0.01, fused=fused)
    module.at, module.rank = at, rank
    # It doubles after three updates that were made.
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
    saving = ExactCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [GradientAccumulation(2), seeds, WarmupLR("5 steps"), WeightAveraging(ema=0.9), FiniteWeights()]
    trainer = pl.Trainer(
        **QUIET,
        **on_ranks(devices),
        plugins=[plugin],
        max_epochs=1 if left_out else 2,
        enable_progress_bar=False,
        log_every_n_steps=1,
        callbacks=[*callbacks, SyncBN(), TrainLoss(), TrainingMonitor(every=1), saving],
    )
    inputs, targets = noisy_images(48)
    loader: Any = TrainLoader(
        inputs.float(), targets, torch.arange(48), 4 // devices, 1, trainer.global_rank, trainer.world_size
    )
    if left_out:
        kept = [batch for number, batch in enumerate(loader) if number // 2 != SKIPPED]
        loader = DataLoader(kept, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=resume, weights_only=True)
    return {int(path.stem[5:]): torch.load(path, weights_only=True) for path in folder.glob("step=*.ckpt")}


def _weights(checkpoint: dict[str, Any], averaged: bool = False) -> dict[str, Tensor]:
    """Without the statistics of BatchNorm, which forward passes move."""
    state: dict[str, Tensor] = checkpoint["state_dict" if averaged else RAW_WEIGHTS]
    return {name: value for name, value in state.items() if name.endswith(("weight", "bias"))}


def _tensors(checkpoint: dict[str, Any]) -> list[Tensor]:
    """Averages, weights and the optimiser's state."""
    moments = [value for state in checkpoint["optimizer_states"][0]["state"].values() for value in state.values()]
    return [*_weights(checkpoint, averaged=True).values(), *_weights(checkpoint).values(), *moments]


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_tensors(one), _tensors(other), strict=True))


def _scale(checkpoint: dict[str, Any]) -> tuple[float, int]:
    """The scale, and for how many updates in succession it has been good."""
    scaler = checkpoint["MixedPrecision"]
    return scaler["scale"], scaler["_growth_tracker"]


def _counts(checkpoint: dict[str, Any]) -> tuple[float, int]:
    """Updates of the warm-up, and samples of the average."""
    states = checkpoint["callbacks"]
    return states["WarmupLR"]["updates"][0], states["AveragedWeights"]["samples"]


SCALES = [(1024.0, 1), (1024.0, 2), (512.0, 0), (512.0, 1), (512.0, 2), (1024.0, 0)]
"""After each update of the first epoch."""


def test_an_update_that_overflows_changes_nothing_but_the_scale(tmp_path: Path) -> None:
    states = _run(tmp_path / "all")
    before, after = states[SKIPPED], states[SKIPPED + 1]
    assert _equal(before, after)
    assert not _equal(after, states[SKIPPED + 2])
    assert [_scale(states[step]) for step in range(1, 7)] == SCALES
    assert [_counts(states[step]) for step in range(1, 7)] == [(1, 1), (2, 2), (2, 2), (3, 3), (4, 4), (5, 5)]
    without = _run(tmp_path / "without", at=None, left_out=True)
    for found, expected in zip(_tensors(states[6]), _tensors(without[5]), strict=True):
        # The gradients of the two updates that follow are of another scale, a power of two.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_fused_optimiser_skips_on_the_device_and_the_average_takes_the_same_weights_again(tmp_path: Path) -> None:
    plain, fused = (_run(tmp_path / str(fused), fused=fused) for fused in (False, True))
    assert [_scale(fused[step]) for step in range(1, 7)] == SCALES
    assert [_counts(fused[step]) for step in range(1, 7)] == [(1, 1), (2, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    for name, before in _weights(fused[SKIPPED]).items():
        assert torch.equal(_weights(fused[SKIPPED + 1])[name], before), name
        torch.testing.assert_close(_weights(fused[12])[name], _weights(plain[12])[name], rtol=1e-4, atol=1e-5)


def test_a_run_resumed_beside_an_overflow_goes_on_with_its_scale_to_the_bit(tmp_path: Path) -> None:
    states = _run(tmp_path / "all")
    for step in (SKIPPED, SKIPPED + 1, SKIPPED + 3):
        resumed = _run(tmp_path / f"from-{step}", tmp_path / f"all/step={step}.ckpt")
        for later in range(step + 1, 13):
            assert _equal(resumed[later], states[later]), (step, later)
            assert _scale(resumed[later]) == _scale(states[later])
            assert _counts(resumed[later]) == _counts(states[later])


def _on_two(folder: Path) -> tuple[dict[str, Tensor], list[Any]]:
    states = _run(folder, rank=1, devices=2)
    torch.distributed.barrier()
    return _weights(states[12]), [(_scale(states[step]), _counts(states[step])) for step in range(1, 13)]


def test_an_overflow_on_one_rank_skips_the_update_on_all(tmp_path: Path) -> None:
    states = _run(tmp_path / "one")
    expected = _weights(states[12])
    del expected["network.0.0.bias"]  # BatchNorm takes it off again, so its gradient is rounding alone.
    for weights, counts in run_ranks(_on_two, 2, tmp_path / "two"):
        assert counts == [(_scale(states[step]), _counts(states[step])) for step in range(1, 13)]
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0.02, atol=2e-3, msg=name)
