"""Flags of all ranks are read in time, and time out where a rank is missing."""

import time
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.lib.consensus import FlagAllReduce
from callbacks.preemption import Preemption
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, silence


class Delay(pl.Callback):
    """Delays the last all-reduce of rank 1 by some seconds."""

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 1:
            time.sleep(8)


def _wait_for_rank_1() -> tuple[float, str]:
    silence()
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=2))
    callbacks = [Delay(), Preemption()]
    trainer = pl.Trainer(
        **QUIET, strategy=strategy, devices=2, max_steps=1, callbacks=callbacks, enable_checkpointing=False
    )
    loader = DataLoader(TensorDataset(*noisy_images(8)), 4)
    began = time.monotonic()
    try:
        trainer.fit(Tiny(image_network().double(), torch.optim.SGD, lr=0.1), loader)
    except RuntimeError as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, ""


def _maximum() -> list[float]:
    dist.init_process_group("gloo")
    return FlagAllReduce(2).maximum(dist.get_rank(), -dist.get_rank())


def test_a_maximum_is_that_of_all_ranks() -> None:
    assert run_ranks(_maximum, 2) == [[1.0, 0.0]] * 2


@pytest.mark.slow
def test_an_all_reduce_of_flags_times_out_with_the_strategys_timeout() -> None:
    seconds, error = run_ranks(_wait_for_rank_1, 2)[0]
    assert "Timed out" in error
    assert seconds < 7
