"""Build recipe, data module and callbacks of a run from its record, and complete what follows from the data.

Settings that are None or "auto" are resolved in this order:

1. the number of threads;
2. arguments of the recipe that depend on the data, such as the number of classes;
3. defaults that the recipe's constructor computes;
4. what the data module finds in its files, such as which data set "auto" is: rank 0 decides for all ranks.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from callbacks.lib.threads import set_threads, threads_of_program
from callbacks.seed_control import SeedControl
from datamodules.contract import data_contract
from datamodules.errors import UserError, spelled
from datamodules.lightning import Callback, MisconfigurationException, is_overridden, pl
from recipes.base import Recipe
from recipes.runner.callbacks_of_run import callbacks_maker
from recipes.runner.classes import Classes, free_parameters
from recipes.runner.command import Command
from recipes.runner.launch import Launch, on_devices_of
from recipes.runner.limits import micro_batches_of_update
from recipes.runner.machine import detect_machine, shared_cores
from recipes.runner.merging import as_plain, fill
from recipes.runner.printing import rank_zero_print
from recipes.runner.resume import ResumePoint
from recipes.runner.saved_run import SavedRun
from recipes.runner.settings import RunSettings, TrainerSettings
from recipes.runner.spec import RunSpec
from recipes.runner.worker import share


@contextmanager
def as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions that the user's settings cause into `UserError`."""
    try:
        yield
    except kinds as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


@dataclass(frozen=True)
class Experiment:
    """A command with its settings, recipe, data module and callbacks; read-only.

    Args:
        command: fit, validate, test, predict or export.
        run: the settings of the run, with the resolved precision and threads.
        trainer: the settings of the Trainer.
        config: the settings that make the experiment, as plain values: what is saved with the run.
        auto_settings: the settings that the first command of the run has left to the run.
        launch: the position of this process in the run.
        point: the folder and the checkpoint where the run resumes.
        saved: the settings and the progress in that checkpoint.
        recipe: to train or evaluate.
        data: to train or evaluate on.
        callbacks: makes the callbacks of a Trainer, new ones at each call; see `callbacks_maker`.
        typed: what the user typed.
        notes: notes on precision and memory for the run's first line.
    """

    command: str
    run: RunSettings
    trainer: TrainerSettings
    config: Mapping[str, Any]
    auto_settings: Sequence[str]
    launch: Launch
    point: ResumePoint
    saved: SavedRun | None
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
        """The setting that limits a batch by tokens, if it has a value."""
        name = data_contract(self.data).tokens_parameter
        return name if name and self.config.get(name) else None

    @property
    def update_items(self) -> int | None:
        """Samples of an update on all devices, or batches limited by tokens; None if they are not known."""
        return (self.saved and self.saved.update_items) or self.run.global_batch_size

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of an update on all devices; None if their number is not known yet."""
        saved = self.saved
        if saved and not self.update_items and saved.devices != self.launch.world_size:
            return None  # A stock loader keeps the samples of an update, and their number is not known here.
        batch_size = 1 if self.tokens_parameter else self.config.get("batch_size")
        return micro_batches_of_update(self.run.accumulate, self.update_items, batch_size, self.launch.world_size)


def _settle_threads(command: str, run: RunSettings, saved: SavedRun | None, launch: Launch, *, on_cpu: bool) -> int:
    """Set the number of threads on every rank: that of the flag or the checkpoint, else the default of rank 0.

    On a CPU the bits depend on it, so a line says where it is not what one device would have.
    """
    of_program = threads_of_program()
    default = of_program or shared_cores(os.environ, launch.devices, torch.get_num_threads())
    threads = int(run.threads or share(lambda: default))
    set_threads(threads)
    if not on_cpu or command in ("predict", "export"):
        return threads

    line = ""
    if threads > default:
        line = f"threads: {threads} in each process, and {default} would be the default here"
        if saved and saved.config.get("threads") == threads:
            line += f"; they are those of the run, and {spelled('threads', default)} would change them and the bits"
    elif run.threads is None and of_program is None and launch.world_size > 1:
        line = (
            f"threads: {threads} in each process, the default, on which the bits depend; one device ends with the same"
            f" weights with {spelled('threads', threads)}"
        )
    if line:
        rank_zero_print(line)
    return threads


def _set_arguments(data: pl.LightningDataModule, values: Mapping[str, Any]) -> None:
    """Set the arguments of a data module that are None or "auto"."""
    data.hparams.update(fill(data.hparams, values))


def _resolve_data(
    options: dict[str, Any],
    saved: Mapping[str, Any] | None,
    classes: Classes,
    data: pl.LightningDataModule,
    recipe: Recipe,
    launch: Launch,
) -> tuple[pl.LightningDataModule, dict[str, Any]]:
    """Return the data module and its arguments, completed by the recipe and by what rank 0 finds in the data.

    Args:
        saved: the settings of a run that is resumed, if any. Resolved again, "auto" might be another data set, so the
            saved values hold. Settings that do not change the result are resolved again.
    """
    if saved is not None:
        free = free_parameters(classes)
        resolved_values = {name: value for name, value in saved.items() if name not in free}
        data_has_resolved = False
    else:
        recipe_settings = recipe.settings_for_data()
        options = fill(options, recipe_settings)
        # A data module that was passed to `fit` has no options, so that the recipe's settings reach it only here.
        _set_arguments(data, {**recipe_settings, **options})
        resolved_values = share(data_contract(data).resolve)
        data_has_resolved = launch.rank == 0  # `share` calls `resolve` on rank 0 only.
    resolved = fill(options, resolved_values)
    if resolved == options:
        return data, resolved
    if not data_has_resolved:
        return classes.build_data(resolved), resolved
    # This data module has resolved these values itself; a new one would read the files again.
    _set_arguments(data, resolved)
    return data, resolved


def _check_reached(recipe: Recipe, decided: Mapping[str, Any]) -> None:
    """Refuse a recipe whose constructor does not take a value that follows from the data."""
    for name, value in decided.items():
        if value is not None and name in recipe.hparams and recipe.hparams[name] != value:
            kind = type(recipe).__name__
            raise UserError(
                f"the constructor of {kind} takes no {spelled(name)}, which is {value} for these data and"
                f" {recipe.hparams[name]} in {kind}: give it **kwargs, and pass them on with super().__init__(**kwargs)"
            )


def build_experiment(spec: RunSpec, classes: Classes, launch: Launch, typed: Command, notes: str = "") -> Experiment:
    """Complete the settings that are None or "auto", and build recipe, data module and callbacks.

    Args:
        spec: the record of the run.
        typed: what the user typed.
        notes: a note on memory for the run's first line.

    Raises:
        UserError: a value is refused, the data cannot be read, or the devices cannot share the global batch.
    """
    saved = spec.saved
    if saved and saved.devices not in (None, launch.world_size):
        rank_zero_print(f"devices: {saved.devices} before, {launch.world_size} now; the updates and their order stay")
    on_cpu = detect_machine(spec.trainer.accelerator).kind == "cpu"
    threads = _settle_threads(spec.command, spec.run, saved, launch, on_cpu=on_cpu)
    run = replace(spec.run, threads=threads)
    with as_user_errors(MisconfigurationException):
        # Before the recipe is built: SeedControl seeds the initial weights.
        seeds = SeedControl(run.seed)
        data_options = spec.data
        recipe_options = spec.recipe
        data = classes.build_data(data_options)
        from_data: Mapping[str, Any] = {}
        # Before the data are read: the recipe's constructor refuses wrong settings before a download.
        if saved is None and not run.ckpt:
            length = {"max_epochs": spec.trainer.max_epochs, "max_steps": spec.trainer.max_steps}
            from_data = classes.recipe.settings_from_data(data, **{**recipe_options, **length})
            recipe_options = fill(recipe_options, from_data)
        recipe = classes.recipe(**recipe_options)
        not_passed = {name: value for name, value in from_data.items() if name not in recipe_options}
        _check_reached(recipe, not_passed)
        if not run.ckpt:
            saved_config = saved.config if saved else None
            data, data_options = _resolve_data(data_options, saved_config, classes, data, recipe, launch)
    trainer = on_devices_of(launch, spec.trainer)
    # The recipe first: its constructor computes defaults, and it may share parameters with the data module.
    resolved = fill(fill({**spec.config, "threads": run.threads}, recipe.hparams), data_options)
    return Experiment(
        command=spec.command,
        run=run,
        trainer=trainer,
        config=MappingProxyType({name: as_plain(value) for name, value in resolved.items()}),
        auto_settings=spec.auto_settings,
        launch=launch,
        point=spec.point,
        saved=saved,
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
        notes=spec.notes + notes,
    )
