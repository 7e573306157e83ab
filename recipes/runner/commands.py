"""The commands: fit, validate, test, predict and export."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from callbacks.checkpointing.verified_io import CheckpointGuard, VerifiedCheckpointIO
from callbacks.lib.hooks import callbacks_of
from callbacks.lib.lightning_internals import raised_by_restoring
from callbacks.lib.signals import SIGNALS, Preempted
from callbacks.lib.slurm_job import is_batch_job, requeue_on
from callbacks.lib.writing import best_effort, forget_failures
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError, first_line, is_out_of_memory
from recipes.base import Recipe
from recipes.export import export
from recipes.prediction import all_rows, prediction_table
from recipes.runner.early_stopping import why_stopped
from recipes.runner.experiment import Experiment, as_user_errors
from recipes.runner.failures import exit_now
from recipes.runner.folder import run_folder, write_config
from recipes.runner.join import share_folder
from recipes.runner.loggers import log_settings
from recipes.runner.pictures import RunPictures
from recipes.runner.printing import is_rank_zero, rank_zero_print
from recipes.runner.report import (
    Outcome,
    print_pairs,
    print_rows,
    print_scores,
    report,
    report_interrupted,
    report_unsaved,
    shown,
)
from recipes.runner.results import RESULTS, Stopwatch, write_rows
from recipes.runner.resume import start_from
from recipes.runner.saved_run import read_run
from recipes.runner.settings import checkpoint_callbacks
from recipes.runner.stock_loaders import evaluate_each_sample_once
from recipes.runner.trainer import build_trainer, renew_callbacks
from recipes.runner.verify import verify
from recipes.runner.weights_record import Interval, WeightsRecorder
from recipes.weights import load_initial_weights

_NEEDS = {
    "fit": ("training_step", "train_dataloader"),
    "validate": ("validation_step", "val_dataloader"),
    "test": ("test_step", "test_dataloader"),
    "predict": ("predict_step", "predict_dataloader"),
}
"""The methods of recipe and data module that a command calls."""


@dataclass(frozen=True)
class Trained:
    """What fit has trained.

    Args:
        folder: of the run; None for one without.
        recipe: with the weights of `outcome`; None where the run had finished before.
        data: that it was trained on.
    """

    folder: Path | None
    recipe: Recipe | None = None
    data: pl.LightningDataModule | None = None
    outcome: Outcome | None = None


@contextmanager
def _without_points(trainer: pl.Trainer) -> Iterator[None]:
    """Log no scores: the curves of an evaluation in training would get another point."""
    methods = [(logger, logger.log_metrics) for logger in trainer.loggers]
    for logger, _ in methods:
        logger.log_metrics = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        for logger, method in methods:
            logger.log_metrics = method  # type: ignore[method-assign]


def carry_out(experiment: Experiment, started_at: float, interval: Interval | None = None) -> Trained | None:
    """Run a command; returns what fit has trained.

    Args:
        started_at: `time.monotonic` at the start of the program.
        interval: the part of a run that verify trains again.
    """
    command, launch = experiment.command, experiment.launch
    if command == "export":
        _export(experiment)
        return None
    _check_parts(experiment)
    if experiment.trainer["use_distributed_sampler"]:
        evaluate_each_sample_once(experiment.data, launch.rank, launch.world_size)
    with as_user_errors(MisconfigurationException):
        if command != "fit":
            _evaluate(experiment)
        elif interval is None:
            return _fit(experiment, started_at)
        else:
            with _restoring(experiment.point.checkpoint):
                verify(experiment, interval)
    return None


def _check_parts(experiment: Experiment) -> None:
    """Refuse a command for which recipe or data module have no method."""
    command = experiment.command
    step, loader = _NEEDS[command]
    for part, name in ((experiment.recipe, step), (experiment.data, loader)):
        if not is_overridden(name, part):
            raise UserError(f"{command} needs a method {name}, and {type(part).__name__} has none")
    validates = experiment.validates and experiment.trainer["limit_val_batches"] != 0
    if command == "fit" and experiment.run.patience is not None and not validates:
        raise UserError("`patience` counts validations, and this run has none; leave it out")


def _export(experiment: Experiment) -> None:
    run = experiment.run
    written = export(experiment.recipe, run.ckpt or "", run.format or "", run.output)
    inputs = {f"input {name}": text for name, text in written.inputs.items()}
    print_pairs({"written": shown(written.path), **inputs, "checked": written.check})


def _checkpoint_io(callbacks: Sequence[Callback]) -> VerifiedCheckpointIO:
    """What writes checkpoints, and tells the callback that records their weights."""
    recorders = [callback for callback in callbacks if isinstance(callback, WeightsRecorder)]
    return VerifiedCheckpointIO(recorders[0].saved if recorders else None)


def _run_callbacks(experiment: Experiment, folder: Path, stopwatch: Stopwatch) -> list[Callback]:
    """The callbacks of a run with a folder."""
    recipe, resume = experiment.recipe, experiment.point.checkpoint

    def begin(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # A folder holds results.json exactly where its run has finished.
        if trainer.is_global_zero and (folder / RESULTS).is_file():
            with best_effort("the results of the shorter training"):
                (folder / RESULTS).replace(folder / "results-before.json")

    pictures = RunPictures(folder, partial(report_interrupted, experiment, folder, stopwatch))
    callbacks: list[Callback] = [LambdaCallback(on_train_start=begin), pictures]
    if experiment.trainer["enable_checkpointing"] is not False:
        monitor = recipe.monitor if experiment.validates else None
        callbacks += checkpoint_callbacks(folder, monitor, recipe, experiment.run)
        callbacks.append(CheckpointGuard(resume))
        resumed = read_run(resume) if resume else None
        callbacks.append(WeightsRecorder(folder, recipe.title, resumed, experiment.config))
    return callbacks


def _fit(experiment: Experiment, started_at: float) -> Trained:
    """Train in the run's folder, which a trial of a few batches has not, then test the best checkpoint."""
    forget_failures()
    stopwatch = Stopwatch(started_at)

    def train(folder: Path | None) -> Trained:
        more = _run_callbacks(experiment, folder, stopwatch) if folder else []
        more.append(stopwatch)
        trainer = build_trainer(experiment, more, folder, _checkpoint_io(more))
        if folder and is_rank_zero():
            write_config(folder, experiment.config)
            log_settings(trainer.loggers, experiment.config)
        if folder:
            _record_start(experiment, folder)
        outcome = _train_and_test(trainer, experiment, folder, stopwatch)
        if trainer.is_global_zero:
            report(trainer, experiment, folder, stopwatch, outcome)
            report_unsaved(folder)
        return Trained(folder, experiment.recipe, experiment.data, outcome)

    if experiment.trainer["fast_dev_run"]:
        return train(None)
    parent = Path(experiment.run.run_dir) / experiment.recipe.title
    with run_folder(parent, experiment.run.name, experiment.point) as folder:
        return train(folder)


def _record_start(experiment: Experiment, folder: Path) -> None:
    """Record where this job starts, and rename the later checkpoints of the run, where --resume names a checkpoint."""
    checkpoint = experiment.point.checkpoint
    if is_rank_zero():
        share_folder(folder)
    if checkpoint and experiment.point.given:
        for path in start_from(checkpoint, folder, experiment.run.name):
            rank_zero_print(f"{shown(path)} has more updates than the checkpoint to resume from, and is renamed")


def _best_checkpoint(trainer: pl.Trainer, folder: Path | None) -> str | None:
    """The best checkpoint that is there, else the last; None where none was saved."""
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    last = folder / "checkpoints" / "last.ckpt" if folder else None
    return next((str(path) for path in (best, last) if path and Path(path).is_file()), None)


def _merged(of_loaders: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The scores of all loaders of an evaluation; Lightning puts the number of the loader behind their names."""
    return {name: value for scores in of_loaders for name, value in scores.items()}


def _train_and_test(trainer: pl.Trainer, experiment: Experiment, folder: Path | None, stopwatch: Stopwatch) -> Outcome:
    """Train, then score the best checkpoint as validate and test do."""
    recipe, data, resume = experiment.recipe, experiment.data, experiment.point.checkpoint
    if folder and 0 in (trainer.max_epochs, trainer.max_steps):
        rank_zero_print("nothing is trained in 0 epochs or steps: the initial weights are saved and scored")
    with _interruptible(trainer, experiment, folder), _restoring(resume), _within_memory(trainer, experiment):
        trainer.fit(recipe, data, ckpt_path=resume, weights_only=True)
    stopped, epochs = why_stopped(callbacks_of(trainer)), trainer.current_epoch
    best = _best_checkpoint(trainer, folder)
    scores: dict[str, float] = {}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.split("/")[0] != "lr"}
    # Of a score that is logged for steps and epochs, the epoch's.
    parts = {f"{name}{suffix}" for name in logged for suffix in ("_step", "_epoch")}
    last = {name: logged.get(f"{name}_epoch", value) for name, value in logged.items() if name not in parts}
    renew_callbacks(trainer, experiment, stopwatch)
    tests = is_overridden("test_step", recipe) and is_overridden("test_dataloader", data)
    if folder and (experiment.validates or tests):
        rank_zero_print(f"scoring {shown(best) if best else 'the weights'} ...")
    with _interruptible(trainer, experiment, folder), _within_memory(trainer, experiment):
        if experiment.validates:
            with _without_points(trainer):
                scores |= _merged(trainer.validate(recipe, data, ckpt_path=best, weights_only=True, verbose=False))
        if tests:
            scores |= _merged(trainer.test(recipe, data, ckpt_path=best, weights_only=True, verbose=False))
    # A recipe that only trains has no others.
    return Outcome(scores or last, best, stopped, epochs)


def _evaluate(experiment: Experiment) -> None:
    """Validate, test or predict with a checkpoint."""
    recipe, data, command, run = experiment.recipe, experiment.data, experiment.command, experiment.run
    trainer = build_trainer(experiment)
    # Lightning converts the module after it has loaded a checkpoint, whose float64 float32 would have rounded.
    trainer.precision_plugin.convert_module(recipe)
    if run.ckpt is None:
        load_initial_weights(recipe, exact=True)
    rows: Sequence[dict[str, Any]]
    with _interruptible(trainer, experiment, None), _restoring(run.ckpt), _within_memory(trainer, experiment):
        if command == "predict":
            outputs = trainer.predict(recipe, data, ckpt_path=run.ckpt, weights_only=True)
            rows = all_rows(recipe, outputs or [], data_contract(data))
        else:
            evaluate = trainer.validate if command == "validate" else trainer.test
            found = evaluate(recipe, data, ckpt_path=run.ckpt, weights_only=True, verbose=False)
            rows = [_merged(found)] if found else []
    if not rows:
        raise UserError(f"there is nothing to {command}: the data have no such part, or it is empty")
    if not any(rows):
        step = _NEEDS[command][0]
        raise UserError(f"{step} of {type(recipe).__name__} logs no score; call self.log(NAME, VALUE) in it")
    if not trainer.is_global_zero:
        return
    problem, tables, files = None, recipe.tables, {}
    if run.output:
        output, text = Path(run.output), recipe.prediction_columns[1:2]
        content: Any = rows if command == "predict" else rows[0]
        if output.suffix == ".txt":
            content = [{name: row[name] or "" for name in text} for row in rows]
        files = {name: output.with_name(f"{output.stem}_{name}") for name in tables}
        try:
            write_rows(output, content, text if output.suffix == ".txt" else None)
            for name, path in files.items():
                write_rows(path, tables[name].rows, tables[name].columns)
        except OSError as error:
            problem = error.strerror or str(error)
    if command == "predict":
        print_rows(prediction_table(rows))
    else:
        print_scores(recipe, rows[0], {} if problem else {name: shown(path) for name, path in files.items()})
    if problem:
        raise RunFailedError(f"{run.output} could not be written: {problem}")
    if command == "predict" and (unreadable := list(data_contract(data).unreadable_inputs.values())):
        total = len(data_contract(data).prediction_names)
        raise RunFailedError(f"{len(unreadable):,} of {total:,} inputs could not be read: {unreadable[0]}")


@contextmanager
def _restoring(checkpoint: str | None) -> Iterator[None]:
    """Turn an error that the values in a checkpoint cause while it is restored into one line.

    Raises:
        UserError: with the checkpoint and what the error says.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not raised_by_restoring(error) or "Error(s) in loading state_dict" in str(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{checkpoint} cannot be restored: it holds other values than were expected ({first_line(error)[:220]}, in"
            f" {frame.name} of {frame.filename}); pass another checkpoint"
        ) from error


@contextmanager
def _within_memory(trainer: pl.Trainer, experiment: Experiment) -> Iterator[None]:
    """Turn an error that says that memory is out into one line, which says what to pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_out_of_memory(error):
            raise
        config, rank = experiment.config, f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        names = [name for name in (experiment.tokens_parameter or "batch_size", "eval_batch_size") if name in config]
        sizes = ", ".join(f"{name}={config[name]}" for name in names)
        raise RunFailedError(
            f"out of memory{rank} with {sizes}: pass a smaller one; a larger `accumulate`, or `global_batch_size`,"
            f" keeps the samples of an update ({first_line(error)[:160]})"
        ) from error


@contextmanager
def _interruptible(trainer: pl.Trainer, experiment: Experiment, folder: Path | None) -> Iterator[None]:
    """Where a signal has ended the run, print how to resume, and end the process; a program goes on."""
    try:
        yield
    except Preempted as stopped:
        if experiment.typed.in_program:
            saved = f'; resume="{shown(folder / "checkpoints" / "last.ckpt")}" resumes it' if folder else ""
            rank_zero_print(f"\nended by {stopped.signal_name}{saved}")
            raise
        with suppress(ValueError):  # Handlers need the main thread.
            for signum in SIGNALS:  # Slurm sends SIGTERM to a job that has been requeued.
                signal.signal(signum, signal.SIG_IGN)
        typed, why = experiment.typed, f"\nended by {stopped.signal_name}"
        if stopped.at_once and is_rank_zero() and (note := requeue_on(stopped.signum)):
            why += f"; {note}"
        last = folder / "checkpoints" / "last.ckpt" if folder else None
        if last and not last.exists():
            last = last.with_name("best.ckpt")
        if last is None:
            rank_zero_print(why)
        elif not last.exists():
            rank_zero_print(f"{why} before the first update, so nothing was saved")
        elif stopped.trained or trainer.state.fn != "fit":
            best = last.with_name("best.ckpt")
            test = typed.alone("test").using(ckpt=shown(best if best.exists() else last))
            rank_zero_print(f"{why}; the training is done, so test with\n  {test}")
        else:
            how = f"in a new job with --name {last.parents[1].name}, or with" if is_batch_job(os.environ) else "with"
            # On other devices than before it would resume within rounding.
            devices = typed.devices if typed.launcher == "local" and typed.devices > 1 else None
            line = typed.alone().using(resume=shown(last), devices=devices)
            rank_zero_print(f"{why}; resume {how}\n  {line}")
        sys.stderr.flush()
        # Loggers and processes are closed; a regular exit of the interpreter would take another second.
        exit_now(int(stopped.code or 1))
