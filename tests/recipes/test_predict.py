"""Predictions from Python, and the preprocessing that they share with training and exports."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from datamodules import ImageFolderDataModule, MNISTDataModule
from recipes import MNISTClassifier, ResNetFineTuner
from tests.support.tables import QUIET


@pytest.fixture(scope="module")
def digits_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that has learned the bundled digits in one epoch."""
    path = tmp_path_factory.mktemp("digits") / "best.ckpt"
    trainer = pl.Trainer(max_epochs=1, enable_progress_bar=False, enable_checkpointing=False, **QUIET)
    trainer.fit(MNISTClassifier(), MNISTDataModule(dataset="digits", batch_size=64))
    trainer.save_checkpoint(path)
    return path


def test_the_preprocessing_of_a_checkpoint_is_that_of_its_data_to_the_bit(digits_checkpoint: Path):
    recipe = MNISTClassifier.load_from_checkpoint(digits_checkpoint)
    data = MNISTDataModule(dataset="digits")
    data.setup("test")
    inputs = torch.cat([batch for batch, _ in data.test_dataloader()])
    preprocessing = recipe.preprocessing()
    assert preprocessing is not None
    assert torch.equal(preprocessing(data._parts["test"][0]), inputs)


def test_preprocessing_is_unknown_without_data():
    assert MNISTClassifier().preprocessing() is None


def test_images_of_a_folder_are_normalised_by_the_module_that_exports_hold():
    data = ImageFolderDataModule(dataset="digits")
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(data.preprocessing()(images), data.normalise(images))
    assert ResNetFineTuner(num_classes=10).preprocessing() is None
