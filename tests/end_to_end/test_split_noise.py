"""Noise of every kind is equal however the micro-batches of an epoch are dealt to the ranks.

Each run trains two epochs of five micro-batches on 1, 2 or 3 ranks, which take ranges of them; with 2 and 3 the last
step of some ranks is a surplus one.
"""

import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import stochastic_depth

from callbacks import SeedControl, micro_batch_seed, seed_generators
from recipes.dropout import Dropout
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, on_ranks, silence

MICRO_BATCHES = 5
EPOCHS = 2


class Ranges:
    """Deals each rank a range of an epoch's micro-batches; surplus steps have numbers behind those."""

    def __init__(self, rank: int, world_size: int) -> None:
        own = torch.arange(MICRO_BATCHES).tensor_split(world_size)
        self.numbers = own[rank].tolist()
        if len(self.numbers) < len(own[0]):
            self.numbers.append(MICRO_BATCHES + rank)

    def micro_batch_number(self, batch_idx: int) -> int:
        """In the epoch; the place behind the last step, whose number nobody draws from, has one, too."""
        return self.numbers[batch_idx] if batch_idx < len(self.numbers) else 2 * MICRO_BATCHES

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.full((2, 3, 4), float(number)) for number in self.numbers)


def draw_every_kind(recurrent: nn.GRU) -> list[Any]:
    """Noise of layers and functions; `recurrent` drops between its layers."""
    ones = torch.ones(2, 3, 4)
    return [
        F.dropout(ones).tolist(),
        torch.randn(3).tolist(),
        Dropout(0.5)(ones).tolist(),
        recurrent(ones)[0].tolist(),
        stochastic_depth(torch.ones(8, 2), 0.5, "row").tolist(),
        random.random(),
        np.random.rand(),
    ]


class Noisy(pl.LightningModule):
    """Remembers what it drew in each micro-batch, in the transfer of the batch and in the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.recurrent = nn.GRU(4, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.drawn: dict[tuple[int, int], list[Any]] = {}

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.transferred = torch.rand(()).item()
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        drawn = [self.transferred, *draw_every_kind(self.recurrent)]
        self.drawn[self.current_epoch, int(batch[0, 0, 0])] = drawn
        return self.recurrent(batch)[0].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(world_size: int) -> dict[tuple[int, int], list[Any]]:
    silence()
    options: dict[str, Any] = QUIET | on_ranks(world_size) | {"enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=EPOCHS, callbacks=[SeedControl(1)], enable_progress_bar=False, **options)
    module = Noisy()
    trainer.fit(module, Ranges(trainer.global_rank, world_size))
    return module.drawn


@pytest.fixture(scope="module")
def alone() -> dict[tuple[int, int], list[Any]]:
    """What one device draws in each epoch and micro-batch."""
    return train(1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_noise_is_equal_on_any_number_of_ranks(world_size: int, alone: dict) -> None:
    ranks = run_ranks(train, world_size, world_size)
    surplus = [key for rank in ranks for key in rank if key[1] >= MICRO_BATCHES]
    found = {key: drawn for rank in ranks for key, drawn in rank.items() if key not in surplus}
    assert len(surplus) == EPOCHS
    assert found.keys() == alone.keys()
    assert [key for key, drawn in alone.items() if found[key] != drawn] == []


def test_every_micro_batch_has_noise_of_its_own_which_a_plain_loop_can_draw(alone: dict) -> None:
    assert len({str(drawn[1:]) for drawn in alone.values()}) == EPOCHS * MICRO_BATCHES
    assert len({drawn[0] for drawn in alone.values()}) == EPOCHS * MICRO_BATCHES
    recurrent = Noisy().recurrent
    for (epoch, number), drawn in reversed(alone.items()):
        seed_generators(micro_batch_seed(1, epoch, number))
        assert draw_every_kind(recurrent) == drawn[1:]
