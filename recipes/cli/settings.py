"""The settings of a run, as opposed to its network and data, and the callbacks that implement them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from callbacks.auto_micro_batch import AutoMicroBatch
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.guard import LastCheckpoint
from callbacks.finite_weights import FiniteWeights
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lean_loop import LeanLoop
from callbacks.lib.batch_norm import check_batchnorm
from callbacks.lib.rate_factor import Kind
from callbacks.preemption import Preemption
from callbacks.rank_consistency import RankConsistency
from callbacks.seed_control import SeedControl
from callbacks.sync_bn import SyncBN
from callbacks.training_monitor import TrainingMonitor
from callbacks.warmup_lr import WarmupLR
from callbacks.weight_averaging import WeightAveraging
from datamodules.ranges import COUNT, SHARE, Range, check_ranges
from recipes.cli.early_stopping import PatientStopping, score_mode
from recipes.cli.limits import WholeUpdates
from recipes.launch.precision import Precision
from recipes.optim import learning_rate_scale
from recipes.recipe import Recipe

__all__ = ["RunSettings", "checkpoint_callbacks", "global_batch_text", "run_callbacks"]

_PATIENCE = 3


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that belong neither to the recipe nor to the data.

    Args:
        name: the run's folder in RUN_DIR/RECIPE/, with a number if it exists; by default the time.
        run_dir: folder of all runs.
        resume: checkpoint to resume from, in its run's folder and with its settings; auto finds the newest valid
            checkpoint of the run, or starts fresh; the default is auto in jobs that are restarted, else none.
        resume_anyway: resume although the settings are of another experiment.
        save_every: how often last.ckpt is saved, as in "500 steps", "2 epochs" or "10 minutes".
        save_top_k: how many of the best checkpoints are kept; -1 keeps all.
        ckpt: checkpoint to validate, test, predict with or export; its settings are the defaults.
        output: JSON or CSV file for scores and predictions, or the file that export writes.
        format: format of the file that export writes.
        include_preprocessing: an exported graph takes uint8 images; else what the network takes, normalised floats.
        seed: seed of all random numbers; random draws one, which is recorded and kept by a resume.
        deterministic: stop at operations without a deterministic implementation.
        precision: floating-point precision; auto is bf16-mixed where the hardware has fast bf16, else 32-true.
        global_batch_size: samples per update on all devices; accumulation follows from it.
        accumulate: micro-batches per update, or a schedule of them, as in '{0: 8, "2 epochs": 4}'.
        auto_micro_batch: a batch that runs out of memory is repeated in smaller pieces, for the same update.
        warmup: duration of the learning rate warm-up, as in "500 steps", "2 epochs" or "5%".
        warmup_kind: shape of the warm-up.
        warmup_start_factor: fraction of the learning rate at the first update of the warm-up.
        lr_scale: how the learning rate follows the global batch; auto is linear for SGD, sqrt for adaptive ones.
        base_batch_size: the global batch that the learning rate refers to; by default the recipe's.
        ema: average the weights exponentially with this decay, as in 0.999; the average is validated, saved and tested.
        swa: average the weights of the last part of the run (SWA).
        lawa: average the weights at the ends of so many last epochs, at any time (LAWA).
        average_from: where the average begins, as in "500 steps", "2 epochs" or "10%"; by default after 75% of the run
            for swa, else with the first update.
        average_every: steps or epochs between the weights that are averaged; by default a step, for lawa an epoch.
        sync_bn: synchronise BatchNorm over all devices, or over groups of this many.
        tune_allocator: keep freed memory for the next step (Linux, CPU).
        lean_loop: call hooks with less of Lightning's work around each; the results stay the same.
        callbacks: Lightning's callbacks by name, yours as module.Class; write --callbacks+=NAME for each, and after it
            --callbacks.PARAMETER=VALUE for its parameters.
        early_stopping: end the run when this score no longer improves; such as val/loss, see patience.
        patience: validations without improvement after which early stopping ends the run; 3 where none is given.
        logger: any of tensorboard,csv,wandb,mlflow, or none.
        summary: before training print the layers with their outputs, parameters, FLOPs and activations, to this depth
            (2 without a number, -1 for all), and an estimate of the memory of training.
        profile: trace 10 updates into the run's folder, and print where their time went.
        training_monitor: log gradient norm, update-to-weight ratio, data wait and memory; groups logs the first two of
            each parameter group, too.
        histogram_every: updates between histograms of weights and gradients in TensorBoard; 0 writes none.
        report: write figures, and a page with the run's scores, curves, figures and settings, report.html.
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
    include_preprocessing: bool = True
    seed: int | Literal["random"] = 1
    deterministic: bool = False
    precision: Precision = "auto"
    global_batch_size: int | None = None
    accumulate: int | dict[int | str, int] = 1
    auto_micro_batch: bool = False
    warmup: int | str = 0
    warmup_kind: Kind = "linear"
    warmup_start_factor: float = 0.01
    lr_scale: Literal["auto", "linear", "sqrt", "none"] = "auto"
    base_batch_size: int | None = None
    ema: float | None = None
    swa: bool = False
    lawa: int | None = None
    average_from: int | str | None = None
    average_every: int | str | None = None
    sync_bn: bool | int = False
    tune_allocator: bool = True
    lean_loop: bool = True
    callbacks: list[Callback] | None = None
    early_stopping: str | None = None
    patience: int | None = None
    logger: str = "tensorboard,csv"
    summary: bool | int = False
    profile: bool = False
    training_monitor: bool | Literal["groups"] = True
    histogram_every: int = 0
    report: bool = True

    def __post_init__(self) -> None:
        check_ranges(
            seed=(None if self.seed == "random" else self.seed, Range(0, whole=True)),
            save_top_k=(self.save_top_k, Range(-1, 2**31 - 1, whole=True)),
            global_batch_size=(self.global_batch_size, COUNT),
            warmup_start_factor=(self.warmup_start_factor, SHARE),
            base_batch_size=(self.base_batch_size, COUNT),
            patience=(self.patience, COUNT),
            histogram_every=(self.histogram_every, Range(0, whole=True)),
        )


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def global_batch_text(
    settings: RunSettings, data: Mapping[str, Any], trainer: pl.Trainer, tokens_parameter: str | None = None
) -> str:
    """The global batch, as devices x nodes x batch x accumulation: a part of a run's first line.

    Args:
        data: arguments of the data module, such as ``batch_size``.
        tokens_parameter: the argument that, where it is given, limits a batch by tokens.
    """
    tokens = data.get(tokens_parameter) if tokens_parameter else None
    batch_size = tokens or data.get("batch_size")
    if not isinstance(batch_size, int):
        return ""
    if tokens and settings.global_batch_size is not None:
        return f"global batch {settings.global_batch_size} in batches of {batch_size} tokens, "
    of = " tokens" if tokens else ""
    at_once = trainer.world_size * batch_size
    factor = settings.accumulate
    if settings.global_batch_size is not None:
        factor = settings.global_batch_size // at_once
    parts = f"{_counted(trainer.num_devices, 'device')} x {_counted(trainer.num_nodes, 'node')} x {batch_size}{of} x "
    if isinstance(factor, dict):
        return f"global batch {parts}micro-batches {factor}, "
    return f"global batch {at_once * factor}{of} = {parts}{_counted(factor, 'micro-batch', 'es')}, "


def run_callbacks(settings: RunSettings, recipe: Recipe, seeds: SeedControl) -> list[Callback]:
    """The callbacks of every run."""
    scale = learning_rate_scale(settings.lr_scale, recipe.hparams.optimizer)
    base = settings.base_batch_size or recipe.base_batch_size
    accumulation = GradientAccumulation(settings.accumulate, settings.global_batch_size)
    callbacks: list[Callback] = [
        # First, so that the others read the factor of the current window.
        accumulation,
        WholeUpdates(accumulation),
        seeds,
        WarmupLR(settings.warmup, settings.warmup_kind, settings.warmup_start_factor, scale, base if scale else None),
    ]
    callbacks += [FiniteWeights(), RankConsistency(), Preemption()]
    if settings.auto_micro_batch:
        callbacks.append(AutoMicroBatch())
    if settings.lean_loop:
        callbacks.append(LeanLoop())
    if settings.training_monitor:
        callbacks.append(TrainingMonitor(settings.training_monitor == "groups", settings.histogram_every))
    if settings.sync_bn:
        check_batchnorm(recipe)  # Before other processes start.
        callbacks.append(SyncBN(None if settings.sync_bn is True else settings.sync_bn))
    average = {name: getattr(settings, name) for name in ("ema", "swa", "lawa", "average_from", "average_every")}
    if any(value is not None and value is not False for value in average.values()):
        callbacks.append(WeightAveraging(**average))
    if score := settings.early_stopping:
        mode = score_mode(score, recipe.monitor, recipe.monitor_mode)
        callbacks.append(PatientStopping(score, patience=settings.patience or _PATIENCE, mode=mode))
    # Copies, since a run takes new ones for its final test.
    callbacks += copy.deepcopy(settings.callbacks or [])
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
