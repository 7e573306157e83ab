"""Where batches come from: orders, random numbers and loaders that do not depend on how a run is split.

Names are imported when they are used, so that a callback that needs a random number loads no data set.
"""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from datamodules.errors import UserError
    from datamodules.images import ImageFolderDataModule
    from datamodules.loaders import EvaluationLoader, TrainLoader
    from datamodules.mnist import MNISTDataModule
    from datamodules.translation import TranslationDataModule

__all__ = [
    "EvaluationLoader",
    "ImageFolderDataModule",
    "MNISTDataModule",
    "TrainLoader",
    "TranslationDataModule",
    "UserError",
]

__getattr__ = lazy_names(
    __name__,
    {
        "EvaluationLoader": "datamodules.loaders",
        "ImageFolderDataModule": "datamodules.images",
        "MNISTDataModule": "datamodules.mnist",
        "TrainLoader": "datamodules.loaders",
        "TranslationDataModule": "datamodules.translation",
        "UserError": "datamodules.errors",
    },
)
