"""What ranks exchange is JSON: nothing that arrives can run code."""

import json
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.lib.exchange import FlagAllReduce, broadcast, decode, encode, gather, without_pickles
from callbacks.preemption import Preemption
from tests.support.ranks import run_ranks
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer

VALUES: list[Any] = [
    None,
    True,
    7,
    0.1 + 0.2,
    float("inf"),
    "ä\n\0",
    [1, [2, []]],
    (1, "a", (None,)),
    {"a": 1, 2: {"tuple": [1]}, (3, 4): {}},
    Path("runs/a b"),
    torch.tensor(0.5, dtype=torch.float64),
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    torch.empty(0, 3, dtype=torch.int16),
    torch.tensor([True, False]),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_arrives_as_it_was_sent(value: Any) -> None:
    assert same(decode(encode(value)), value)


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("run",)


def test_an_object_is_refused_by_its_name_and_bytes_of_a_pickle_are_no_value() -> None:
    with pytest.raises(TypeError, match="tensors, not Runs: a pickle of it could run code"):
        encode({"a": [Runs()]})
    for data in (pickle.dumps(Runs()), json.dumps({"object": "os.system"}).encode()):
        with pytest.raises(ValueError, match="decode|no kind of value"):
            decode(data)
    assert not Path("run").exists()


def _exchanged() -> list[Any]:
    strategy = quiet_trainer(world_size=2).strategy
    strategy.setup_environment()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    distributed.distributed_c10d._tensor_to_object = refuse
    rank = distributed.get_rank()
    found = [
        broadcast(strategy, (rank, torch.ones(3))),
        broadcast(strategy, rank, src=1),
        gather(strategy, ["rank", rank]),
    ]
    without_pickles(strategy)
    return [*found, strategy.broadcast({"of": rank}), strategy.broadcast("b" if rank else "a", 1)]


def test_two_ranks_exchange_values_without_unpickling() -> None:
    for found in run_ranks(_exchanged, 2):
        assert same(found[0][1], torch.ones(3))
        assert found[0][0] == 0
        assert found[1:] == [1, [["rank", 0], ["rank", 1]], {"of": 0}, "b"]


def test_one_process_keeps_its_value() -> None:
    strategy = quiet_trainer().strategy
    value = Runs()
    without_pickles(strategy)
    assert broadcast(strategy, value) is value
    assert strategy.broadcast(value) is value
    assert gather(strategy, value) == [value]


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
def test_an_all_reduce_of_flags_times_out_with_the_strategys_timeout() -> None:
    assert "Timed out" in run_ranks(_wait_for_rank_1, 2)[0]
