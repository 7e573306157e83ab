"""MNIST: a small convolutional network, trained in under a minute on two CPU cores."""

from recipes.mnist.network import ClassicNet, MNISTNet
from recipes.mnist.recipe import MNISTClassifier

__all__ = ["ClassicNet", "MNISTClassifier", "MNISTNet"]
