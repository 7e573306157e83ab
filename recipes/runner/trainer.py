"""Build the Trainer of a command, and print the first line of a run."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.lib.lightning_internals import set_collective_timeout
from datamodules.lightning import (
    Callback,
    ClusterEnvironment,
    LightningEnvironment,
    MisconfigurationException,
    TorchElasticEnvironment,
    pl,
)
from recipes.runner.console import prints_progress
from recipes.runner.experiment import Experiment, as_user_errors
from recipes.runner.launch import Launch
from recipes.runner.limits import limits_per_device
from recipes.runner.loggers import logger_names, loggers
from recipes.runner.printing import rank_zero_print
from recipes.runner.results import hardware
from recipes.runner.strategies import build_strategy


def _backend(trainer: pl.Trainer) -> str:
    """Return the backend of collective calls: nccl, gloo or another."""
    chosen = getattr(trainer.strategy, "process_group_backend", None)
    device = trainer.strategy.root_device.type
    return chosen or torch.distributed.Backend.default_device_backend_map.get(device, "gloo")


def _environment(launch: Launch) -> ClusterEnvironment:
    """Return Lightning's cluster environment for a process group that exists already."""
    return TorchElasticEnvironment() if launch.world_size > 1 else LightningEnvironment()


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _global_batch_text(experiment: Experiment) -> str:
    """Describe the global batch for a run's first line: micro-batches, their size, and devices."""
    launch = experiment.launch
    micro_batches = experiment.micro_batches
    limited = experiment.tokens_parameter is not None
    size = experiment.config.get(experiment.tokens_parameter or "batch_size")
    if not isinstance(size, int):
        return ""
    tokens = " tokens" if limited else ""
    placement = f"on {_counted(launch.world_size, 'device')} of {_counted(launch.num_nodes, 'node')}, "
    if micro_batches is None:
        return f"micro-batches of {size}{tokens} {placement}"
    total = (None if limited else experiment.update_items) or micro_batches * size
    last_size = f", the last of {total % size}," if total % size else ""
    micro_batch_text = f"{_counted(micro_batches, 'micro-batch', 'es')} of {size}{tokens}{last_size} {placement}"
    return f"global batch {total}{tokens} = {micro_batch_text}"


def _print_first_line(trainer: pl.Trainer, experiment: Experiment) -> None:
    launch = f"{experiment.launch.describe()}, {_backend(trainer)}, " if trainer.world_size > 1 else ""
    batch = _global_batch_text(experiment) if experiment.command == "fit" else ""
    rank_zero_print(
        f"{experiment.recipe.title}: {launch}{hardware(trainer)}, {batch}precision"
        f" {experiment.run.precision}{experiment.notes}"
    )


def build_trainer(
    experiment: Experiment,
    callbacks: Sequence[Callback],
    folder: Path | None = None,
    checkpoint_io: VerifiedCheckpointIO | None = None,
) -> pl.Trainer:
    """Build the Trainer of a command and print what it will use.

    Args:
        callbacks: all callbacks except those of the recipe.
        folder: the run's folder, for logs; None for a command that logs nothing.
        checkpoint_io: writes the checkpoints.
    """
    run = experiment.run
    launch = experiment.launch
    options: dict[str, Any] = experiment.trainer.options()
    options |= limits_per_device(options, launch.rank, launch.world_size)
    if not prints_progress():
        options["enable_progress_bar"] = False
    options["num_nodes"] = launch.num_nodes
    options["strategy"] = build_strategy(options["strategy"], launch.world_size)
    with as_user_errors(ValueError, TypeError, ImportError, MisconfigurationException):
        trainer = pl.Trainer(
            **options,
            precision=run.precision,  # type: ignore[arg-type]
            deterministic=run.deterministic or None,
            logger=loggers(folder, experiment.saved, logger_names(run.logger)) if folder else False,
            callbacks=list(callbacks),
            plugins=[_environment(launch), checkpoint_io or VerifiedCheckpointIO()],
            default_root_dir=str(folder) if folder else None,
            enable_autolog_hparams=False,  # `log_settings` logs them.
            enable_model_summary=False,
        )
    # Lightning's EarlyStopping reads this attribute, which a Trainer that validates by time does not have.
    vars(trainer).setdefault("val_check_interval", None)
    set_collective_timeout(trainer.strategy, timedelta(seconds=launch.collective_timeout))
    if experiment.command != "predict":
        _print_first_line(trainer, experiment)
    return trainer
