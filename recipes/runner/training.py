"""Execution of a command on a built run: training in the run's folder, scores, predictions; with one-line errors."""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from callbacks.checkpointing.verified_io import raise_failures
from callbacks.checkpointing.writing import forget_failures
from callbacks.lib.lightning_internals import callbacks_of, raised_by_restoring, set_callbacks
from callbacks.lib.signals import SIGNALS, Preempted, is_batch_job, requeue_on
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError, first_line, is_out_of_memory, spelled
from datamodules.lightning import Callback, CombinedLoader, DummyLogger, is_overridden, pl
from datamodules.notes import inform, warn
from recipes.evaluation_tables import ResultTable
from recipes.figures.images import Picture
from recipes.prediction import all_rows, prediction_table
from recipes.runner.build import BuiltRun, build_trainer, checkpoint_callbacks, why_stopped
from recipes.runner.command import Command
from recipes.runner.errors import (
    difference_of_weights,
    exit_now,
    is_lost_connection,
    is_rank_zero,
    rank_zero_print,
    relative_path,
)
from recipes.runner.folder import locked, start_from, write_config
from recipes.runner.loggers import log_settings
from recipes.runner.report import (
    RunFiles,
    RunResult,
    figures_of,
    print_pairs,
    print_rows,
    print_scores,
    report,
    report_unsaved,
    tables_of,
)
from recipes.runner.saved_run import Stopwatch, write_rows
from recipes.runner.verify import (
    Interval,
    IntervalEnd,
    RecordedCheckpointIO,
    check_beginning,
    compare,
    read_saves,
    weights_hash,
)
from recipes.weights import load_initial_weights


@contextmanager
def handle_run_errors(
    trainer: pl.Trainer, built: BuiltRun, folder: Path | None = None, restores: str | None = None
) -> Iterator[None]:
    """Convert an error that ends a command to one line with the command to type.

    Args:
        folder: the run's folder, if it has one.
        restores: the checkpoint to restore, if any.
    """
    with _interruptible(trainer, built, folder), restoring(restores), _within_memory(trainer, built):
        yield


@contextmanager
def restoring(checkpoint: str | None) -> Iterator[None]:
    """Convert an error while a checkpoint is restored to one line.

    Raises:
        UserError: the checkpoint has unexpected values.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        is_of_weights = isinstance(error, RuntimeError) and difference_of_weights(error)
        if is_of_weights or is_lost_connection(error) or not raised_by_restoring(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{checkpoint} cannot be restored: it holds other values than were expected ({first_line(error)[:220]}, in"
            f" {frame.name} of {frame.filename}); pass another checkpoint"
        ) from error


@contextmanager
def _within_memory(trainer: pl.Trainer, built: BuiltRun) -> Iterator[None]:
    """Convert an out-of-memory error to one line with the settings to change."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_out_of_memory(error):
            raise
        config = built.spec.config
        rank = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        names = [name for name in (built.tokens_parameter or "batch_size", "eval_batch_size") if name in config]
        sizes = ", ".join(spelled(name, config[name]) for name in names)
        raise RunFailedError(
            f"out of memory{rank} with {sizes}: pass a smaller one; a larger {spelled('accumulate')}, or"
            f" {spelled('global_batch_size')}, keeps the samples of an update ({first_line(error)[:160]})"
        ) from error


@contextmanager
def _interruptible(trainer: pl.Trainer, built: BuiltRun, folder: Path | None) -> Iterator[None]:
    """Print how to resume when a signal ends the run, and exit; a program that called `fit` continues."""
    try:
        yield
    except Preempted as stopped:
        if built.typed.in_program:
            last = folder / "checkpoints" / "last.ckpt" if folder else None
            saved = f"; {spelled('resume', relative_path(last))} resumes it" if last and last.exists() else ""
            rank_zero_print(f"\nended by {stopped.signal_name}{saved}")
            raise
        with suppress(ValueError):  # Handlers need the main thread.
            # Slurm sends SIGTERM to a requeued job; it must not end this process before the message.
            for signum in SIGNALS:
                signal.signal(signum, signal.SIG_IGN)
        rank_zero_print(_resume_message(trainer, built, folder, stopped))
        sys.stderr.flush()
        # Loggers and loader processes have been closed; a regular exit would take another second.
        exit_now(int(stopped.code or 1))


def _resume_message(trainer: pl.Trainer, built: BuiltRun, folder: Path | None, stopped: Preempted) -> str:
    """Return the signal that ended a run, and the command that resumes it, in words."""
    typed = built.typed
    text = f"\nended by {stopped.signal_name}"
    note = requeue_on(stopped.signum) if stopped.at_once and is_rank_zero() else ""
    if note:
        text += f"; {note}"
    if folder is None:
        return text
    last = folder / "checkpoints" / "last.ckpt"
    best = last.with_name("best.ckpt")
    if not last.exists():
        last = best
    if not last.exists():
        return f"{text}; nothing was saved, so type the same command again"
    if stopped.trained or trainer.state.fn != "fit":
        test = typed.alone("test").using(ckpt=relative_path(best if best.exists() else last))
        return f"{text}; the training is done, so test with\n  {test}"
    # In an elastic run, the signal may have been for another node, which leaves the run.
    goes_on = built.launch.is_elastic and built.launch.restarts
    stays = "the nodes that stay go on without it, and if none does, " if goes_on else ""
    return f"{text}; {stays}{how_to_resume(typed, folder, last)}"


def how_to_resume(typed: Command, folder: Path, checkpoint: Path) -> str:
    """Return the command that resumes a run, after an introduction in words.

    Args:
        typed: the user's command.
        folder: the run's folder.
        checkpoint: the checkpoint to resume from.
    """
    start = f"resume in a new job with --name {folder.name}, or with" if is_batch_job(os.environ) else "resume with"
    # The command has the number of devices: another number would resume with rounding differences.
    devices = typed.devices if typed.launcher == "local" and typed.devices > 1 else None
    return f"{start}\n  {typed.alone().using(resume=relative_path(checkpoint), devices=devices)}"


class _LoaderAsIterable:
    """Wrapper of a DataLoader as an iterable with a length, which Lightning does not replace."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_sampler = loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def shard_loader(loader: Any, rank: int, world_size: int) -> Any:
    """Return this rank's batches of a DataLoader in order; other loaders are returned unchanged.

    The ranks take whole batches in turn, like `datamodules.EvaluationLoader`, or single samples if there are fewer
    batches than ranks. A loader with fewer samples than ranks is returned unchanged.
    """
    if not isinstance(loader, DataLoader):
        return loader
    if world_size == 1:
        return _LoaderAsIterable(loader)
    is_sequential = type(loader) is DataLoader and isinstance(loader.sampler, SequentialSampler)
    batches = list(loader.batch_sampler or ()) if is_sequential else []
    if len(batches) < world_size:
        samples = [index for batch in batches for index in batch]
        batches = [samples[start::world_size] for start in range(min(len(samples), world_size))]
    if len(batches) < world_size:
        if batches:
            warn(f"warning: of fewer samples ({len(batches)}) than devices ({world_size}) some are evaluated twice")
        return loader
    shard = copy(loader)
    # `DataLoader.__setattr__` raises if the batch sampler is changed.
    vars(shard)["batch_sampler"] = batches[rank::world_size]
    return _LoaderAsIterable(shard)


def _shard_loaders(make: Callable[[], Any], rank: int, world_size: int) -> Any:
    """Return this rank's shards of all loaders from a method of a data module."""
    loaders = make()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    combined.flattened = [shard_loader(loader, rank, world_size) for loader in combined.flattened]
    return loaders if combined is loaders else combined.iterables


def evaluate_each_sample_once(data: pl.LightningDataModule, rank: int, world_size: int) -> None:
    """Replace the evaluation loaders of a data module by this rank's shards; see `shard_loader`."""
    for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        if is_overridden(name, data):
            # Not a closure: in a copy of the data module, it would build the loaders of the original.
            setattr(data, name, partial(_shard_loaders, getattr(data, name), rank, world_size))


def train(built: BuiltRun, started_at: float) -> RunResult:
    """Train in the run's folder, then test the best checkpoint; a trial of a few batches has no folder.

    Args:
        started_at: `time.monotonic` at the start of the program.
    """
    forget_failures()
    if built.spec.trainer.fast_dev_run:
        return _train_in(None, built, Stopwatch(started_at))
    assert built.spec.point.folder is not None, "the record of a run names its folder"
    folder = Path(built.spec.point.folder)
    with locked(folder):
        files = RunFiles(started_at, folder, built)
        return _train_in(folder, built, files)


def _train_in(folder: Path | None, built: BuiltRun, stopwatch: Stopwatch) -> RunResult:
    saves: list[Callback] = []
    checkpoint_io = None
    if folder and built.spec.trainer.enable_checkpointing is not False:
        monitor = built.recipe.monitor if built.validates else None
        saves += checkpoint_callbacks(folder, monitor, built.recipe, built.spec.run)
        checkpoint_io = RecordedCheckpointIO(
            folder,
            built.recipe.title,
            built.spec.saved,
            built.spec.config,
            built.spec.auto_settings,
        )
    trainer = build_trainer(built, built.callbacks(saves, [stopwatch]), folder, checkpoint_io)
    if checkpoint_io is not None:
        checkpoint_io.begin(trainer)
    if folder and is_rank_zero():
        write_config(folder, built.spec.config)
        graph_of = built.recipe if built.spec.run.log_graph else None
        log_settings(trainer.loggers, built.spec.config, graph_of)
        for path in start_from(built.spec.point, folder):
            rank_zero_print(
                f"{relative_path(path)} has more updates than the checkpoint to resume from, and is renamed"
            )
    result = _train_and_test(trainer, built, folder, stopwatch)
    if trainer.is_global_zero:
        report(trainer, built, stopwatch, result)
        report_unsaved(folder)
    return result


def _ignore(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def _without_points(trainer: pl.Trainer) -> Iterator[None]:
    """Log no scores inside: an evaluation after training would add a point to the curves."""
    methods = [(logger, logger.log_metrics) for logger in trainer.loggers]
    for logger, _ in methods:
        logger.log_metrics = _ignore  # type: ignore[method-assign]
    try:
        yield
    finally:
        for logger, method in methods:
            logger.log_metrics = method  # type: ignore[method-assign]


def _best_checkpoint(trainer: pl.Trainer, folder: Path | None) -> Path | None:
    """Return the best existing checkpoint, else the last checkpoint; None if no checkpoint was saved."""
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    last = folder / "checkpoints" / "last.ckpt" if folder else None
    for path in (best, last):
        if path and Path(path).is_file():
            return Path(path)
    return None


def merged(of_loaders: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the scores of all loaders of an evaluation; Lightning adds the loader's number to their names."""
    return {name: value for scores in of_loaders for name, value in scores.items()}


def _last_logged(trainer: pl.Trainer) -> dict[str, float]:
    """Return the last logged values; an epoch's value wins over a step's value."""
    metrics = trainer.callback_metrics.items()
    logged = {name: float(value) for name, value in metrics if name.split("/")[0] != "lr"}
    # Lightning logs NAME, NAME_step and NAME_epoch for a score of steps and epochs.
    duplicates = {f"{name}{suffix}" for name in logged for suffix in ("_step", "_epoch")}
    return {name: logged.get(f"{name}_epoch", value) for name, value in logged.items() if name not in duplicates}


def _train_and_test(trainer: pl.Trainer, built: BuiltRun, folder: Path | None, stopwatch: Stopwatch) -> RunResult:
    """Train, then score the best checkpoint like the commands validate and test."""
    recipe = built.recipe
    data = built.data
    resume = built.spec.point.checkpoint
    if folder and 0 in (trainer.max_epochs, trainer.max_steps):
        rank_zero_print("nothing is trained in 0 epochs or steps: the initial weights are saved and scored")
    # With weights_only, here and below: a received checkpoint must not run code.
    with handle_run_errors(trainer, built, folder, restores=resume):
        trainer.fit(recipe, data, ckpt_path=resume, weights_only=True)
        raise_failures(trainer)
    stopped_early = why_stopped(callbacks_of(trainer))
    epochs = trainer.current_epoch
    # Before the best checkpoint is loaded.
    weights_sha256 = weights_hash(recipe.state_dict()) if trainer.is_global_zero else None
    best = _best_checkpoint(trainer, folder)
    scores: dict[str, float] = {}
    last_logged = _last_logged(trainer)
    tables: dict[str, ResultTable] = {}
    # Before the callbacks and their pictures are replaced.
    figures: dict[str, Picture] = figures_of(trainer)
    # New callbacks, because the callbacks of the training may replace the checkpoint's weights: Lightning's
    # `WeightAveraging` loads weights that were not averaged.
    set_callbacks(trainer, built.callbacks(records=[stopwatch]))
    tests = is_overridden("test_step", recipe) and is_overridden("test_dataloader", data)
    if folder and (built.validates or tests):
        rank_zero_print(f"scoring {relative_path(best) if best else 'the weights'} ...")
    ckpt = str(best) if best else None
    with handle_run_errors(trainer, built, folder):
        if built.validates:
            with _without_points(trainer):
                scores |= merged(trainer.validate(recipe, data, ckpt_path=ckpt, weights_only=True, verbose=False))
            tables |= tables_of(trainer)
            figures |= figures_of(trainer)
        if tests:
            scores |= merged(trainer.test(recipe, data, ckpt_path=ckpt, weights_only=True, verbose=False))
            tables |= tables_of(trainer)
            figures |= figures_of(trainer)
    return RunResult(
        model=recipe,
        scores=scores or last_logged,  # A recipe without validation and test has no other scores.
        folder=folder,
        checkpoint=best,
        data=data,
        epochs=epochs,
        stopped_early=stopped_early,
        weights_sha256=weights_sha256,
        tables=tables,
        figures=figures,
    )


def verify(built: BuiltRun, interval: Interval) -> None:
    """Train an interval of a run again, and compare the weights; the run's folder is not changed.

    Raises:
        RunFailedError: the weights differ.
    """
    recipe = built.recipe
    check_beginning(interval, built.launch.world_size, built.spec.run.global_batch_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        monitor = recipe.monitor if built.validates else None
        # The callbacks of the run, so that checkpoints are saved at the same times.
        saves = checkpoint_callbacks(folder, monitor, recipe, built.spec.run)
        checkpoint_io = RecordedCheckpointIO(folder, recipe.title, None, built.spec.config)
        callbacks = built.callbacks(saves, [IntervalEnd(interval.step, folder / "end.ckpt")])
        trainer = build_trainer(built, callbacks, checkpoint_io=checkpoint_io)
        trainer.loggers = [DummyLogger()]  # Callbacks such as LearningRateMonitor need a logger.
        checkpoint_io.begin(trainer)
        with suppress(IntervalEnd.Reached):
            trainer.fit(recipe, built.data, ckpt_path=built.spec.point.checkpoint, weights_only=True)
        if trainer.is_global_zero:
            repeated = read_saves(folder).get(interval.step)
            on_gpu = trainer.strategy.root_device.type == "cuda"
            repeats_bits = built.spec.run.deterministic or not on_gpu
            print_pairs(compare(interval, repeated, repeats_bits=bool(repeats_bits)))


def evaluate(built: BuiltRun, step: str) -> None:
    """Validate, test or predict with a checkpoint.

    Args:
        step: the name of the recipe's method for the command, such as validation_step.
    """
    recipe = built.recipe
    data = built.data
    ckpt = built.spec.run.ckpt
    predicts = built.spec.command == "predict"
    trainer = build_trainer(built, built.callbacks())
    # Lightning converts the module only after loading the checkpoint; float32 parameters would round float64 values.
    trainer.precision_plugin.convert_module(recipe)
    if ckpt is None:
        # Exact, because nothing is trained: a new head would predict at random.
        load_initial_weights(recipe, exact=True)
    rows: Sequence[dict[str, Any]]
    with handle_run_errors(trainer, built, restores=ckpt):
        if predicts:
            outputs = trainer.predict(recipe, data, ckpt_path=ckpt, weights_only=True)
            rows = all_rows(recipe, outputs or [], data_contract(data))
        else:
            evaluate_loaders = trainer.validate if built.spec.command == "validate" else trainer.test
            scores_of_loaders = evaluate_loaders(recipe, data, ckpt_path=ckpt, weights_only=True, verbose=False)
            rows = [merged(scores_of_loaders)] if scores_of_loaders else []
    if not rows:
        raise _nothing_to_evaluate(built)
    if not any(rows):
        raise UserError(f"{step} of {type(recipe).__name__} logs no score; call self.log(NAME, VALUE) in it")
    if not trainer.is_global_zero:
        return
    tables = tables_of(trainer)
    problem = _write(built, rows, tables)
    if predicts:
        print_rows(prediction_table(rows))
        if built.spec.run.output and not problem:
            inform(f"predictions: {len(rows):,} rows in {built.spec.run.output}")
    else:
        print_scores(rows[0], tables, {} if problem else _files_of(built, tables))
    if problem:
        raise RunFailedError(f"{built.spec.run.output} could not be written: {problem}")
    unreadable = list(data_contract(data).unreadable_inputs.values())
    # After the other inputs have been predicted and written, so that one bad file does not prevent their predictions.
    if predicts and unreadable:
        total = len(data_contract(data).prediction_names)
        raise RunFailedError(f"{len(unreadable):,} of {total:,} inputs could not be read: {unreadable[0]}")


def _nothing_to_evaluate(built: BuiltRun) -> UserError:
    """Return the error of a command whose part of the data does not exist, with a command that works."""
    command = built.spec.command
    problem = f"there is nothing to {command}: the data have no such part, or it is empty"
    if command != "test" or not built.validates:
        return UserError(problem)
    validate = built.typed.alone("validate").using(ckpt=built.spec.run.ckpt)
    return UserError(f"{problem}; this scores the validation part:", commands=[validate])


def _files_of(built: BuiltRun, tables: Mapping[str, ResultTable]) -> dict[str, Path]:
    """Return the paths of the tables, beside ``--output``; without ``--output``, an empty dict."""
    if not built.spec.run.output:
        return {}
    output = Path(built.spec.run.output)
    return {name: output.with_name(f"{output.stem}_{name}") for name in tables}


def _write(built: BuiltRun, rows: Sequence[dict[str, Any]], tables: Mapping[str, ResultTable]) -> str:
    """Write ``--output`` and the tables beside it; return the reason of a failure, or ""."""
    if not built.spec.run.output:
        return ""
    output = Path(built.spec.run.output)
    text_columns = built.recipe.prediction_columns[1:2]
    content: Any = rows if built.spec.command == "predict" else rows[0]
    if output.suffix == ".txt":
        content = [{name: row[name] or "" for name in text_columns} for row in rows]
    try:
        write_rows(output, content, text_columns if output.suffix == ".txt" else None)
        for name, path in _files_of(built, tables).items():
            write_rows(path, tables[name].rows, tables[name].columns)
    except OSError as error:
        return error.strerror or str(error)
    return ""
