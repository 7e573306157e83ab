"""The planted errors arrive where they are said to, and the limits hold."""

import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.out_of_memory import OutOfMemoryPlant, Phase, data_limit, memory_cgroup
from tests.support.ranks import run_ranks
from tests.support.tables import CLASSES, QUIET, Tiny, image_network, noisy_images


def _weights_after_failure(phase: Phase, fits: int) -> tuple[bool, list[bool], int]:
    """Whether the weights are as before, which have gradients, and the number of updates."""
    inputs, targets = noisy_images(16)
    loader = DataLoader(TensorDataset(inputs, targets), 8)
    module = Tiny(image_network().double(), torch.optim.SGD, lr=0.1)
    before = [parameter.clone() for parameter in module.parameters()]
    plant = OutOfMemoryPlant(phase, fits)
    trainer = pl.Trainer(
        **QUIET, max_epochs=1, callbacks=[plant], enable_progress_bar=False, enable_checkpointing=False
    )
    with pytest.raises(torch.OutOfMemoryError, match=f"Planted at {phase} of 8"):
        trainer.fit(module, loader, loader)
    assert plant.failed == [8]
    assert module.network(inputs).shape == (16, CLASSES)
    after = list(module.parameters())
    gradients = [parameter.grad is not None for parameter in after]
    return all(map(torch.equal, before, after)), gradients, trainer.global_step


def test_each_phase_leaves_what_it_leaves_on_a_gpu():
    assert _weights_after_failure("forward", 7) == (True, [False] * 6, 0)
    assert _weights_after_failure("backward", 7) == (True, [False, False, True, True, True, True], 0)
    assert _weights_after_failure("optimizer", 7) == (True, [True] * 6, 0)
    assert _weights_after_failure("midway", 7) == (False, [True] * 6, 0)
    assert _weights_after_failure("validation", 7)[2] == 2


def _allocate() -> str:
    with data_limit(50_000_000):
        torch.ones(5_000_000)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.ones(50_000_000)
    return str(torch.ones(50_000_000).shape)


def test_a_process_may_allocate_what_it_is_allowed():
    assert run_ranks(_allocate, 1) == ["torch.Size([50000000])"]


def test_a_cgroup_kills_what_takes_more():
    program = "x = bytearray({}); print(len(x))"
    with memory_cgroup(60_000_000) as prefix:
        fits = subprocess.run([*prefix, sys.executable, "-c", program.format(20_000_000)], check=True)
        killed = subprocess.run([*prefix, sys.executable, "-c", program.format(200_000_000)], check=False)
    assert (fits.returncode, killed.returncode) == (0, -9)
