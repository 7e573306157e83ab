"""Callbacks for any Lightning Trainer and any LightningModule. Names are imported when they are used."""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from callbacks.bn_recalibration import BNRecalibration
    from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
    from callbacks.drawing.classification_images import ClassificationPictures
    from callbacks.drawing.grad_cam import GradCAM
    from callbacks.drawing.translation_images import TranslationPictures
    from callbacks.fast_path.lean_loop import LeanLoop
    from callbacks.fast_path.no_profiler import NoProfiler
    from callbacks.fast_path.unused_hooks import SkipUnusedHooks
    from callbacks.finite_weights import FiniteWeights
    from callbacks.freeze_layers import FreezeLayers
    from callbacks.gradient_accumulation import GradientAccumulation
    from callbacks.group_table import GroupTable
    from callbacks.lib.batch_norm import average_statistics, recalibrate
    from callbacks.lib.signals import Preempted
    from callbacks.preemption import Preemption
    from callbacks.rank_consistency import RankConsistency
    from callbacks.run_progress import RunProgress
    from callbacks.seed_control import SeedControl
    from callbacks.sync_bn import SyncBN
    from callbacks.train_loss import TrainLoss
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
        "ClassificationPictures": "callbacks.drawing.classification_images",
        "ExactCheckpoint": "callbacks.checkpointing.exact_checkpoint",
        "FiniteWeights": "callbacks.finite_weights",
        "FreezeLayers": "callbacks.freeze_layers",
        "GradCAM": "callbacks.drawing.grad_cam",
        "GradientAccumulation": "callbacks.gradient_accumulation",
        "GroupTable": "callbacks.group_table",
        "LeanLoop": "callbacks.fast_path.lean_loop",
        "NoProfiler": "callbacks.fast_path.no_profiler",
        "Preempted": "callbacks.lib.signals",
        "Preemption": "callbacks.preemption",
        "RankConsistency": "callbacks.rank_consistency",
        "RunProgress": "callbacks.run_progress",
        "SeedControl": "callbacks.seed_control",
        "SkipUnusedHooks": "callbacks.fast_path.unused_hooks",
        "SyncBN": "callbacks.sync_bn",
        "TrainLoss": "callbacks.train_loss",
        "TranslationPictures": "callbacks.drawing.translation_images",
        "WarmupLR": "callbacks.warmup_lr",
        "average_statistics": "callbacks.lib.batch_norm",
        "recalibrate": "callbacks.lib.batch_norm",
    },
)
