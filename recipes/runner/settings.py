"""The settings of a run, as opposed to its network and data, and the callbacks that implement them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning.pytorch.callbacks import Callback

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint, LastCheckpoint
from callbacks.finite_weights import FiniteWeights
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.preemption import Preemption
from callbacks.rank_consistency import RankConsistency
from callbacks.seed_control import SeedControl
from callbacks.sync_bn import SyncBN, check_batchnorm
from callbacks.training_monitor import TrainingMonitor
from callbacks.warmup_lr import WarmupLR
from callbacks.weight_averaging import WeightAveraging
from datamodules.contract import Free, OneCall, Rare
from datamodules.ranges import COUNT, NOT_NEGATIVE, Range, check_ranges
from recipes.base import Recipe
from recipes.optim import learning_rate_scale
from recipes.runner.early_stopping import PatientStopping
from recipes.runner.limits import CheckLimits
from recipes.runner.machine import Precision


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that belong neither to the recipe nor to the data.

    Args:
        name: the run's folder in RUN_DIR/RECIPE/, with a number if it exists; by default the time.
        run_dir: folder of all runs.
        resume: checkpoint to resume from, in its run's folder and with its settings; auto finds the newest valid
            checkpoint of the run, or starts fresh; the default is auto in jobs that are restarted, else none.
        save_every: how often last.ckpt is saved, as in "500 steps", "2 epochs" or "10 minutes".
        save_top_k: how many of the best checkpoints are kept; -1 keeps all.
        ckpt: checkpoint to validate, test, predict with or export; its settings are the defaults.
        output: JSON or CSV file for scores and predictions, or the file that export writes.
        format: format of the file that export writes.
        seed: seed of all random numbers.
        deterministic: stop at operations without a deterministic implementation.
        threads: of PyTorch in each process; on a processor the bits of a run depend on them, so a resume keeps them.
            By default OMP_NUM_THREADS, else the cores shared by the processes of a node. With a GPU, the host's.
        precision: floating-point precision; auto is bf16-mixed where the hardware has fast bf16, else 32-true.
        global_batch_size: samples per update on all devices; the number of micro-batches follows from it.
        accumulate: micro-batches per update on each device.
        warmup: duration of the learning rate warm-up, as in "500 steps", "2 epochs" or "5%".
        lr_scale: how the learning rate follows the global batch; auto is linear for SGD, sqrt for adaptive ones.
        ema: average the weights exponentially with this decay, as in 0.999; the average is validated, saved and tested.
        sync_bn: synchronise BatchNorm over all devices; the bits of the run then depend on their number.
        patience: end the run after so many validations without a better score of those that choose the best checkpoint.
        progress_interval: seconds between two lines of progress, where the output is no terminal.
        logger: any of tensorboard,csv,wandb,mlflow, or none.
    """

    name: OneCall[str | None] = None
    run_dir: OneCall[str] = "runs"
    resume: OneCall[str | None] = None
    save_every: Free[str] = "1 epochs"
    save_top_k: Rare[Free[int]] = 1
    ckpt: OneCall[str | None] = None
    output: OneCall[str | None] = None
    format: OneCall[Literal["safetensors", "state-dict", "onnx"] | None] = None
    seed: int = 1
    deterministic: Rare[Free[bool]] = False
    threads: int | None = None
    precision: Free[Precision] = "auto"
    global_batch_size: int | None = None
    accumulate: int = 1
    warmup: int | str = 0
    lr_scale: Rare[Literal["auto", "linear", "sqrt", "none"]] = "auto"
    ema: float | None = None
    sync_bn: bool = False
    patience: Free[int | None] = None
    progress_interval: Rare[Free[float]] = 60.0
    logger: Free[str] = "tensorboard,csv"

    def __post_init__(self) -> None:
        check_ranges(
            seed=(self.seed, Range(0, 2**63 - 1, whole=True)),
            save_top_k=(self.save_top_k, Range(-1, 2**31 - 1, whole=True)),
            threads=(self.threads, Range(1, 4096, whole=True)),
            global_batch_size=(self.global_batch_size, COUNT),
            patience=(self.patience, COUNT),
            progress_interval=(self.progress_interval, NOT_NEGATIVE),
        )


def run_callbacks(settings: RunSettings, recipe: Recipe, seeds: SeedControl) -> list[Callback]:
    """The callbacks of every run."""
    scale = learning_rate_scale(settings.lr_scale, recipe.hparams.optimizer)
    callbacks: list[Callback] = [
        GradientAccumulation(settings.accumulate, settings.global_batch_size),
        seeds,
        WarmupLR(settings.warmup, scale=scale, base_batch_size=recipe.base_batch_size if scale else None),
    ]
    callbacks += [CheckLimits(), FiniteWeights(), RankConsistency(), Preemption(), TrainingMonitor()]
    if settings.sync_bn:
        check_batchnorm(recipe)  # Before other processes start.
        callbacks.append(SyncBN())
    if settings.ema is not None:
        callbacks.append(WeightAveraging(settings.ema))
    if settings.patience is not None:
        callbacks.append(PatientStopping(recipe.monitor, patience=settings.patience, mode=recipe.monitor_mode))
    return callbacks


def checkpoint_callbacks(folder: Path, monitor: str | None, recipe: Recipe, settings: RunSettings) -> list[Callback]:
    """The callbacks that save the best and the last checkpoint; without a monitored score the last is the best."""
    best = ExactCheckpoint(
        folder / "checkpoints",
        filename="best" if settings.save_top_k in (0, 1) or monitor is None else "best-{step}",
        monitor=monitor,
        mode=recipe.monitor_mode,
        save_top_k=settings.save_top_k if monitor is not None else min(1, abs(settings.save_top_k)),
        enable_version_counter=False,
    )
    # The last comes second, so that its file contains the path of the best.
    return [best, LastCheckpoint(folder / "checkpoints", settings.save_every)]
