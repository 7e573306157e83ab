"""Callbacks for any Lightning Trainer and any LightningModule. Names are imported when they are used."""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from callbacks.batch_norm import average_statistics
    from callbacks.classification_pictures import ClassificationPictures
    from callbacks.exact_checkpoint import ExactCheckpoint
    from callbacks.gradient_accumulation import GradientAccumulation
    from callbacks.run_progress import RunProgress
    from callbacks.seed_control import SeedControl
    from callbacks.sync_bn import SyncBN
    from callbacks.train_loss import TrainLoss
    from callbacks.warmup_lr import WarmupLR

__all__ = [
    "ClassificationPictures",
    "ExactCheckpoint",
    "GradientAccumulation",
    "RunProgress",
    "SeedControl",
    "SyncBN",
    "TrainLoss",
    "WarmupLR",
    "average_statistics",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ClassificationPictures": "callbacks.classification_pictures",
        "ExactCheckpoint": "callbacks.exact_checkpoint",
        "GradientAccumulation": "callbacks.gradient_accumulation",
        "RunProgress": "callbacks.run_progress",
        "SeedControl": "callbacks.seed_control",
        "SyncBN": "callbacks.sync_bn",
        "TrainLoss": "callbacks.train_loss",
        "WarmupLR": "callbacks.warmup_lr",
        "average_statistics": "callbacks.batch_norm",
    },
)
