"""Where batches come from: orders, random numbers and loaders that do not depend on how a run is split.

Names are imported when they are used, so that a callback that needs a random number loads no data set.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.errors import UserError
    from datamodules.loaders import EvaluationLoader, TrainLoader
    from datamodules.mnist import MNISTDataModule

__all__ = ["EvaluationLoader", "MNISTDataModule", "TrainLoader", "UserError"]

_HOMES = {
    "EvaluationLoader": "datamodules.loaders",
    "MNISTDataModule": "datamodules.mnist",
    "TrainLoader": "datamodules.loaders",
    "UserError": "datamodules.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'datamodules' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
