"""What callbacks say of strategies that split the model over the devices."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from callbacks import (
    FreezeLayers,
    GradientAccumulation,
    Preemption,
    RankConsistency,
    SeedControl,
    SyncBN,
    WeightAveraging,
)
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.lib.signals import Preempted
from tests.end_to_end.test_launch import by_torchrun
from tests.support.nodes import start
from tests.support.ranks import free_port, run_ranks
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, silence

CALLBACKS = {
    "GradientAccumulation": lambda: GradientAccumulation(2),
    "SyncBN": lambda: SyncBN(),
    "FreezeLayers": lambda: FreezeLayers(until="1"),
    "RankConsistency": lambda: RankConsistency(),
    "SeedControl": lambda: SeedControl(seed=1),
    "WeightAveraging": lambda: WeightAveraging(ema=0.9),
}


class Sharded(Tiny):
    """Its parameters split over the ranks."""

    def configure_model(self) -> None:
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def fit(name: str) -> tuple[int, str, list[str]]:
    silence()
    callback = CALLBACKS[name]()
    inputs, targets = noisy_images(16)
    module = Sharded(image_network().float(), torch.optim.SGD, lr=0.1)
    loader: Any = DataLoader(TensorDataset(inputs.float(), targets), 4)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = pl.Trainer(
        **QUIET, strategy=strategy, devices=2, max_epochs=1, callbacks=[callback], enable_checkpointing=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader)
        except ValueError as error:
            return trainer.global_step, str(error), []
    return trainer.global_step, "", [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", ["GradientAccumulation", "SyncBN", "FreezeLayers", "WeightAveraging"])
def test_a_callback_that_cannot_keep_its_promise_names_the_strategy_before_the_first_update(name):
    for steps, error, _ in run_ranks(fit, 2, name):
        assert steps == 0
        assert error.startswith("ModelParallelStrategy")
        assert 'pass strategy="ddp"' in error.replace("pass\n", "pass ")


def test_a_callback_that_can_do_less_says_so_once_and_the_run_goes_on():
    results = run_ranks(fit, 2, "RankConsistency")
    assert [(steps, error) for steps, error, _ in results] == [(4, ""), (4, "")]
    said = [[text for text in heard if "ModelParallelStrategy" in text] for _, _, heard in results]
    assert len(said[0]) == 1
    assert said[0][0].startswith("RankConsistency")
    assert not said[1]


def test_seeds_work_with_any_strategy():
    assert [result[:2] for result in run_ranks(fit, 2, "SeedControl")] == [(4, ""), (4, "")]


class Tell(pl.Callback):
    """Sends SIGTERM to its own process, if it is rank 1, after three updates."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def told_to_end(accumulates: bool, folder: Path) -> tuple[int, int]:
    silence()
    accumulation = [GradientAccumulation()] if accumulates else []
    callbacks = [Preemption(), ExactCheckpoint(folder, save_last=True), *accumulation, Tell()]
    inputs, targets = noisy_images(48)
    module = Sharded(image_network().float(), torch.optim.SGD, lr=0.1)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    trainer = pl.Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=1, callbacks=callbacks)
    loader: Any = DataLoader(TensorDataset(inputs.float(), targets), 4)
    try:
        trainer.fit(module, loader)
    except Preempted as stopped:
        return int(stopped.code or 0), trainer.global_step
    return 0, trainer.global_step


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_signal_to_one_rank_ends_a_run_whose_gradients_nobody_can_weigh(accumulates: bool, tmp_path: Path) -> None:
    # Of 12 updates; the vote of the third is heard after the fourth.
    assert run_ranks(told_to_end, 2, accumulates, tmp_path) == [(143, 4), (143, 4)]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4


def test_the_command_line_splits_the_network_under_fsdp2_tests_its_one_checkpoint_file_and_verifies_it(tmp_path):
    zero, one = start(tmp_path, [(["--name", "run", "--strategy", "fsdp2"], env) for env in by_torchrun(free_port())])
    assert (zero.status, one.status) == (0, 0), (zero, one)
    assert "GradientAccumulation" not in zero.err
    checkpoint = torch.load(tmp_path / "runs/failing/run/checkpoints/last.ckpt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()} == {
        "network.weight": (1, 1),
        "network.bias": (1,),
    }
    # Each rank holds a part of the weights; the hash is of the whole, which rank 0 saves.
    for path in tmp_path.glob("prepared-*"):
        path.unlink()
    verify = ["verify", "runs/failing/run"]
    zero, one = start(tmp_path, [(verify, env) for env in by_torchrun(free_port())])
    assert (zero.status, one.status) == (0, 0), (zero, one)
    assert "equal to the bit" in zero.out
