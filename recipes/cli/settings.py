"""The settings that belong to a run rather than to its network or data, and the callbacks that carry them out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.guard import LastCheckpoint
from callbacks.fast_path.lean_loop import LeanLoop
from callbacks.fast_path.unused_hooks import SkipUnusedHooks
from callbacks.finite_weights import FiniteWeights
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.preemption import Preemption
from callbacks.rank_consistency import RankConsistency
from callbacks.seed_control import SeedControl
from callbacks.sync_bn import SyncBN
from callbacks.warmup_lr import Kind, Scale, WarmupLR
from datamodules.errors import UserError
from recipes.launch.host import Precision
from recipes.recipe import Recipe

__all__ = ["RunSettings", "checkpoint_callbacks", "global_batch_text", "learning_rate_scale", "run_callbacks"]

# Adaptive optimisers divide by the size of the gradient, so noise grows with the square root only.
_LINEAR = {"sgd", "asgd"}


@dataclass(frozen=True)
class RunSettings:
    """How a run is named and stored, and how it is split without changing what it learns.

    Args:
        name: the run's folder in RUN_DIR/RECIPE/; a number is added where it exists; by default the time.
        run_dir: folder of all runs.
        resume: checkpoint to go on from, in its run's folder and with its settings; auto finds the newest good one of
            this run, which is what restarts of torchrun and Slurm jobs do unless told none.
        resume_anyway: go on although the settings ask for another experiment.
        save_every: how often last.ckpt is saved, as in "500 steps", "2 epochs" or "10 minutes".
        save_top_k: how many of the best checkpoints are kept; -1 keeps all.
        ckpt: checkpoint to validate, test or predict with; its settings are the defaults.
        output: JSON or CSV file for scores and predictions, or the file that export writes.
        format: of the file that export writes.
        seed: of everything random.
        deterministic: stop at operations that have no deterministic form.
        benchmark: let cuDNN choose its algorithms by timing them.
        precision: of the arithmetic; auto takes bf16-mixed where the hardware is fast at it.
        global_batch_size: samples per update on all devices; accumulation follows from it.
        accumulate: micro-batches per update, or by moment, as in '{0: 8, "2 epochs": 4}'.
        warmup: how long the learning rate rises to its schedule, as in "500 steps", "2 epochs" or "5%".
        warmup_kind: the curve of the rise.
        warmup_start_factor: the share of the learning rate that it begins with.
        lr_scale: how the learning rate follows the global batch; auto is linear for SGD, sqrt for adaptive ones.
        base_batch_size: the global batch that the learning rate is stated for; by default the recipe's.
        sync_bn: BatchNorm over all devices, or over groups of so many.
        tune_allocator: keep large blocks of memory between steps (Linux on CPU).
        lean_loop: take the short way through Lightning's step, where nothing needs the long one.
    """

    name: str | None = None
    run_dir: str = "runs"
    resume: str | None = None
    resume_anyway: bool = False
    save_every: str = "1 epochs"
    save_top_k: int = 1
    ckpt: str | None = None
    output: str | None = None
    format: Literal["safetensors", "state-dict", "torchscript", "onnx", "pt2"] | None = None
    seed: int = 1
    deterministic: bool = False
    benchmark: bool | None = None
    precision: Precision = "auto"
    global_batch_size: int | None = None
    accumulate: int | dict[int | str, int] = 1
    warmup: int | str = 0
    warmup_kind: Kind = "linear"
    warmup_start_factor: float = 0.01
    lr_scale: Literal["auto", "linear", "sqrt", "none"] = "auto"
    base_batch_size: int | None = None
    sync_bn: bool | int = False
    tune_allocator: bool = True
    lean_loop: bool = True


def learning_rate_scale(rule: str, optimizer: str) -> Scale | None:
    """The rule that "auto" stands for: linear for SGD (Goyal et al., 2017), square root for adaptive optimisers."""
    if rule == "auto":
        return "linear" if optimizer.lower() in _LINEAR else "sqrt"
    return None if rule == "none" else rule  # type: ignore[return-value]


def global_batch_text(settings: RunSettings, data: Mapping[str, Any], trainer: pl.Trainer) -> str:
    """What an update sees, as devices x nodes x batch x accumulation: a part of a run's first line.

    Args:
        data: settings of the data, such as ``batch_size``; batches that are cut by words hold as many as fit.
    """
    batch_size = data.get("max_tokens") or data.get("batch_size")
    if not isinstance(batch_size, int):
        return ""
    if data.get("max_tokens") and settings.global_batch_size is not None:
        return f"global batch {settings.global_batch_size} in batches of {batch_size} words, "
    of = " words" if data.get("max_tokens") else ""
    at_once = trainer.world_size * batch_size
    factor = settings.accumulate
    if settings.global_batch_size is not None:
        factor = settings.global_batch_size // at_once
    parts = f"{trainer.num_devices} x {trainer.num_nodes} x {batch_size}{of} x "
    if isinstance(factor, dict):
        return f"global batch {parts}accumulation {factor}, "
    return f"global batch {at_once * factor}{of} = {parts}{factor}, "


def run_callbacks(settings: RunSettings, recipe: Recipe, seeds: SeedControl) -> list[Callback]:
    """What keeps a run exact however it is split."""
    scale = learning_rate_scale(settings.lr_scale, recipe.hparams.optimizer)
    base = settings.base_batch_size or recipe.base_batch_size
    callbacks: list[Callback] = [
        # First, so that the others see the window's factor.
        GradientAccumulation(settings.accumulate, settings.global_batch_size),
        seeds,
        WarmupLR(settings.warmup, settings.warmup_kind, settings.warmup_start_factor, scale, base if scale else None),
    ]
    callbacks += [FiniteWeights(), RankConsistency(), SkipUnusedHooks(), Preemption()]
    if settings.lean_loop:
        callbacks.append(LeanLoop())
    if settings.sync_bn:
        callbacks.append(SyncBN(None if settings.sync_bn is True else settings.sync_bn))
    return callbacks


def checkpoint_callbacks(folder: Path, monitor: str | None, recipe: Recipe, settings: RunSettings) -> list[Callback]:
    """Keep the best and the last checkpoints of a run in its folder; without a score the last is the best."""
    if settings.save_top_k < -1:
        raise UserError(f"cannot keep {settings.save_top_k} checkpoints; pass --save-top-k 3, or -1 for all")
    best = ExactCheckpoint(
        folder / "checkpoints",
        filename="best" if settings.save_top_k in (0, 1) or monitor is None else "best-{step}",
        monitor=monitor,
        mode=recipe.monitor_mode,
        save_top_k=settings.save_top_k if monitor is not None else min(1, abs(settings.save_top_k)),
        enable_version_counter=False,
    )
    # The last comes second, so that its file knows the best.
    return [best, LastCheckpoint(folder / "checkpoints", settings.save_every)]
