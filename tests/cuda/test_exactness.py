"""On one GPU a run learns the same however it is split or interrupted."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl
from callbacks.step_metrics import TrainingMonitor
from callbacks.warmup_lr import WarmupLR
from callbacks.weight_averaging import WeightAveraging
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.cuda.conftest import Device
from tests.end_to_end import test_equal_bits as equal_bits
from tests.end_to_end.test_combinations import judge, settings_of
from tests.end_to_end.test_exact_resume import TRAIN, VALIDATION, adamw
from tests.end_to_end.test_split_table import SPLITS
from tests.support.combinations import cut_of, live_all
from tests.support.devices import on_device, precision_on, run_on
from tests.support.tables import Tiny, image_network, quiet_trainer


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_split_run_equals_plain_torch(device, world_size: int, tmp_path: Path) -> None:
    rows = {number: row for number, row in enumerate(SPLITS) if cut_of(row).processes == world_size}
    rows = dict(list(rows.items())[: 2 if device == "cpu" else None])  # The others are in the table of splits.
    ranks = run_on(device, live_all, world_size, rows, tmp_path, False, on_device(device, world_size))
    for number, row in rows.items():
        error, problems = judge(row, [[rank[number] for rank in ranks]])
        print(f"{settings_of(row)}: {error:.0e}")
        assert not problems
        assert error <= {"float32": 1e-5, "float64": 1e-10}[row["dtype"]], row


def _hashes(device: str, world_size: int) -> dict[equal_bits.Row, str]:
    options = on_device(device, world_size) | {"deterministic": "warn"}
    return {row: equal_bits.train(row, world_size, on=options) for row in equal_bits.FEW}


def test_two_processes_have_the_hash_of_one(device: Device) -> None:
    alone, *shared = [found for size in (1, 2) for found in run_on(device, _hashes, size, device, size)]
    print("\n".join(f"{row}: {found}" for row, found in alone.items()))
    assert shared == [alone, alone]


def _fit(device: str, folder: Path, precision: str, updates: int | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Train on from the folder's last checkpoint; the module and what it has saved at the end, on the CPU."""
    stop = pl.Callback()
    stop.on_train_batch_end = lambda trainer, *_: setattr(  # type: ignore[method-assign]
        trainer, "should_stop", trainer.global_step == updates
    )
    ours = [GradientAccumulation(2), WarmupLR("60%"), WeightAveraging(ema=0.9), TrainingMonitor(), stop]
    saves = ExactCheckpoint(folder, save_last=True, every_n_train_steps=1)
    settings = {"max_epochs": 3, "log_every_n_steps": 2, "deterministic": True}
    where = on_device(device) | precision_on(device, precision)
    trainer = quiet_trainer(SeedControl(seed), *ours, saves, **settings | where)
    loader = TrainLoader(*TRAIN, torch.arange(50), 4, 1)
    validation = EvaluationLoader(*VALIDATION, torch.arange(9), 4)
    last = folder / "last.ckpt"
    module = Tiny(image_network(dropout=0.3), adamw, fused=True)
    trainer.fit(module, loader, validation, ckpt_path=last if last.exists() else None, weights_only=True)
    found = dict(module.state_dict())
    saved = torch.load(folder / "last.ckpt", map_location="cpu", weights_only=True)
    found |= {f"saved {name}": tensor for name, tensor in saved["state_dict"].items()}
    return {name: tensor.cpu().clone() for name, tensor in found.items()}


def _interrupted(device: str, folder: str, precision: str) -> list[dict[str, Tensor]]:
    """A run, the same one in three parts that end within epochs, and one of another seed."""
    whole = _fit(device, Path(folder, "whole"), precision)
    for updates in (5, 11, None):
        parts = _fit(device, Path(folder, "parts"), precision, updates)
    return [whole, parts, _fit(device, Path(folder, "other"), precision, seed=2)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_resumed_run_ends_with_the_same_bits(device: Device, precision: str, tmp_path: Path) -> None:
    whole, parts, other = run_on(device, _interrupted, 1, device, str(tmp_path), precision)[0]
    differing = [name for name, value in whole.items() if not torch.equal(parts[name], value)]
    assert not differing
    assert not all(torch.equal(other[name], value) for name, value in whole.items())
