"""The Trainer of a command, and the first line of a run."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.lib.hooks import set_callbacks
from callbacks.lib.lightning_internals import set_collective_timeout
from callbacks.run_progress import RunProgress
from datamodules.errors import UserError
from recipes.runner.console import prints_progress
from recipes.runner.experiment import Experiment, as_user_errors
from recipes.runner.launch import Launch
from recipes.runner.limits import limits_per_device
from recipes.runner.loggers import logger_names, loggers, run_ids
from recipes.runner.notebook import NotebookProgress, in_notebook
from recipes.runner.printing import rank_zero_print
from recipes.runner.results import hardware
from recipes.runner.strategies import build_strategy


def _backend(trainer: pl.Trainer) -> str:
    """What carries collective calls: nccl, gloo or another."""
    named = getattr(trainer.strategy, "process_group_backend", None)
    device = trainer.strategy.root_device.type
    return named or torch.distributed.Backend.default_device_backend_map.get(device, "gloo")


def _environment(launch: Launch) -> ClusterEnvironment:
    """What tells Lightning the rank of this process, whose process group exists already."""
    return TorchElasticEnvironment() if launch.world_size > 1 else LightningEnvironment()


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _global_batch_text(experiment: Experiment) -> str:
    """The global batch as micro-batches, their size and the devices that share them: a part of a run's first line."""
    launch, micro_batches = experiment.launch, experiment.micro_batches
    limited = experiment.tokens_parameter is not None
    size = experiment.config.get(experiment.tokens_parameter or "batch_size")
    if not isinstance(size, int):
        return ""
    on = f"on {_counted(launch.world_size, 'device')} of {_counted(launch.num_nodes, 'node')}, "
    if micro_batches is None:
        return f"micro-batches of {size}{' tokens' * limited} {on}"
    total = (None if limited else experiment.update_items) or micro_batches * size
    short = f", the last of {total % size}," if total % size else ""
    parts = f"{_counted(micro_batches, 'micro-batch', 'es')} of {size}{' tokens' * limited}{short} {on}"
    return f"global batch {total}{' tokens' * limited} = {parts}"


def _print_first_line(trainer: pl.Trainer, experiment: Experiment) -> None:
    launch = f"{experiment.launch.describe()}, {_backend(trainer)}, " if trainer.world_size > 1 else ""
    batch = _global_batch_text(experiment) if experiment.command == "fit" else ""
    rank_zero_print(
        f"{experiment.recipe.title}: {launch}{hardware(trainer)}, {batch}precision"
        f" {experiment.run.precision}{experiment.notes}"
    )


def _callbacks(experiment: Experiment) -> list[Callback]:
    """New callbacks of any command."""
    options, callbacks = experiment.trainer, experiment.callbacks()
    shows = options["enable_progress_bar"] is not False and prints_progress()
    given = any(isinstance(callback, ProgressBar) for callback in callbacks)
    progress = NotebookProgress() if in_notebook() else RunProgress(log_interval=experiment.run.progress_interval)
    return [*callbacks, *([progress] if shows and not given else [])]


def renew_callbacks(trainer: pl.Trainer, experiment: Experiment, *more: Callback) -> None:
    """Give a Trainer that has trained the callbacks of one that evaluates a checkpoint.

    Those that have trained may put their own weights in place of the checkpoint's: Lightning's `WeightAveraging` loads
    those that were not averaged.
    """
    set_callbacks(trainer, [*_callbacks(experiment), *more])


def _limits(experiment: Experiment) -> dict[str, Any]:
    launch = experiment.launch
    return limits_per_device(experiment.trainer, launch.rank, launch.world_size)


def build_trainer(
    experiment: Experiment,
    more: Sequence[Callback] = (),
    folder: Path | None = None,
    checkpoint_io: VerifiedCheckpointIO | None = None,
) -> pl.Trainer:
    """Build the Trainer of a command and print what it will use.

    Args:
        more: callbacks of this command.
        folder: the run's folder, for logs.
        checkpoint_io: writes the checkpoints.
    """
    run, launch = experiment.run, experiment.launch
    options: dict[str, Any] = {**experiment.trainer, **_limits(experiment)}
    if not prints_progress():
        options["enable_progress_bar"] = False
    options["num_nodes"] = launch.num_nodes
    options["strategy"] = build_strategy(options["strategy"], launch.world_size)
    # Lightning moves the callbacks that save behind the others, and calls the first of them the Trainer's.
    saves = [callback for callback in more if isinstance(callback, Checkpoint)]
    callbacks = [*saves, *_callbacks(experiment), *(callback for callback in more if callback not in saves)]
    saved = [callback.state_key for callback in callbacks if type(callback).state_dict is not Callback.state_dict]
    if twice := [key for key in saved if saved.count(key) > 1]:
        raise UserError(
            f"the run has two {twice[0]}, and a checkpoint holds the state of one; pass the setting of the run in place"
            " of the callback, such as seed=7, accumulate=2 or ema=0.999"
        )
    with as_user_errors(ValueError, TypeError, ImportError, MisconfigurationException):
        trainer = pl.Trainer(
            **options,
            precision=run.precision,  # type: ignore[arg-type]
            deterministic=run.deterministic or None,
            logger=loggers(folder, experiment.point.checkpoint, logger_names(run.logger)) if folder else False,
            callbacks=callbacks,
            plugins=[_environment(launch), checkpoint_io or VerifiedCheckpointIO()],
            default_root_dir=str(folder) if folder else None,
            enable_autolog_hparams=False,
            enable_model_summary=False,
        )
    if trainer.is_global_zero:
        experiment.recipe.run_config.update(run_ids(trainer.loggers))
    # Lightning's EarlyStopping reads it, and a Trainer that validates by time does not have it.
    vars(trainer).setdefault("val_check_interval", None)
    set_collective_timeout(trainer.strategy, timedelta(seconds=launch.collective_timeout))
    if experiment.command != "predict":
        _print_first_line(trainer, experiment)
    return trainer
