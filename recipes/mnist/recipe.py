"""The MNIST recipe as a LightningModule."""

import inspect
from typing import Any, ClassVar, Self

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.finite_weights import FiniteWeights
from callbacks.run_progress import RunProgress
from callbacks.seed_control import SeedControl
from callbacks.warmup_lr import WarmupLR
from datamodules.mnist.data_module import MNISTDataModule
from recipes.classification import Classifier, ClassifierParameters
from recipes.mnist.network import NETWORKS, NetworkName
from recipes.optim import learning_rate_scale

__all__ = ["MNISTClassifier"]


class MNISTParameters(ClassifierParameters):
    """The parameters of `MNISTClassifier`, as ``self.hparams`` holds them."""

    network: NetworkName


class MNISTClassifier(Classifier):
    """Classifies 28 x 28 grey images; override `build_network` to train your own network.

    Args:
        network: "default" is small, fast and exact; "classic" has the two convolutions of PyTorch's MNIST example,
            "tutorial" the three of its tutorial "What is torch.nn really?".
        lr: peak learning rate; by default 0.01, and 1 for lbfgs.
    """

    title = "mnist"
    data_class = MNISTDataModule
    default_lr = 0.01
    unclear_below = 0.5
    trainer_defaults: ClassVar[dict[str, Any]] = {"max_epochs": 10}

    hparams: MNISTParameters
    example_input_array: Tensor

    def __init__(
        self,
        network: NetworkName = "default",
        lr: float | None = None,
        weight_decay: float = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(lr=lr, weight_decay=weight_decay, **kwargs)
        self.example_input_array = torch.zeros(1, 1, 28, 28)

    @override
    def build_network(self) -> nn.Module:
        """Maps floats of shape (batch, 1, 28, 28) to logits of shape (batch, num_classes)."""
        return NETWORKS[self.hparams.network](num_classes=self.hparams.num_classes)

    @classmethod
    def fit(
        cls,
        images: Any,
        labels: Any,
        *,
        val: tuple[Any, Any] | None = None,
        test: tuple[Any, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """Train a new classifier on images in memory, with the settings of the command line by their names.

        The weights are those that the command line ends with on the same images and settings: the seed decides on the
        initial weights, the order and the augmentation. Nothing is written; ``classifier.trainer`` has the scores
        (``callback_metrics``) and saves (``save_checkpoint``).

        Args:
            images, labels, val, test: as of `MNISTDataModule.from_arrays`; nothing is held out for a test.
            settings: parameters of `MNISTDataModule`, of the classifier and of the Trainer, such as ``seed``,
                ``batch_size``, ``network`` and ``max_epochs``. One device trains, and ``precision`` is that of the
                Trainer, 32-true.

        Returns:
            The classifier after the last epoch, in evaluation mode.

        Raises:
            UserError: images, labels or settings cannot be used.

        Example:
            >>> from sklearn.datasets import load_digits
            >>> digits = load_digits()
            >>> options = {"max_epochs": 1, "enable_progress_bar": False}
            >>> classifier = MNISTClassifier.fit(digits.images / 16, digits.target, **options)
            >>> len(classifier.class_names), classifier.training
            (10, False)
        """
        of_data, of_trainer = (inspect.signature(kind).parameters for kind in (MNISTDataModule, pl.Trainer))
        for_data = {name: value for name, value in settings.items() if name in of_data}
        for_trainer = {name: value for name, value in settings.items() if name in of_trainer}
        for_recipe = {name: value for name, value in settings.items() if name not in (for_data | for_trainer)}
        data = MNISTDataModule.from_arrays(images, labels, val, test, **({"test_fraction": 0.0} | for_data))
        # Before the module: it seeds the initial weights.
        seeds = SeedControl(data.seed)
        classifier = cls(num_classes=data.num_classes, **for_recipe)
        scale = learning_rate_scale("auto", classifier.hparams.optimizer)
        callbacks: list[pl.Callback] = [seeds, WarmupLR(0, scale=scale, base_batch_size=cls.base_batch_size)]
        callbacks += [FiniteWeights(), *(for_trainer.pop("callbacks", None) or [])]
        if for_trainer.get("enable_progress_bar") is not False:
            callbacks.append(RunProgress())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "devices": 1}
        trainer = pl.Trainer(**(quiet | cls.trainer_defaults | for_trainer), callbacks=callbacks)
        trainer.fit(classifier, data)
        return classifier.eval()
