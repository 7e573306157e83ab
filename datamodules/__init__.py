"""Where batches come from: orders, random numbers and loaders that do not depend on how a run is split.

Names are imported when they are used, so that a callback that needs a random number loads no data set.
"""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from datamodules.errors import RunFailedError, UserError
    from datamodules.images.data_module import ImageFolderDataModule
    from datamodules.loading.loaders import EvaluationLoader, TrainLoader
    from datamodules.mnist.data_module import MNISTDataModule
    from datamodules.translation.data_module import TranslationDataModule

__all__ = [
    "EvaluationLoader",
    "ImageFolderDataModule",
    "MNISTDataModule",
    "RunFailedError",
    "TrainLoader",
    "TranslationDataModule",
    "UserError",
]

__getattr__ = lazy_names(
    __name__,
    {
        "EvaluationLoader": "datamodules.loading.loaders",
        "ImageFolderDataModule": "datamodules.images.data_module",
        "MNISTDataModule": "datamodules.mnist.data_module",
        "TrainLoader": "datamodules.loading.loaders",
        "TranslationDataModule": "datamodules.translation.data_module",
        "RunFailedError": "datamodules.errors",
        "UserError": "datamodules.errors",
    },
)
