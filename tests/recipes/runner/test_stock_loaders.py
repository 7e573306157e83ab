import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from recipes.runner.stock_loaders import share_of


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_is_evaluated_once_in_whole_batches(world_size):
    loader = DataLoader(range(11), 4)
    shares = [[batch.tolist() for batch in share_of(loader, rank, world_size)] for rank in range(world_size)]
    whole = [batch.tolist() for batch in loader]
    assert shares == [whole[rank::world_size] for rank in range(world_size)]
    assert [len(share_of(loader, rank, world_size)) for rank in range(world_size)] == list(map(len, shares))


def test_a_share_keeps_how_batches_are_made():
    loader = DataLoader(range(8), batch_size=2, collate_fn=lambda batch: torch.tensor(batch) * 10, num_workers=1)
    share = share_of(loader, 1, 2)
    assert share.loader.num_workers == 1
    assert share.loader.collate_fn is loader.collate_fn
    assert share.dataset is loader.dataset


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_loaders_whose_order_is_their_own_are_left_to_lightning():
    weighted = DataLoader(range(8), batch_size=2, sampler=WeightedRandomSampler([1.0] * 8, 8))
    short, unbatched = DataLoader(range(3), batch_size=2), DataLoader(range(8), batch_size=None)
    for loader in (weighted, short, unbatched, DataLoader(Stream(), batch_size=2), [1, 2]):
        assert share_of(loader, 0, 3) is loader
