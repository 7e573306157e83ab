"""What callbacks say of strategies that split the model over the devices."""

import logging
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.support.ranks import run_ranks
from tests.support.tables import CALLBACKS, Tiny, image_network, noisy_images, quiet_trainer

REJECTING = ("GradientAccumulation", "SyncBN", "FreezeLayers", "WeightAveraging")


class Sharded(Tiny):
    """Its parameters split over the ranks."""

    def configure_model(self) -> None:
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def fit(name: str) -> tuple[int, str, list[str]]:
    inputs, targets = noisy_images(16)
    module = Sharded(image_network().float(), torch.optim.SGD, lr=0.1)
    loader: Any = DataLoader(TensorDataset(inputs.float(), targets), 4)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = quiet_trainer(CALLBACKS[name](), strategy=strategy, devices=2)
    said: list[logging.LogRecord] = []
    logging.getLogger("lightning_recipes").addFilter(lambda record: said.append(record) is None)
    try:
        trainer.fit(module, loader)
    except ValueError as error:
        return trainer.global_step, str(error), []
    return trainer.global_step, "", [record.getMessage() for record in said]


def fit_each() -> dict[str, tuple[int, str, list[str]]]:
    return {name: fit(name) for name in (*REJECTING, "SeedControl", "RankConsistency")}


def test_a_callback_that_cannot_keep_its_promise_is_rejected():
    results = run_ranks(fit_each, 2)
    for found in results:
        for name in REJECTING:
            steps, error, _ = found[name]
            assert steps == 0
            assert error.startswith("ModelParallelStrategy")
            assert "pass strategy='ddp'" in error.replace("pass\n", "pass ")
        assert found["SeedControl"][:2] == found["RankConsistency"][:2] == (4, "")
    said = [[text for text in found["RankConsistency"][2] if "ModelParallelStrategy" in text] for found in results]
    assert len(said[0]) == 1
    assert said[0][0].startswith("warning: RankConsistency")
    assert not said[1]
