"""Carry out the commands fit, which trains and scores the best checkpoint, and verify, which trains a part again."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.lib.hooks import callbacks_of, set_callbacks
from callbacks.lib.writing import forget_failures
from datamodules.lightning import Callback, DummyLogger, is_overridden, pl
from recipes.figures.images import Picture
from recipes.runner.callbacks_of_run import checkpoint_callbacks
from recipes.runner.early_stopping import why_stopped
from recipes.runner.experiment import Experiment
from recipes.runner.folder import locked, write_config
from recipes.runner.guards import guarded
from recipes.runner.loggers import log_settings
from recipes.runner.printing import is_rank_zero, rank_zero_print, relative_path
from recipes.runner.report import print_pairs, report, report_interrupted, report_unsaved
from recipes.runner.results import Stopwatch
from recipes.runner.resume import start_from
from recipes.runner.run_files import RunFiles, figures_of, tables_of
from recipes.runner.run_result import RunResult
from recipes.runner.trainer import build_trainer
from recipes.runner.verify import (
    Interval,
    IntervalEnd,
    WeightsRecorder,
    check_beginning,
    compare,
    read_saves,
    weights_hash,
)
from recipes.tables import ResultTable


def train(experiment: Experiment, started_at: float) -> RunResult:
    """Train in the run's folder, then test the best checkpoint; a trial of a few batches has no folder.

    Args:
        started_at: `time.monotonic` at the start of the program.
    """
    forget_failures()
    if experiment.trainer.fast_dev_run:
        return _train_in(None, experiment, Stopwatch(started_at))
    assert experiment.point.folder is not None, "the record of a run names its folder"
    folder = Path(experiment.point.folder)
    with locked(folder):
        files = RunFiles(started_at, folder, partial(report_interrupted, experiment))
        return _train_in(folder, experiment, files)


def _train_in(folder: Path | None, experiment: Experiment, stopwatch: Stopwatch) -> RunResult:
    saves: list[Callback] = []
    records: list[Callback] = [stopwatch]
    on_saved = None
    if folder and experiment.trainer.enable_checkpointing is not False:
        monitor = experiment.recipe.monitor if experiment.validates else None
        saves += checkpoint_callbacks(folder, monitor, experiment.recipe, experiment.run)
        recorder = WeightsRecorder(
            folder, experiment.recipe.title, experiment.saved, experiment.config, experiment.auto_settings
        )
        records.append(recorder)
        on_saved = recorder.saved
    trainer = build_trainer(experiment, experiment.callbacks(saves, records), folder, VerifiedCheckpointIO(on_saved))
    if folder and is_rank_zero():
        write_config(folder, experiment.config)
        log_settings(trainer.loggers, experiment.config)
        for path in start_from(experiment.point, folder):
            rank_zero_print(
                f"{relative_path(path)} has more updates than the checkpoint to resume from, and is renamed"
            )
    result = _train_and_test(trainer, experiment, folder, stopwatch)
    if trainer.is_global_zero:
        report(trainer, experiment, stopwatch, result)
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
    """Return the best checkpoint that exists, else the last; None where none was saved."""
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
    """Return the values that were logged last; an epoch's value wins over that of a step."""
    metrics = trainer.callback_metrics.items()
    logged = {name: float(value) for name, value in metrics if name.split("/")[0] != "lr"}
    # Lightning logs NAME, NAME_step and NAME_epoch for a score of both.
    duplicates = {f"{name}{suffix}" for name in logged for suffix in ("_step", "_epoch")}
    return {name: logged.get(f"{name}_epoch", value) for name, value in logged.items() if name not in duplicates}


def _train_and_test(
    trainer: pl.Trainer, experiment: Experiment, folder: Path | None, stopwatch: Stopwatch
) -> RunResult:
    """Train, then score the best checkpoint as validate and test do."""
    recipe = experiment.recipe
    data = experiment.data
    resume = experiment.point.checkpoint
    if folder and 0 in (trainer.max_epochs, trainer.max_steps):
        rank_zero_print("nothing is trained in 0 epochs or steps: the initial weights are saved and scored")
    with guarded(trainer, experiment, folder, restores=resume):
        trainer.fit(recipe, data, ckpt_path=resume, weights_only=True)
    stopped_early = why_stopped(callbacks_of(trainer))
    epochs = trainer.current_epoch
    # Before the best checkpoint is loaded.
    weights_sha256 = weights_hash(recipe.state_dict()) if trainer.is_global_zero else None
    best = _best_checkpoint(trainer, folder)
    scores: dict[str, float] = {}
    last_logged = _last_logged(trainer)
    tables: dict[str, ResultTable] = {}
    # Before the callbacks are replaced, and with them their pictures.
    figures: dict[str, Picture] = figures_of(trainer)
    # New callbacks, because those of the training may replace the checkpoint's weights: Lightning's `WeightAveraging`
    # loads weights that were not averaged.
    set_callbacks(trainer, experiment.callbacks(records=[stopwatch]))
    tests = is_overridden("test_step", recipe) and is_overridden("test_dataloader", data)
    if folder and (experiment.validates or tests):
        rank_zero_print(f"scoring {relative_path(best) if best else 'the weights'} ...")
    ckpt = str(best) if best else None
    with guarded(trainer, experiment, folder):
        if experiment.validates:
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


def verify(experiment: Experiment, interval: Interval) -> None:
    """Train an interval of a run again, and compare the weights; the run's folder is not changed.

    Raises:
        RunFailedError: the weights differ.
    """
    recipe = experiment.recipe
    check_beginning(interval, experiment.launch.world_size, experiment.run.global_batch_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        monitor = recipe.monitor if experiment.validates else None
        # The callbacks of the run, so that checkpoints are saved at the same moments.
        saves = checkpoint_callbacks(folder, monitor, recipe, experiment.run)
        recorder = WeightsRecorder(folder, recipe.title, None, experiment.config)
        callbacks = experiment.callbacks(saves, [recorder, IntervalEnd(interval.step, folder / "end.ckpt")])
        trainer = build_trainer(experiment, callbacks, checkpoint_io=VerifiedCheckpointIO(recorder.saved))
        trainer.loggers = [DummyLogger()]  # Callbacks such as LearningRateMonitor need a logger.
        with suppress(IntervalEnd.Reached):
            trainer.fit(recipe, experiment.data, ckpt_path=experiment.point.checkpoint, weights_only=True)
        if trainer.is_global_zero:
            repeated = read_saves(folder).get(interval.step)
            on_gpu = trainer.strategy.root_device.type == "cuda"
            repeats_bits = experiment.run.deterministic or not on_gpu
            print_pairs(compare(interval, repeated, repeats_bits=bool(repeats_bits)))
