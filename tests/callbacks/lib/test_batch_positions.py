from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from callbacks.lib.batch_positions import batch_positions

N = 13


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_dataloader_deals_the_order_to_the_ranks_in_turn(world_size: int, wrapped: bool):
    data, found = torch.arange(N), []
    for rank in range(world_size):
        ranks: dict[str, Any] = {"num_replicas": world_size, "rank": rank, "shuffle": False}
        sampler = DistributedSamplerWrapper(range(N), **ranks) if wrapped else DistributedSampler(range(N), **ranks)
        loader = DataLoader(data, 4, sampler=sampler)
        for batch_idx, batch in enumerate(loader):
            positions = batch_positions(loader, batch_idx, rank, world_size)
            assert positions is not None
            # The sampler begins again where the samples do not suffice for all ranks.
            assert [position % N for position in positions] == batch.tolist()
            found += positions
    assert sorted(found) == list(range(-(-N // world_size) * world_size))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), 4),
        DataLoader(range(N), batch_size=None),
        DataLoader(range(N), batch_sampler=BatchSampler(SequentialSampler(range(N)), 4, drop_last=False)),
        CombinedLoader([DataLoader(range(N)), DataLoader(range(N))]),
        {"a": DataLoader(range(N))},
        [range(N)],
    ],
)
def test_positions_of_other_loaders_are_not_known(loader: Any):
    assert batch_positions(loader, 0, rank=0, world_size=1) is None


def test_positions_on_several_ranks_need_a_sampler_that_is_known_to_share():
    loader = DataLoader(range(N), 4, shuffle=True)
    assert batch_positions(loader, 3, rank=0, world_size=1) == range(12, 13)
    assert batch_positions(loader, 0, rank=0, world_size=2) is None
    loader = DataLoader(range(N), 4, sampler=DistributedSampler(range(N), num_replicas=4, rank=1))
    assert batch_positions(loader, 0, rank=1, world_size=2) is None
