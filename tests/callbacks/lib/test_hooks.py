import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks.lib.hooks import attached_trainer
from tests.support.tables import QUIET, Tiny, image_network, noisy_images


def test_the_attached_trainer_is_none_before_a_run() -> None:
    module, options = Tiny(image_network().double(), torch.optim.SGD, lr=0.1), QUIET | {"enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=1, **options)
    assert attached_trainer(module) is None
    trainer.fit(module, DataLoader(TensorDataset(*noisy_images(4)), batch_size=4))
    assert attached_trainer(module) is trainer
