"""MNIST: a small convolutional network, trained in under a minute on two CPU cores."""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from recipes.mnist.network import ClassicNet, MNISTNet
    from recipes.mnist.recipe import MNISTClassifier

__all__ = ["ClassicNet", "MNISTClassifier", "MNISTNet"]

__getattr__ = lazy_names(
    __name__,
    {
        "ClassicNet": "recipes.mnist.network",
        "MNISTClassifier": "recipes.mnist.recipe",
        "MNISTNet": "recipes.mnist.network",
    },
)
