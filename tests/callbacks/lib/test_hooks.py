import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks.lib.lightning_internals import attached_trainer
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer


def test_the_attached_trainer_is_none_before_a_run() -> None:
    module, trainer = Tiny(image_network().double(), torch.optim.SGD, lr=0.1), quiet_trainer()
    assert attached_trainer(module) is None
    trainer.fit(module, DataLoader(TensorDataset(*noisy_images(4)), batch_size=4))
    assert attached_trainer(module) is trainer
