"""Build the callbacks of a run: one list, in the order in which they act."""

from collections.abc import Callable, Sequence
from pathlib import Path

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint, LastCheckpoint
from callbacks.finite_weights import FiniteWeights
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.preemption import Preemption
from callbacks.rank_consistency import RankConsistency
from callbacks.run_progress import RunProgress
from callbacks.seed_control import SeedControl
from callbacks.sync_bn import SyncBN, check_batchnorm
from callbacks.training_monitor import TrainingMonitor
from callbacks.warmup_lr import WarmupLR
from callbacks.weight_averaging import WeightAveraging
from datamodules.errors import UserError, spelled
from datamodules.lightning import Callback, Checkpoint, ProgressBar
from recipes.base import Recipe
from recipes.optim import learning_rate_scale
from recipes.runner.console import prints_progress
from recipes.runner.early_stopping import PatientStopping
from recipes.runner.notebook import NotebookProgress, in_notebook
from recipes.runner.settings import RunSettings


def callbacks_maker(
    settings: RunSettings,
    recipe: Recipe,
    further: Callable[[], Sequence[Callback]],
    *,
    seeds: SeedControl,
    world_size: int,
    shows_progress: bool,
) -> Callable[..., list[Callback]]:
    """Return a function that makes the callbacks of a Trainer, new ones at each call.

    The function takes the callbacks that save, which come first, and those that record the run, which come last.

    Args:
        further: makes the user's callbacks.
        seeds: has seeded the initial weights.
        world_size: processes of the run.
        shows_progress: whether the run shows its progress, unless a user's callback does.
    """
    scale = learning_rate_scale(settings.lr_scale, recipe.hparams.optimizer)
    if settings.sync_bn:
        check_batchnorm(recipe)  # Before other processes start.

    def make(saves: Sequence[Callback] = (), records: Sequence[Callback] = ()) -> list[Callback]:
        # Lightning moves the callbacks that save behind the others; the first one is `trainer.checkpoint_callback`.
        callbacks: list[Callback] = [
            *saves,
            GradientAccumulation(settings.accumulate, settings.global_batch_size),
            seeds,
            WarmupLR(settings.warmup, scale=scale, base_batch_size=recipe.base_batch_size if scale else None),
            FiniteWeights(),
        ]
        if world_size > 1:
            callbacks.append(RankConsistency())
        callbacks += [Preemption(), TrainingMonitor()]
        if settings.sync_bn:
            callbacks.append(SyncBN())
        if settings.ema is not None:
            callbacks.append(WeightAveraging(settings.ema))
        if settings.patience is not None:
            callbacks.append(PatientStopping(recipe.monitor, patience=settings.patience, mode=recipe.monitor_mode))
        callbacks += further()
        has_progress_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if shows_progress and prints_progress() and not has_progress_bar:
            if in_notebook():
                callbacks.append(NotebookProgress())
            else:
                callbacks.append(RunProgress(log_interval=settings.progress_interval))
        callbacks += records
        _refuse_two_states(callbacks)
        return callbacks

    return make


def _refuse_two_states(callbacks: Sequence[Callback]) -> None:
    """Refuse two callbacks with the same state key: a checkpoint would hold the state of only one."""
    stateful = [callback for callback in callbacks if type(callback).state_dict is not Callback.state_dict]
    state_keys = [callback.state_key for callback in stateful]
    repeated_keys = [key for key in state_keys if state_keys.count(key) > 1]
    if repeated_keys:
        raise UserError(
            f"the run has two {repeated_keys[0]}, and a checkpoint holds the state of one; pass the setting of the run"
            f" in place of the callback, such as {spelled('seed', 7)}, {spelled('accumulate', 2)} or"
            f" {spelled('ema', 0.999)}"
        )


def checkpoint_callbacks(folder: Path, monitor: str | None, recipe: Recipe, settings: RunSettings) -> list[Checkpoint]:
    """Return the callbacks that save the best and the last checkpoint.

    Without a monitored score, the last checkpoint is the best.
    """
    save_top_k = settings.save_top_k
    if monitor is None:
        # ModelCheckpoint refuses larger numbers without a monitored score.
        save_top_k = min(1, abs(save_top_k))
    best = ExactCheckpoint(
        folder / "checkpoints",
        filename="best" if save_top_k in (0, 1) else "best-{step}",
        monitor=monitor,
        mode=recipe.monitor_mode,
        save_top_k=save_top_k,
        enable_version_counter=False,
    )
    # The last comes second, so that its file contains the path of the best.
    return [best, LastCheckpoint(folder / "checkpoints", str(settings.save_every))]
