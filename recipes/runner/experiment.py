"""What a command works with: its settings, resolved once and then read-only, and what is built from them.

Settings that were left open are completed in this order: threads, what the recipe needs to know of the data, the
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
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from callbacks.seed_control import SeedControl
from datamodules.contract import data_contract
from datamodules.errors import UserError
from recipes.base import Recipe
from recipes.runner.callbacks_of_run import callbacks_maker
from recipes.runner.classes import Classes, free_parameters
from recipes.runner.command import Command
from recipes.runner.flags import FlagParser
from recipes.runner.join import share
from recipes.runner.launch import Launch
from recipes.runner.limits import micro_batches_of_update
from recipes.runner.machine import default_threads
from recipes.runner.merging import as_plain, fill, is_auto
from recipes.runner.printing import rank_zero_print
from recipes.runner.processes import on_devices_of
from recipes.runner.resume import ResumePoint
from recipes.runner.saved_run import read_run
from recipes.runner.settings import RunSettings, TrainerSettings


@contextmanager
def as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions that the user's settings cause into `UserError`."""
    try:
        yield
    except kinds as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


@dataclass(frozen=True)
class Experiment:
    """A command with what it works with.

    Args:
        command: fit, validate, test, predict or export.
        run: the settings of the run, with the resolved precision and threads.
        trainer: the settings of the Trainer.
        config: the settings that make the experiment, as plain values: what is saved with the run.
        auto_settings: which of them the first command of the run has left to it.
        launch: which process this is.
        point: where the run resumes.
        recipe: to train or evaluate.
        data: to train or evaluate on.
        callbacks: makes the callbacks of a Trainer, new ones at each call; see `callbacks_maker`.
        typed: what the user typed.
        notes: on precision and memory, for the run's first line.
    """

    command: str
    run: RunSettings
    trainer: TrainerSettings
    config: Mapping[str, Any]
    auto_settings: Sequence[str]
    launch: Launch
    point: ResumePoint
    recipe: Recipe
    data: pl.LightningDataModule
    callbacks: Callable[..., list[Callback]]
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


def _set_arguments(data: pl.LightningDataModule, values: Mapping[str, Any]) -> None:
    """Change what a data module was built with, where it is open."""
    data.hparams.update(fill(data.hparams, values))


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
            makes no difference is chosen again.
    """
    if saved is not None:
        free = free_parameters(classes)
        found = {name: value for name, value in saved.items() if name not in free}
        asked = False
    else:
        wanted = recipe.settings_for_data()
        options = fill(options, wanted)
        _set_arguments(data, {**wanted, **options})  # A data module that was passed to `fit` has no options.
        found = share(data_contract(data).resolve)
        asked = launch.rank == 0
    resolved = fill(options, found)
    if resolved == options:
        return data, resolved
    if not asked:
        return classes.build_data(resolved), resolved
    # It has read and decided that itself, and need not read again.
    _set_arguments(data, resolved)
    return data, resolved


def _check_reached(recipe: Recipe, decided: Mapping[str, Any]) -> None:
    """Refuse a recipe whose constructor does not take what the data decide, and whose base has another value."""
    for name, value in decided.items():
        if value is not None and name in recipe.hparams and recipe.hparams[name] != value:
            kind = type(recipe).__name__
            raise UserError(
                f"the constructor of {kind} takes no `{name}`, which is {value} for these data and"
                f" {recipe.hparams[name]} in {kind}: give it **kwargs, and pass them on with super().__init__(**kwargs)"
            )


def build_experiment(
    command: str,
    settings: Mapping[str, Any],
    parser: FlagParser,
    classes: Classes,
    *,
    run: RunSettings,
    trainer: TrainerSettings,
    config: Mapping[str, Any],
    launch: Launch,
    point: ResumePoint,
    typed: Command,
    inputs: Sequence[str] = (),
    notes: str = "",
) -> Experiment:
    """Complete what the settings left open, and build from them.

    Args:
        settings: all of them.
        parser: knows which settings are whose.
        run: those of the run, with the threads as they were given.
        trainer: those of the Trainer, with the devices as they were given.
        config: those that make the experiment, as plain values.
        inputs: of predict.

    Raises:
        UserError: a value is refused, the data cannot be read, or the devices cannot share the global batch.
    """
    before = read_run(point.checkpoint) if point.checkpoint else None
    if before and before.devices not in (None, launch.world_size):
        rank_zero_print(f"devices: {before.devices} before, {launch.world_size} now; the updates and their order stay")
    auto_settings = [name for name, value in config.items() if is_auto(value)]
    if before and before.auto_settings is not None:
        auto_settings = list(before.auto_settings)
    run = replace(run, threads=_set_threads(command, run.threads, launch))
    with as_user_errors(MisconfigurationException):
        # First, because it seeds the initial weights.
        seeds = SeedControl(run.seed)
        of_data = classes.with_inputs(parser.select(settings, "Data"), inputs)
        of_recipe = parser.select(settings, "Recipe")
        data = classes.build_data(of_data)
        decided: Mapping[str, Any] = {}
        # Before the data are read, so that wrong settings are refused before a download.
        if before is None and not run.ckpt:
            length = {name: settings[name] for name in ("max_epochs", "max_steps")}
            decided = classes.recipe.settings_from_data(data, **{**of_recipe, **length})
            of_recipe = fill(of_recipe, decided)
        recipe = classes.recipe(**of_recipe)
        _check_reached(recipe, {name: value for name, value in decided.items() if name not in of_recipe})
        if not run.ckpt:
            saved = before.config if before else None
            data, of_data = _resolve_data(of_data, saved, classes, data, recipe, launch)
    trainer = on_devices_of(launch, trainer)
    # The recipe's constructor computes defaults that depend on other parameters. It may share some with the data.
    resolved = fill(fill({**config, "threads": run.threads}, recipe.hparams), of_data)
    return Experiment(
        command=command,
        run=run,
        trainer=trainer,
        config=MappingProxyType({name: as_plain(value) for name, value in resolved.items()}),
        auto_settings=auto_settings,
        launch=launch,
        point=point,
        recipe=recipe,
        data=data,
        callbacks=callbacks_maker(
            run,
            recipe,
            classes.callbacks,
            seeds=seeds,
            world_size=launch.world_size,
            shows_progress=trainer.enable_progress_bar is not False,
        ),
        typed=typed,
        notes=notes,
    )
