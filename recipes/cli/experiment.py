"""Settings are resolved once, then frozen, and everything is built from them.

The values of the flags are completed in this order: the launch (which other processes there are), the global batch of a
resumed run, what the recipe needs to know of the data, the defaults that the recipe's constructor computes, and what
the data module finds out by itself, such as which data set "auto" is: rank 0 decides, and the others get its values.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from callbacks.seed_control import SeedControl, draw_seed
from datamodules.contract import USUALLY_FREE, Free, OneCall, data_contract, marked_parameters
from datamodules.errors import UserError
from recipes.base import Recipe
from recipes.cli.limits import micro_batches_of_update
from recipes.cli.settings import RunSettings, run_callbacks
from recipes.results.weights_record import Interval
from recipes.resume.resume_point import ResumePoint
from recipes.resume.saved_run import read_run
from recipes.runner.failure_monitor import FailureMonitor
from recipes.runner.join import share
from recipes.runner.launch import Launch, LaunchSettings, rank_zero_print
from recipes.runner.machine import default_threads

__all__ = ["Classes", "Experiment", "Settings", "as_user_errors", "build_experiment", "takes_inputs"]


# Settings of the command that are no parameters.
_OF_ONE_CALL = frozenset({"config", "inputs", "predict_inputs", "profiler"})
_FREE_OF_TRAINER = {
    *("accelerator", "strategy", "devices", "num_nodes", "benchmark", "use_distributed_sampler", "inference_mode"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "barebones", "model_registry"),
    *("limit_val_batches", "limit_test_batches", "limit_predict_batches", "val_check_interval"),
    *("check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing"),
    *("enable_progress_bar", "profiler", "detect_anomaly"),
}


@runtime_checkable
class _PreparesData(Protocol):
    """A recipe on which arguments of the data module depend, such as the statistics that its weights expect."""

    def settings_for_data(self) -> dict[str, Any]:
        """These arguments; they are taken where the user has given no value, and saved with the settings."""


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
class Settings:
    """The settings of one command.

    Args:
        command: fit, validate, test, predict or export.
        run: with the resolved precision and the checkpoint to resume from.
        data: arguments of the data module's constructor.
        recipe: arguments of the recipe's constructor.
        trainer: arguments of the Trainer.
        config: the settings that make the experiment, as plain values: what is saved with the run.
        changed: names of those in `config` for which the user, or the resumed run, gave another value than the default.
        tokens_parameter: the setting that, where it is given, limits a batch by tokens.
        launch: which process this is.
        resume_point: where the run resumes.
        resumes_by_itself: the checkpoint was found, not given by the user.
        collective_timeout: seconds that a rank waits for the others in a collective call.
        notes: for the run's first line, by what they explain: "precision", "memory" and a "seed" that was drawn.
        interval: the part of a run that verify trains again.
    """

    command: str
    run: RunSettings
    data: Mapping[str, Any]
    recipe: Mapping[str, Any]
    trainer: Mapping[str, Any]
    config: Mapping[str, Any]
    changed: Sequence[str]
    tokens_parameter: str | None
    launch: Launch
    resume_point: ResumePoint
    resumes_by_itself: bool
    collective_timeout: float
    notes: Mapping[str, str]
    interval: Interval | None = None

    @property
    def update_items(self) -> int | None:
        """Of an update, on all devices, where settings or checkpoint tell: samples, or batches limited by tokens."""
        return (read_run(self.run.resume).update_items if self.run.resume else None) or self.run.global_batch_size

    @property
    def micro_batches(self) -> int | None:
        """Of an update, on all devices; None where their number is not known yet."""
        saved = read_run(self.run.resume) if self.run.resume else None
        if saved and not self.update_items and saved.devices != self.launch.world_size:
            return None  # A loader without numbers keeps the samples of an update, and they are not known here.
        sizes = self.run.accumulate, self.update_items, self.data, self.launch.world_size
        return micro_batches_of_update(*sizes, self.tokens_parameter)


@dataclass(frozen=True)
class Experiment:
    """What a command works with; its settings are resolved and read-only.

    Args:
        callbacks: makes the callbacks of a Trainer, new ones at each call.
        seed: of all random numbers.
        in_program: see `Classes`.
    """

    settings: Settings
    recipe: Recipe
    data: pl.LightningDataModule
    callbacks: Callable[[], list[Callback]]
    seed: int
    in_program: bool = False

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate."""
        overridden = is_overridden("validation_step", self.recipe) and is_overridden("val_dataloader", self.data)
        return overridden and data_contract(self.data).validates


def _print_devices(settings: Settings) -> None:
    """Say where a run is resumed on another number of devices."""
    if settings.command != "fit" or not settings.run.resume:
        return
    before, now = read_run(settings.run.resume).devices, settings.launch.world_size
    if before not in (None, now):
        rank_zero_print(f"devices: {before} before, {now} now; the updates and their order stay")


def _with_seed(settings: Settings, connection: FailureMonitor | None) -> tuple[Settings, int]:
    """Replace the seed "random" by that of the checkpoint, or by one that rank 0 draws for all; returns it, too."""
    run = settings.run
    if run.seed != "random":
        return settings, run.seed
    checkpoint = run.resume or run.ckpt
    seed = read_run(checkpoint).config.get("seed") if checkpoint else None
    if not isinstance(seed, int):
        wait = settings.collective_timeout
        seed = int(draw_seed() if connection is None else share(connection, "seed", draw_seed, wait))
    # A data module or a recipe may have the parameter, too.
    data, recipe = ({**o, "seed": seed} if "seed" in o else o for o in (settings.data, settings.recipe))
    config, notes = {**settings.config, "seed": seed}, {**settings.notes, "seed": f", seed {seed}"}
    return replace(settings, run=replace(run, seed=seed), data=data, recipe=recipe, config=config, notes=notes), seed


def _with_threads(settings: Settings, connection: FailureMonitor | None) -> Settings:
    """Set the number of threads on every rank: that of the flag or the checkpoint, else the default of rank 0."""
    threads, default = settings.run.threads, default_threads(os.environ, settings.launch.devices)
    if threads is None and connection is not None:
        threads = int(share(connection, "threads", lambda: default, settings.collective_timeout))
    threads = threads or default
    if threads > default and settings.command not in ("predict", "export"):
        rank_zero_print(f"threads: {threads} in each process, and {default} would be the default here")
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # Else Lightning's launcher sets another number.
    config = {**settings.config, "threads": threads}
    return replace(settings, run=replace(settings.run, threads=threads), config=config)


def _is_open(value: Any) -> bool:
    return value is None or value == "auto"


def _fill(options: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Options with those that were left open replaced."""
    filled = {name: value for name, value in found.items() if name in options and _is_open(options[name])}
    return {**options, **{name: value for name, value in filled.items() if value is not None}}


def _build_recipe(settings: Settings, classes: Classes, data: pl.LightningDataModule) -> Recipe:
    options: Mapping[str, Any] = dict(settings.recipe)
    if not (settings.run.resume or settings.run.ckpt):
        given = {**options, "max_epochs": settings.trainer.get("max_epochs")}
        options = _fill(options, classes.recipe.settings_from_data(data, **given))
    return classes.recipe(**options)


def _resolved_data(
    settings: Settings,
    classes: Classes,
    data: pl.LightningDataModule,
    recipe: Recipe,
    connection: FailureMonitor | None,
) -> tuple[pl.LightningDataModule, Mapping[str, Any]]:
    """The data module and its arguments, with those that were left open decided by the recipe, and on rank 0."""
    if settings.run.ckpt:
        return data, settings.data
    if settings.run.resume:
        # Found again elsewhere, "auto" might be another data set. What makes no difference is chosen anew.
        saved = read_run(settings.run.resume).config
        found = {name: value for name, value in saved.items() if name not in classes.free_parameters}
        asked = False
    else:
        if isinstance(recipe, _PreparesData):
            settings = replace(settings, data=_fill(settings.data, recipe.settings_for_data()))
        _set_arguments(data, settings.data)
        resolve, wait = data_contract(data).resolve, settings.collective_timeout
        found = resolve() if connection is None else share(connection, "settings of the data", resolve, wait)
        asked = connection is None or settings.launch.rank == 0
    resolved = _fill(settings.data, found)
    if resolved == settings.data:
        return data, resolved
    if not asked:
        return classes.build_data(resolved), resolved
    # It has read and decided that itself, and need not read again.
    _set_arguments(data, resolved)
    return data, resolved


def _set_arguments(data: pl.LightningDataModule, values: Mapping[str, Any]) -> None:
    """Change what a data module was built with, where it is open."""
    data.hparams.update(_fill(data.hparams, values))


def build_experiment(settings: Settings, classes: Classes, connection: FailureMonitor | None) -> Experiment:
    """Complete what the flags left open, freeze the settings, and build from them.

    Args:
        connection: to the other ranks; None where the run is one process.

    Raises:
        UserError: a value is refused, the data cannot be read, or the devices cannot share the global batch.
    """
    _print_devices(settings)
    settings, seed = _with_seed(_with_threads(settings, connection), connection)
    with as_user_errors(MisconfigurationException):
        # First, because it seeds the initial weights.
        seeds = SeedControl(seed)
        data = classes.build_data(settings.data)
        # Before the data are read, so that wrong flags are refused before a download.
        recipe = _build_recipe(settings, classes, data)
        data, resolved = _resolved_data(settings, classes, data, recipe, connection)
        # The recipe's constructor computes defaults that depend on other parameters. It may share some with the data.
        config = MappingProxyType(_fill(_fill(settings.config, recipe.hparams), resolved))
        recipe.run_config = dict(config)
    settings = replace(settings, data=resolved, config=config)
    return Experiment(
        settings,
        recipe,
        data,
        lambda: [*run_callbacks(settings.run, recipe, seeds), *classes.callbacks()],
        seed,
        classes.in_program,
    )
