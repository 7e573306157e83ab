"""torchgeo: its classification task, kornia's augmentation after the transfer to the device, a plateau."""

from typing import Any

import kornia.augmentation
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from torchgeo.trainers import ClassificationTask

from ..rows import Row, Run

LIBRARY = "torchgeo"
INSTALL = "torchgeo requests"
PACKAGE = "lightning.pytorch"


class Images(Dataset[dict[str, Any]]):
    def __init__(self, size: int) -> None:
        self.images = torch.rand(size, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": torch.tensor(index % 3)}


class Data(pl.LightningDataModule):
    """What torchgeo's own data modules do, without their files."""

    def __init__(self, batch_size: int, augment: bool) -> None:
        super().__init__()
        self.batch_size = batch_size
        noise = kornia.augmentation.RandomGaussianNoise(0.0, 0.1, p=0.5)
        flip = kornia.augmentation.RandomHorizontalFlip(p=0.5)
        self.augment = kornia.augmentation.AugmentationSequential(flip, noise, data_keys=None, keepdim=True)
        self.used = augment

    def train_dataloader(self) -> Any:
        return DataLoader(Images(20), self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Images(4), 2)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.used and self.trainer is not None and self.trainer.training:
            batch = {**batch, **self.augment({"image": batch["image"]})}
        return batch


def classification(run: Run, augment: bool) -> None:
    callbacks = run.callbacks()
    module = ClassificationTask(model="resnet18", weights=None, num_classes=3, lr=1e-3, patience=0)
    run.fit(module, callbacks=callbacks, datamodule=Data(run.batch_size, augment))


ROWS = {
    "plain": Row(
        lambda run: classification(run, False), "resnet18, plateau on val_loss", whole="BatchNorm", stops=(1, 2)
    ),
    "augmented": Row(
        lambda run: classification(run, True),
        "the same, with kornia's noise in on_after_batch_transfer",
        whole="BatchNorm",
        stops=(1, 2),
    ),
}
