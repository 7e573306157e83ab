"""Where batches come from: orders, random numbers and loaders that do not depend on how a run is split."""

from datamodules.errors import UserError
from datamodules.loaders import EvaluationLoader, TrainLoader
from datamodules.mnist import MNISTDataModule

__all__ = ["EvaluationLoader", "MNISTDataModule", "TrainLoader", "UserError"]
