"""Recipe, data module, callbacks and Trainer of a run, built from its record.

Settings that are None or "auto" are resolved in this order:

1. the number of threads;
2. arguments of the recipe that depend on the data, such as the number of classes;
3. defaults that the recipe's constructor computes;
4. arguments that the data module finds in its files, such as the data set of "auto": rank 0 decides for all ranks.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.lightning_internals import set_collective_timeout
from callbacks.lib.threads import set_threads, threads_of_program
from callbacks.preemption import Preemption
from callbacks.rank_consistency import RankConsistency
from callbacks.run_progress import RunProgress
from callbacks.seed_control import SeedControl
from callbacks.sync_bn import SyncBN, check_batchnorm
from callbacks.warmup_lr import WarmupLR
from callbacks.weight_averaging import WeightAveraging
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError, spelled
from datamodules.lightning import (
    Callback,
    Checkpoint,
    ClusterEnvironment,
    EarlyStopping,
    LightningEnvironment,
    MisconfigurationException,
    ModelSummary,
    ProgressBar,
    TorchElasticEnvironment,
    is_overridden,
    pl,
)
from recipes.base import Recipe
from recipes.optim import learning_rate_scale
from recipes.runner.command import Command
from recipes.runner.errors import prints_progress, rank_zero_print
from recipes.runner.flags import RunClasses, changeable_parameters
from recipes.runner.launch import Launch, on_devices_of
from recipes.runner.loggers import NotebookProgress, in_notebook, logger_names, loggers
from recipes.runner.machine import detect_machine, shared_cores
from recipes.runner.saved_run import SavedRun, hardware
from recipes.runner.settings import (
    RunSettings,
    as_plain,
    build_strategy,
    limits_per_device,
    micro_batches_of_update,
    resolve_auto,
)
from recipes.runner.spec import RunSpec
from recipes.runner.worker import broadcast_from_rank_zero


class PatientStopping(EarlyStopping):
    """Lightning's `EarlyStopping` with the patience of this command, not the one in the checkpoint."""

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with self._naming_scores(trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with self._naming_scores(trainer, pl_module):
            super().on_validation_end(trainer, pl_module)

    @contextmanager
    def _naming_scores(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # Lightning's error has the arguments of EarlyStopping, not our flags.
            scores = sorted(name for name in trainer.callback_metrics if "_class_" not in name)
            raise RunFailedError(
                f"{spelled('patience')} follows {self.monitor}, the `monitor` of {type(pl_module).__name__}, and this"
                f" run has no such score; it has {', '.join(scores)}"
            ) from error


def why_stopped(callbacks: Sequence[Callback]) -> str:
    """Return the reason of the callback that ended the training early, or ""."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return callback.stopping_reason_message.replace(" Signaling Trainer to stop.", "").rstrip(".")
    return ""


def callbacks_maker(
    settings: RunSettings,
    recipe: Recipe,
    user_callbacks: Callable[[], Sequence[Callback]],
    *,
    seeds: SeedControl,
    world_size: int,
    shows_progress: bool,
) -> Callable[..., list[Callback]]:
    """Return a function that makes new callbacks for a Trainer at each call.

    Its arguments are the callbacks that save, which come first, and the callbacks that record the run, which come last.

    Args:
        user_callbacks: a function that makes the user's callbacks.
        seeds: the callback that has seeded the initial weights.
        world_size: number of processes of the run.
        shows_progress: whether the run shows its progress, unless a user's callback does.
    """
    scale = learning_rate_scale(settings.lr_scale, recipe.hparams.optimizer)
    if settings.sync_bn:
        check_batchnorm(recipe)  # Before other processes start.

    def make(saves: Sequence[Callback] = (), records: Sequence[Callback] = ()) -> list[Callback]:
        # Lightning moves the callbacks that save to the end; the first of them is `trainer.checkpoint_callback`.
        callbacks: list[Callback] = [
            *saves,
            GradientAccumulation(settings.accumulate, settings.global_batch_size),
            seeds,
            WarmupLR(settings.warmup, scale=scale, base_batch_size=recipe.base_batch_size if scale else None),
        ]
        if world_size > 1:
            callbacks.append(RankConsistency())
        callbacks.append(Preemption())
        if settings.sync_bn:
            callbacks.append(SyncBN())
        if settings.ema is not None:
            callbacks.append(WeightAveraging(settings.ema))
        if settings.patience is not None:
            callbacks.append(PatientStopping(recipe.monitor, patience=settings.patience, mode=recipe.monitor_mode))
        if settings.summary:
            callbacks.append(ModelSummary(max_depth=-1))
        callbacks += user_callbacks()
        has_progress_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if shows_progress and prints_progress() and not has_progress_bar:
            if in_notebook():
                callbacks.append(NotebookProgress())
            else:
                callbacks.append(RunProgress(log_interval=settings.progress_interval))
        callbacks += records
        _reject_two_states(callbacks)
        return callbacks

    return make


def _reject_two_states(callbacks: Sequence[Callback]) -> None:
    """Reject two callbacks with the same state key: a checkpoint would have the state of only one of them."""
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
        # ModelCheckpoint rejects a larger `save_top_k` without a monitored score.
        save_top_k = min(1, abs(save_top_k))
    best = ExactCheckpoint(
        folder / "checkpoints",
        filename="best" if save_top_k in (0, 1) else "best-{step}",
        monitor=monitor,
        mode=recipe.monitor_mode,
        save_top_k=save_top_k,
        last_every=str(settings.save_every),
    )
    return [best]


@contextmanager
def as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Convert exceptions that the user's settings cause to `UserError`."""
    try:
        yield
    except kinds as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


@dataclass(frozen=True)
class BuiltRun:
    """Read-only record of a run with its recipe, data module and callbacks.

    Args:
        spec: the record of the run, completed by values from the data and the machine.
        launch: the position of this process in the run.
        recipe: the recipe to train or evaluate.
        data: the data module.
        callbacks: a function that makes new callbacks for a Trainer at each call; see `callbacks_maker`.
        typed: the user's command.
    """

    spec: RunSpec
    launch: Launch
    recipe: Recipe
    data: pl.LightningDataModule
    callbacks: Callable[..., list[Callback]]
    typed: Command

    @property
    def validates(self) -> bool:
        """Whether the run validates."""
        overridden = is_overridden("validation_step", self.recipe) and is_overridden("val_dataloader", self.data)
        return overridden and data_contract(self.data).validates

    @property
    def tokens_parameter(self) -> str | None:
        """The setting that limits a batch by tokens, if it has a value."""
        name = data_contract(self.data).tokens_parameter
        return name if name and self.spec.config.get(name) else None

    @property
    def update_items(self) -> int | None:
        """Number of samples of an update on all devices, or of batches limited by tokens; None if it is not known."""
        return (self.spec.saved and self.spec.saved.update_items) or self.spec.run.global_batch_size

    @property
    def micro_batches(self) -> int | None:
        """Number of micro-batches of an update on all devices; None if it is not known yet."""
        saved = self.spec.saved
        if saved and not self.update_items and saved.devices != self.launch.world_size:
            return None  # A stock loader keeps its own samples per update; their number is not known here.
        batch_size = 1 if self.tokens_parameter else self.spec.config.get("batch_size")
        return micro_batches_of_update(self.spec.run.accumulate, self.update_items, batch_size, self.launch.world_size)


def _settle_threads(command: str, run: RunSettings, saved: SavedRun | None, launch: Launch, *, on_cpu: bool) -> int:
    """Set the number of threads on every rank: from the flag or the checkpoint, else the default of rank 0.

    On a CPU, the bits depend on this number, so a line reports a number that differs from a run on one device.
    """
    of_program = threads_of_program()
    default = of_program or shared_cores(os.environ, launch.devices, torch.get_num_threads())
    threads = int(run.threads or broadcast_from_rank_zero(lambda: default))
    set_threads(threads)
    if not on_cpu or command in ("predict", "export"):
        return threads

    line = ""
    if threads > default:
        line = f"threads: {threads} in each process, and {default} would be the default here"
        if saved and saved.config.get("threads") == threads:
            line += f"; the run has {threads}, and {spelled('threads', default)} would change them and the bits"
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
    data.hparams.update(resolve_auto(data.hparams, values))


def _resolve_data(
    options: dict[str, Any],
    saved: Mapping[str, Any] | None,
    classes: RunClasses,
    data: pl.LightningDataModule,
    recipe: Recipe,
    launch: Launch,
) -> tuple[pl.LightningDataModule, dict[str, Any]]:
    """Return the data module and its arguments, completed by the recipe and by rank 0 from the data.

    Args:
        saved: the settings of a resumed run, or None. The saved values are used: resolved again, "auto" might select
            another data set. Settings that do not change the result are resolved again.
    """
    if saved is not None:
        changeable = changeable_parameters(classes)
        resolved_values = {name: value for name, value in saved.items() if name not in changeable}
        data_has_resolved = False
    else:
        recipe_settings = recipe.settings_for_data()
        options = resolve_auto(options, recipe_settings)
        # A data module that was passed to `fit` has no options, so the recipe's settings reach it only here.
        _set_arguments(data, {**recipe_settings, **options})
        resolved_values = broadcast_from_rank_zero(data_contract(data).resolve)
        data_has_resolved = launch.rank == 0  # `broadcast_from_rank_zero` calls `resolve` on rank 0 only.
    resolved = resolve_auto(options, resolved_values)
    if resolved == options:
        return data, resolved
    if not data_has_resolved:
        return classes.build_data(resolved), resolved
    # This data module has resolved these values itself; a new data module would read the files again.
    _set_arguments(data, resolved)
    return data, resolved


def _check_reached(recipe: Recipe, decided: Mapping[str, Any]) -> None:
    """Reject a recipe whose constructor does not accept a value that depends on the data."""
    for name, value in decided.items():
        if value is not None and name in recipe.hparams and recipe.hparams[name] != value:
            kind = type(recipe).__name__
            raise UserError(
                f"the constructor of {kind} takes no {spelled(name)}, which is {value} for these data and"
                f" {recipe.hparams[name]} in {kind}: give it **kwargs, and pass them on with super().__init__(**kwargs)"
            )


def build_run(spec: RunSpec, classes: RunClasses, launch: Launch, typed: Command, notes: str = "") -> BuiltRun:
    """Complete the settings that are None or "auto", and build recipe, data module and callbacks.

    Args:
        spec: the record of the run.
        typed: the user's command.
        notes: a note on memory for the run's first line.

    Raises:
        UserError: a value is rejected, the data cannot be read, or the devices cannot share the global batch.
    """
    saved = spec.saved
    if saved and saved.devices not in (None, launch.world_size):
        rank_zero_print(f"devices: {saved.devices} before, {launch.world_size} now; the updates and their order stay")
    on_cpu = detect_machine(spec.trainer.accelerator).kind == "cpu"
    threads = _settle_threads(spec.command, spec.run, saved, launch, on_cpu=on_cpu)
    run = replace(spec.run, threads=threads)
    with as_user_errors(MisconfigurationException):
        # Before the recipe is built: SeedControl seeds the initial weights.
        seeds = SeedControl(int(run.seed))
        data_options = spec.data
        recipe_options = spec.recipe
        data = classes.build_data(data_options)
        from_data: Mapping[str, Any] = {}
        # Before the data are read: the recipe's constructor rejects wrong settings before a download.
        if saved is None and not run.ckpt:
            length = {"max_epochs": spec.trainer.max_epochs, "max_steps": spec.trainer.max_steps}
            from_data = classes.recipe.settings_from_data(data, **{**recipe_options, **length})
            recipe_options = resolve_auto(recipe_options, from_data)
        recipe = classes.recipe(**recipe_options)
        not_passed = {name: value for name, value in from_data.items() if name not in recipe_options}
        _check_reached(recipe, not_passed)
        if not run.ckpt:
            saved_config = saved.config if saved else None
            data, data_options = _resolve_data(data_options, saved_config, classes, data, recipe, launch)
    trainer = on_devices_of(launch, spec.trainer)
    # The recipe first: its constructor computes defaults, and it may share parameters with the data module.
    resolved = resolve_auto(resolve_auto({**spec.config, "threads": run.threads}, recipe.hparams), data_options)
    config = {name: as_plain(value) for name, value in resolved.items()}
    return BuiltRun(
        spec=replace(spec, run=run, trainer=trainer, config=config, notes=spec.notes + notes),
        launch=launch,
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
    )


def _backend(trainer: pl.Trainer) -> str:
    """Return the backend of collective calls: nccl, gloo or another."""
    chosen = getattr(trainer.strategy, "process_group_backend", None)
    device = trainer.strategy.root_device.type
    return chosen or torch.distributed.Backend.default_device_backend_map.get(device, "gloo")


def _environment(launch: Launch) -> ClusterEnvironment:
    """Return Lightning's cluster environment for the existing process group."""
    return TorchElasticEnvironment() if launch.world_size > 1 else LightningEnvironment()


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _global_batch_text(built: BuiltRun) -> str:
    """Describe the global batch for a run's first line: micro-batches, their size, and devices."""
    launch = built.launch
    micro_batches = built.micro_batches
    limited = built.tokens_parameter is not None
    size = built.spec.config.get(built.tokens_parameter or "batch_size")
    if not isinstance(size, int):
        return ""
    tokens = " tokens" if limited else ""
    placement = f"on {_counted(launch.world_size, 'device')} of {_counted(launch.num_nodes, 'node')}, "
    if micro_batches is None:
        return f"micro-batches of {size}{tokens} {placement}"
    total = (None if limited else built.update_items) or micro_batches * size
    last_size = f", the last of {total % size}," if total % size else ""
    micro_batch_text = f"{_counted(micro_batches, 'micro-batch', 'es')} of {size}{tokens}{last_size} {placement}"
    return f"global batch {total}{tokens} = {micro_batch_text}"


def _print_first_line(trainer: pl.Trainer, built: BuiltRun) -> None:
    launch = f"{built.launch.describe()}, {_backend(trainer)}, " if trainer.world_size > 1 else ""
    batch = _global_batch_text(built) if built.spec.command == "fit" else ""
    rank_zero_print(
        f"{built.recipe.title}: {launch}{hardware(trainer)}, {batch}precision"
        f" {built.spec.run.precision}{built.spec.notes}"
    )


def build_trainer(
    built: BuiltRun,
    callbacks: Sequence[Callback],
    folder: Path | None = None,
    checkpoint_io: VerifiedCheckpointIO | None = None,
) -> pl.Trainer:
    """Build the Trainer of a command and print the run's first line.

    Args:
        callbacks: all callbacks except the recipe's.
        folder: the run's folder, for logs; None for a command that logs nothing.
        checkpoint_io: the writer of checkpoints.
    """
    run = built.spec.run
    launch = built.launch
    options: dict[str, Any] = built.spec.trainer.options()
    options |= limits_per_device(options, launch.rank, launch.world_size)
    if not prints_progress():
        options["enable_progress_bar"] = False
    options["num_nodes"] = launch.num_nodes
    options["strategy"] = build_strategy(options["strategy"], launch.world_size)
    with as_user_errors(ValueError, TypeError, ImportError, MisconfigurationException):
        trainer = pl.Trainer(
            **options,
            precision=run.precision,  # type: ignore[arg-type]
            # None, not False, with which Lightning disables deterministic algorithms that the program has enabled.
            deterministic=run.deterministic or None,
            logger=loggers(folder, built.spec.saved, logger_names(run.logger)) if folder else False,
            callbacks=list(callbacks),
            plugins=[_environment(launch), checkpoint_io or VerifiedCheckpointIO()],
            default_root_dir=str(folder) if folder else None,
            enable_autolog_hparams=False,  # `log_settings` logs them.
            enable_model_summary=False,  # `--summary` adds the callback.
        )
    # Lightning's EarlyStopping reads this attribute, but a Trainer that validates by time does not have it.
    vars(trainer).setdefault("val_check_interval", None)
    set_collective_timeout(trainer.strategy, timedelta(seconds=launch.collective_timeout))
    if built.spec.command != "predict":
        _print_first_line(trainer, built)
    return trainer
