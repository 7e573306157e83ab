"""The MNIST recipe as a LightningModule."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from datamodules.images.mnist import MNISTDataModule
from recipes.classifier import Classifier
from recipes.mnist.network import NETWORKS, NetworkName


class MNISTClassifier(Classifier):
    """Classifies 28 x 28 grey images; override `build_network` to train your own network.

    Args:
        network: "default" is small, fast and exact; "classic" has the two convolutions of PyTorch's MNIST example.
        lr: peak learning rate; by default 0.01.
    """

    title = "mnist"
    data_class = MNISTDataModule
    default_lr = 0.01
    unclear_below = 0.5
    trainer_defaults: ClassVar[dict[str, Any]] = {"max_epochs": 10}

    example_input_array: Tensor

    def __init__(
        self, network: NetworkName = "default", lr: float | None = None, weight_decay: float = 0.05, **kwargs: Any
    ) -> None:
        super().__init__(lr=lr, weight_decay=weight_decay, **kwargs)
        self.example_input_array = torch.zeros(1, 1, 28, 28)

    @override
    def build_network(self) -> nn.Module:
        """Maps floats of shape (batch, 1, 28, 28) to logits of shape (batch, num_classes)."""
        return NETWORKS[self.hparams.network](num_classes=self.hparams.num_classes)
