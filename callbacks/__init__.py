"""Callbacks for any Lightning Trainer and any LightningModule. Names are imported when they are used."""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from callbacks.batch_norm import average_statistics, recalibrate
    from callbacks.bn_recalibration import BNRecalibration
    from callbacks.classification_pictures import ClassificationPictures
    from callbacks.exact_checkpoint import ExactCheckpoint
    from callbacks.finite_weights import FiniteWeights
    from callbacks.freeze_layers import FreezeLayers
    from callbacks.grad_cam import GradCAM
    from callbacks.gradient_accumulation import GradientAccumulation
    from callbacks.group_table import GroupTable
    from callbacks.lean_loop import LeanLoop
    from callbacks.no_profiler import NoProfiler
    from callbacks.preemption import Preemption
    from callbacks.rank_consistency import RankConsistency
    from callbacks.run_progress import RunProgress
    from callbacks.seed_control import SeedControl
    from callbacks.signals import Preempted
    from callbacks.sync_bn import SyncBN
    from callbacks.train_loss import TrainLoss
    from callbacks.translation_pictures import TranslationPictures
    from callbacks.unused_hooks import SkipUnusedHooks
    from callbacks.warmup_lr import WarmupLR

__all__ = [
    "BNRecalibration",
    "ClassificationPictures",
    "ExactCheckpoint",
    "FiniteWeights",
    "FreezeLayers",
    "GradCAM",
    "GradientAccumulation",
    "GroupTable",
    "LeanLoop",
    "NoProfiler",
    "Preempted",
    "Preemption",
    "RankConsistency",
    "RunProgress",
    "SeedControl",
    "SkipUnusedHooks",
    "SyncBN",
    "TrainLoss",
    "TranslationPictures",
    "WarmupLR",
    "average_statistics",
    "recalibrate",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BNRecalibration": "callbacks.bn_recalibration",
        "ClassificationPictures": "callbacks.classification_pictures",
        "ExactCheckpoint": "callbacks.exact_checkpoint",
        "FiniteWeights": "callbacks.finite_weights",
        "FreezeLayers": "callbacks.freeze_layers",
        "GradCAM": "callbacks.grad_cam",
        "GradientAccumulation": "callbacks.gradient_accumulation",
        "GroupTable": "callbacks.group_table",
        "LeanLoop": "callbacks.lean_loop",
        "NoProfiler": "callbacks.no_profiler",
        "Preempted": "callbacks.signals",
        "Preemption": "callbacks.preemption",
        "RankConsistency": "callbacks.rank_consistency",
        "RunProgress": "callbacks.run_progress",
        "SeedControl": "callbacks.seed_control",
        "SkipUnusedHooks": "callbacks.unused_hooks",
        "SyncBN": "callbacks.sync_bn",
        "TrainLoss": "callbacks.train_loss",
        "TranslationPictures": "callbacks.translation_pictures",
        "WarmupLR": "callbacks.warmup_lr",
        "average_statistics": "callbacks.batch_norm",
        "recalibrate": "callbacks.batch_norm",
    },
)
