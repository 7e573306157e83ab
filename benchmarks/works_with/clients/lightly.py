"""lightly: its documented modules: a momentum network that is moved in `training_step`, a memory bank, a center."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from lightly.loss import DINOLoss, NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead, MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..rows import SAMPLES, Row, Run

LIBRARY = "lightly"
PACKAGE = "lightning.pytorch"


def backbone() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def frozen(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    deactivate_requires_grad(twin)
    return twin


class Module(pl.LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)


class BYOL(Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = BYOLProjectionHead(8, 16, 8)
        self.prediction_head = BYOLPredictionHead(8, 16, 8)
        self.backbone_momentum = frozen(self.backbone)
        self.projection_head_momentum = frozen(self.projection_head)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, images: Any) -> Any:
        return self.prediction_head(self.projection_head(self.backbone(images)))

    def forward_momentum(self, images: Any) -> Any:
        return self.projection_head_momentum(self.backbone_momentum(images)).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        momentum = cosine_schedule(self.current_epoch, 10, 0.9, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        first = batch[0]
        second = first + 0.1 * torch.randn_like(first)
        loss = self.criterion(self(first), self.forward_momentum(second))
        return 0.5 * (loss + self.criterion(self(second), self.forward_momentum(first)))


class MoCo(Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = MoCoProjectionHead(8, 16, 8)
        self.backbone_momentum = frozen(self.backbone)
        self.projection_head_momentum = frozen(self.projection_head)
        self.criterion = NTXentLoss(memory_bank_size=(32, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        update_momentum(self.backbone, self.backbone_momentum, 0.9)
        update_momentum(self.projection_head, self.projection_head_momentum, 0.9)
        first = batch[0]
        second = first + 0.1 * torch.randn_like(first)
        query = self.projection_head(self.backbone(first))
        key = self.projection_head_momentum(self.backbone_momentum(second)).detach()
        return self.criterion(query, key)


class DINO(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = backbone()
        self.head = nn.Linear(8, 16)
        self.criterion = DINOLoss(output_dim=16, warmup_teacher_temp_epochs=1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = batch[0]
        views = [self.head(self.net(first)), self.head(self.net(first + 0.1 * torch.randn_like(first)))]
        return self.criterion([view.detach() for view in views], views, epoch=self.current_epoch)


def self_supervised(run: Run, module: type[Module]) -> None:
    callbacks = run.callbacks()
    images = torch.rand(SAMPLES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    run.fit(module(), DataLoader(TensorDataset(images), run.batch_size, shuffle=True), callbacks=callbacks)


ROWS = {
    "BYOL": Row(lambda run: self_supervised(run, BYOL), "momentum network moved in training_step", whole="BatchNorm"),
    "MoCo": Row(lambda run: self_supervised(run, MoCo), "the same and a memory bank", whole="BatchNorm"),
    "DINO": Row(lambda run: self_supervised(run, DINO), "a center that each forward pass moves", whole="BatchNorm"),
}
