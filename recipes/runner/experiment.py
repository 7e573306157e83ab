"""What a command works with: its settings, resolved once and then read-only, and what is built from them.

The values of the flags are completed in this order: threads, what the recipe needs to know of the data, the
defaults that the recipe's constructor computes, and what the data module finds out by itself, such as which data set
"auto" is: rank 0 decides, and the others get its values.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from callbacks.seed_control import SeedControl
from datamodules.contract import USUALLY_FREE, Free, OneCall, data_contract, marked_parameters
from datamodules.errors import UserError
from recipes.base import Recipe
from recipes.runner.command import Command
from recipes.runner.join import share
from recipes.runner.launch import Launch, LaunchSettings
from recipes.runner.limits import micro_batches_of_update
from recipes.runner.machine import default_threads
from recipes.runner.printing import rank_zero_print
from recipes.runner.resume import ResumePoint
from recipes.runner.saved_run import is_open, read_run
from recipes.runner.settings import RunSettings, run_callbacks

# Settings of the command that are no parameters.
_OF_ONE_CALL = frozenset({"config", "inputs", "predict_inputs", "profiler"})
_FREE_OF_TRAINER = {
    *("accelerator", "strategy", "devices", "num_nodes", "benchmark", "use_distributed_sampler", "inference_mode"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "model_registry"),
    *("limit_val_batches", "limit_test_batches", "limit_predict_batches", "val_check_interval"),
    *("check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing"),
    *("enable_progress_bar", "profiler", "detect_anomaly"),
}


@contextmanager
def as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions that the user's settings cause into `UserError`."""
    try:
        yield
    except kinds as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


def takes_inputs(data_class: type[pl.LightningDataModule]) -> bool:
    """Whether a data module's constructor takes the arguments of the predict command."""
    return "predict_inputs" in ArgumentParser(exit_on_error=False).add_class_arguments(data_class)


@dataclass(frozen=True)
class Classes:
    """The classes that a command line is made for.

    Args:
        recipe: what to train.
        data: what to train on.
        callbacks: makes further callbacks for the Trainer, new ones at each call.
        samples: in memory, which the data module takes; None where it reads its own.
        in_program: `recipes.fit` has been called by a program, which goes on after the run.
    """

    recipe: type[Recipe]
    data: type[pl.LightningDataModule]
    callbacks: Callable[[], Sequence[Callback]]
    samples: Any = None
    in_program: bool = False

    def build_data(self, options: Mapping[str, Any]) -> pl.LightningDataModule:
        """A data module, with the samples that were given in memory."""
        data = self.data(**options)
        if self.samples is not None:
            data_contract(data).take_samples(self.samples)
        return data

    @property
    def free_parameters(self) -> frozenset[str]:
        """Parameters of recipe and data that do not make the experiment."""
        return marked_parameters(self.recipe, Free) | marked_parameters(self.data, Free) | USUALLY_FREE

    @property
    def free_settings(self) -> frozenset[str]:
        """Settings that do not make the experiment: what it learns stays, or only its length changes."""
        return self.free_parameters | marked_parameters(RunSettings, Free) | _FREE_OF_TRAINER

    @property
    def call_parameters(self) -> frozenset[str]:
        """Settings that belong to one call, and are not saved with a run."""
        marked = (marked_parameters(cls, OneCall) for cls in (self.recipe, self.data, RunSettings, LaunchSettings))
        return _OF_ONE_CALL.union(*marked)


@dataclass(frozen=True)
class Experiment:
    """A command with what it works with.

    Args:
        command: fit, validate, test, predict or export.
        run: the settings of the run, with the resolved precision and threads.
        trainer: arguments of the Trainer.
        config: the settings that make the experiment, as plain values: what is saved with the run.
        launch: which process this is.
        point: where the run resumes.
        recipe: to train or evaluate.
        data: to train or evaluate on.
        callbacks: makes the callbacks of a Trainer, new ones at each call.
        typed: what the user typed.
        notes: on precision and memory, for the run's first line.
    """

    command: str
    run: RunSettings
    trainer: Mapping[str, Any]
    config: Mapping[str, Any]
    launch: Launch
    point: ResumePoint
    recipe: Recipe
    data: pl.LightningDataModule
    callbacks: Callable[[], list[Callback]]
    typed: Command
    notes: str = ""

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate."""
        overridden = is_overridden("validation_step", self.recipe) and is_overridden("val_dataloader", self.data)
        return overridden and data_contract(self.data).validates

    @property
    def tokens_parameter(self) -> str | None:
        """The setting that limits a batch by tokens, where it is given."""
        name = data_contract(self.data).tokens_parameter
        return name if name and self.config.get(name) else None

    @property
    def update_items(self) -> int | None:
        """Of an update, on all devices, where settings or checkpoint tell: samples, or batches limited by tokens."""
        saved = read_run(self.point.checkpoint).update_items if self.point.checkpoint else None
        return saved or self.run.global_batch_size

    @property
    def micro_batches(self) -> int | None:
        """Of an update, on all devices; None where their number is not known yet."""
        saved = read_run(self.point.checkpoint) if self.point.checkpoint else None
        if saved and not self.update_items and saved.devices != self.launch.world_size:
            return None  # A loader without numbers keeps the samples of an update, and they are not known here.
        batch_size = 1 if self.tokens_parameter else self.config.get("batch_size")
        return micro_batches_of_update(self.run.accumulate, self.update_items, batch_size, self.launch.world_size)


def _set_threads(command: str, asked: int | None, launch: Launch) -> int:
    """Set the number of threads on every rank: that of the flag or the checkpoint, else the default of rank 0."""
    default = default_threads(os.environ, launch.devices)
    threads = int(asked or share(lambda: default))
    if threads > default and command not in ("predict", "export"):
        rank_zero_print(f"threads: {threads} in each process, and {default} would be the default here")
    torch.set_num_threads(threads)
    return threads


def _fill(options: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Options with those that were left open replaced."""
    filled = {name: value for name, value in found.items() if name in options and is_open(options[name])}
    return {**options, **{name: value for name, value in filled.items() if value is not None}}


def _set_arguments(data: pl.LightningDataModule, values: Mapping[str, Any]) -> None:
    """Change what a data module was built with, where it is open."""
    data.hparams.update(_fill(data.hparams, values))


def _resolve_data(
    options: dict[str, Any],
    saved: Mapping[str, Any] | None,
    classes: Classes,
    data: pl.LightningDataModule,
    recipe: Recipe,
    launch: Launch,
) -> tuple[pl.LightningDataModule, dict[str, Any]]:
    """The data module and its arguments, with those that were left open decided by the recipe, and on rank 0.

    Args:
        saved: the settings of a run that is resumed. Found again elsewhere, "auto" might be another data set. What
            makes no difference is chosen anew.
    """
    if saved is not None:
        found, asked = {name: value for name, value in saved.items() if name not in classes.free_parameters}, False
    else:
        wanted = recipe.settings_for_data()
        options = _fill(options, wanted)
        _set_arguments(data, {**wanted, **options})  # A data module that was passed to `fit` has no options.
        found = share(data_contract(data).resolve)
        asked = launch.rank == 0
    resolved = _fill(options, found)
    if resolved == options:
        return data, resolved
    if not asked:
        return classes.build_data(resolved), resolved
    # It has read and decided that itself, and need not read again.
    _set_arguments(data, resolved)
    return data, resolved


def build_experiment(
    command: str,
    run: RunSettings,
    options: Callable[[str], dict[str, Any]],
    values: dict[str, Any],
    config: dict[str, Any],
    classes: Classes,
    *,
    launch: Launch,
    point: ResumePoint,
    typed: Command,
    notes: str,
) -> Experiment:
    """Complete what the flags left open, and build from it.

    Args:
        run: with the threads as they were given.
        options: the values of another group of flags, by its title.
        values: of all flags.
        config: those that make the experiment, as plain values.

    Raises:
        UserError: a value is refused, the data cannot be read, or the devices cannot share the global batch.
    """
    before = read_run(point.checkpoint) if point.checkpoint else None
    if before and before.devices not in (None, launch.world_size):
        rank_zero_print(f"devices: {before.devices} before, {launch.world_size} now; the updates and their order stay")
    left_open = before.left_open if before else [name for name, value in config.items() if is_open(value)]
    threads = _set_threads(command, run.threads, launch)
    run = replace(run, threads=threads)
    for settings in (values, config):
        settings["threads"] = threads
    with as_user_errors(MisconfigurationException):
        # First, because it seeds the initial weights.
        seeds = SeedControl(run.seed)
        of_data, of_recipe = options("Data"), options("Recipe")
        data = classes.build_data(of_data)
        # Before the data are read, so that wrong flags are refused before a download.
        if before is None and not run.ckpt:
            given = {**of_recipe, **{name: values[name] for name in ("max_epochs", "max_steps")}}
            of_recipe = _fill(of_recipe, classes.recipe.settings_from_data(data, **given))
        recipe = classes.recipe(**of_recipe)
        if not run.ckpt:
            saved = before.config if before else None
            data, of_data = _resolve_data(of_data, saved, classes, data, recipe, launch)
        # The recipe's constructor computes defaults that depend on other parameters. It may share some with the data.
        recipe.run_config, recipe.left_open = _fill(_fill(config, recipe.hparams), of_data), left_open
    return Experiment(
        command=command,
        run=run,
        trainer=MappingProxyType(options("Trainer")),
        config=MappingProxyType(dict(recipe.run_config)),
        launch=launch,
        point=point,
        recipe=recipe,
        data=data,
        callbacks=lambda: [*run_callbacks(run, recipe, seeds), *classes.callbacks()],
        typed=typed,
        notes=notes,
    )
