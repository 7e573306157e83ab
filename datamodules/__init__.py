"""Where batches come from: orders, random numbers and loaders that do not depend on how a run is split.

Names are imported when they are used, so that a callback that needs a random number loads no data set.
"""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from datamodules.errors import UserError
    from datamodules.loaders import EvaluationLoader, TrainLoader
    from datamodules.mnist import MNISTDataModule

__all__ = ["EvaluationLoader", "MNISTDataModule", "TrainLoader", "UserError"]

__getattr__ = lazy_names(
    __name__,
    {
        "EvaluationLoader": "datamodules.loaders",
        "MNISTDataModule": "datamodules.mnist",
        "TrainLoader": "datamodules.loaders",
        "UserError": "datamodules.errors",
    },
)
