"""Values and flags between the ranks."""

import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.lib.ranks import FlagAllReduce, gather
from callbacks.preemption import Preemption
from tests.support.ranks import run_ranks
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer


def _gathered() -> list[Any]:
    dist.init_process_group("gloo")
    return gather({"rank": dist.get_rank(), "values": torch.full((2,), dist.get_rank())})


def test_every_rank_gets_the_values_of_all_by_rank() -> None:
    for found in run_ranks(_gathered, 2):
        assert [of_rank["rank"] for of_rank in found] == [0, 1]
        assert torch.equal(found[1]["values"], torch.ones(2, dtype=torch.int64))


def test_one_process_keeps_its_value() -> None:
    value = object()
    assert gather(value) == [value]


class Delay(pl.Callback):
    """Delays the last all-reduce of rank 1 by some seconds."""

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 1:
            time.sleep(8)


def _wait_for_rank_1() -> str:
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=2))
    trainer = quiet_trainer(Delay(), Preemption(), strategy=strategy, devices=2, max_steps=1)
    try:
        loader = DataLoader(TensorDataset(*noisy_images(8)), 4)
        trainer.fit(Tiny(image_network().double(), torch.optim.SGD, lr=0.1), loader)
    except RuntimeError as error:
        return str(error)
    return ""


def _maximum() -> list[float]:
    dist.init_process_group("gloo")
    return FlagAllReduce(2).maximum(dist.get_rank(), -dist.get_rank())


def test_a_maximum_is_that_of_all_ranks() -> None:
    assert run_ranks(_maximum, 2) == [[1.0, 0.0]] * 2


@pytest.mark.slow
def test_a_flag_all_reduce_uses_the_strategys_timeout() -> None:
    assert "Timed out" in run_ranks(_wait_for_rank_1, 2)[0]
