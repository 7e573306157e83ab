import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from recipes.runner.training import _last_logged, evaluate_each_sample_once, shard_loader
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer


class Several(pl.LightningDataModule):
    def val_dataloader(self):
        return [DataLoader(range(11), 4), {"few": DataLoader(range(4), 4)}]

    def test_dataloader(self):
        return CombinedLoader(DataLoader(range(11), 4), "sequential")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_of_every_loader_is_evaluated_once(world_size):
    shares = []
    for rank in range(world_size):
        evaluate_each_sample_once(data := Several(), rank, world_size)
        (one, two), combined = data.val_dataloader(), data.test_dataloader().iterables
        shares.append([[batch.tolist() for batch in loader] for loader in (one, combined, two["few"])])
        assert [len(one), len(combined), len(two["few"])] == list(map(len, shares[-1]))
    whole = [batch.tolist() for batch in DataLoader(range(11), 4)]
    of_rank = [whole[rank::world_size] for rank in range(world_size)]
    assert shares == [[of_rank[rank], of_rank[rank], [list(range(rank, 4, world_size))]] for rank in range(world_size)]


def test_a_share_keeps_how_batches_are_made():
    loader = DataLoader(range(8), batch_size=2, collate_fn=lambda batch: torch.tensor(batch) * 10, num_workers=1)
    share = shard_loader(loader, 1, 2)
    assert share.loader.num_workers == 1
    assert share.loader.collate_fn is loader.collate_fn
    assert share.dataset is loader.dataset


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_loaders_whose_order_is_their_own_are_left_to_lightning(caplog):
    weighted = DataLoader(range(8), batch_size=2, sampler=WeightedRandomSampler([1.0] * 8, 8))
    short, unbatched = DataLoader(range(2), batch_size=2), DataLoader(range(8), batch_size=None)
    for loader in (weighted, short, unbatched, DataLoader(Stream(), batch_size=2), [1, 2]):
        assert shard_loader(loader, 0, 3) is loader
    (warning,) = caplog.messages
    assert "of fewer samples (2) than devices (3) some are evaluated twice" in warning


class Logged(Tiny):
    """Logs values of steps and of the epoch."""

    def training_step(self, batch, batch_idx):
        self.log("train/batch", float(batch_idx), on_step=True, on_epoch=True)
        self.log_dict({"last": float(batch_idx), "lr": 1.0, "lr/group": 1.0})
        return super().training_step(batch, batch_idx)


def test_the_last_logged_values_are_means_of_epochs():
    trainer = quiet_trainer(max_epochs=1)
    loader = DataLoader(TensorDataset(*noisy_images(8)), 2)
    trainer.fit(Logged(image_network().double(), torch.optim.SGD, lr=0.1), loader)
    assert _last_logged(trainer) == {"train/batch": 1.5, "last": 3.0}
