"""No step of a recipe waits for the GPU, with all callbacks that the command line adds.

Between two logs of the loss the host must run ahead of the device: one read of a tensor in a step, and each step takes
as long as its launches and its kernels one after the other. torch raises an error at such a read where it is told to.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

from benchmarks.harness.tiny_recipes import TINY_RECIPES
from recipes.seq2seq.recipe import Seq2SeqTranslator
from tests.cuda.conftest import Device
from tests.support.command_lines import Typed, type_line
from tests.support.devices import run_on

FIRST, LAST = 5, 12
"""The batches of the second epoch within which nothing may wait: all of them lie between two logs."""


def _forbid(device: torch.device, mode: str) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


class NoSync(pl.Callback):
    """Forbids waiting from the start of one batch to that of a later one, and in a validation but a translator's."""

    def __init__(self) -> None:
        self.batches = {"train": 0, "validate": 0}

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and FIRST <= batch_idx <= LAST:
            _forbid(pl_module.device, "error" if batch_idx < LAST else "default")
            self.batches["train"] += 1

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.current_epoch == 1 and not isinstance(pl_module, Seq2SeqTranslator):
            _forbid(pl_module.device, "error")
            self.batches["validate"] += 1

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        _forbid(pl_module.device, "default")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.print(f"checked {self.batches}")


def _type(name: str, device: str, folder: str) -> Typed:
    tiny = TINY_RECIPES[name]
    flags = [*tiny.flags, *f"--accelerator={device} --devices=1 --max-epochs=2 --batch-size=8 --accumulate=2".split()]
    flags += ["--log-every-n-steps=50", "--limit-train-batches=20"]
    flags += ["--ema=0.9", "--limit-test-batches=1", "--limit-val-batches=4"]
    return type_line(tiny.recipe, tiny.data, flags, folder, [f"{__name__}:NoSync"])


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_RECIPES)
def test_no_step_of_a_recipe_waits_for_the_device(device: Device, name: str, tmp_path: Path) -> None:
    ended = run_on(device, _type, 1, name, device, str(tmp_path))[0]
    assert ended.status == 0, ended.err
    assert "'train': 16" in ended.out, "of 8 updates of 2 micro-batches"
    assert ("'validate': 0" in ended.out) == (name == "seq2seq")
