"""``--batch-size auto`` and ``--lr find``: found before a run by Trainers of their own, then settings as any other."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from callbacks.finite_weights import FiniteWeights
from callbacks.lib.best_effort import best_effort
from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from recipes.batch_size_finder import BatchSizeSearch, BatchSizeTest, search_batch_size, set_batch_size
from recipes.cli.experiment import AUTO, FIND, Experiment
from recipes.cli.settings import RunSettings, run_callbacks
from recipes.cli.trainer import build_trainer
from recipes.launch.rank_zero import is_rank_zero, rank_zero_print
from recipes.lr_finder import RateSweep, draw_rate_test, sweep_rates
from recipes.results.results_file import FIGURES

__all__ = ["with_found_batch_size", "with_found_rate"]

# What neither changes an update nor is wanted twice.
_AVERAGES = ("ema", "swa", "lawa", "average_from", "average_every")
_LEFT_OUT = ("warmup", "early_stopping", "patience", "callbacks", "histogram_every")
_TRAINER: dict[str, Any] = {
    **dict.fromkeys(("fast_dev_run", "barebones", "enable_checkpointing", "enable_progress_bar"), False),
    **dict.fromkeys(("max_time", "min_epochs", "min_steps", "profiler"), None),
    **{"limit_val_batches": 0, "num_sanity_val_steps": 0},
}


@contextmanager
def _without_messages() -> Iterator[None]:
    """The run prints the same ones."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _searching(experiment: Experiment, left_out: Sequence[str], **trainer: Any) -> Experiment:
    """The experiment of a search: with the callbacks that change an update or take memory, and nothing that is saved.

    Args:
        left_out: settings of the run that it does without.
        trainer: arguments of its Trainer.
    """
    settings, recipe = experiment.settings, experiment.recipe
    without = {name: getattr(RunSettings, name) for name in (*_LEFT_OUT, *left_out)}
    run = replace(settings.run, **without, training_monitor=False)

    def callbacks() -> list[Callback]:
        seeds = SeedControl(experiment.seed, run.deterministic)
        return [each for each in run_callbacks(run, recipe, seeds) if not isinstance(each, FiniteWeights)]

    options = {**settings.trainer, **_TRAINER, **trainer}
    return replace(experiment, settings=replace(settings, run=run, trainer=options), callbacks=callbacks)


def _with_setting(experiment: Experiment, name: str, value: Any) -> Experiment:
    """The experiment with what a search has found."""
    settings, recipe = experiment.settings, experiment.recipe
    data, options = ({**o, name: value} if name in o else o for o in (settings.data, settings.recipe))
    config = MappingProxyType({**settings.config, name: value})
    recipe.run_config = dict(config)
    return replace(experiment, settings=replace(settings, data=data, recipe=options, config=config))


def _batch_size_line(found: BatchSizeTest, run: RunSettings, world_size: int) -> str:
    """The choice, what it makes of an update, and how to do without the search."""
    size = found.batch_size
    repeat = f"to repeat the run without the search pass --batch-size {size}"
    if run.global_batch_size is not None:
        return f"{found.line()}; {repeat}"
    batches = world_size * (run.accumulate if isinstance(run.accumulate, int) else 1)
    update = f"an update has {batches * size} samples (--global-batch-size N --batch-size auto would keep it at N)"
    return f"{found.line()}; {update}; {repeat}"


def with_found_batch_size(experiment: Experiment) -> Experiment:
    """The experiment with the number that ``--batch-size auto`` stands for; as it is where a number was given.

    Raises:
        UserError: no batch fits, or the data module does not allow a search.
    """
    settings, recipe, data = experiment.settings, experiment.recipe, experiment.data
    if settings.data.get("batch_size") != AUTO:
        return experiment
    if (tokens := settings.tokens_parameter) and settings.data.get(tokens):
        raise UserError(
            f"batch_size='auto' counts samples, and {tokens}={settings.data[tokens]} counts tokens: pass one"
        )
    # Synchronised layers would wait for ranks that have run out of memory.
    searching = _searching(experiment, ("sync_bn",), limit_train_batches=None, overfit_batches=0.0)
    searching = _with_setting(searching, "batch_size", 1)

    def trainer(search: BatchSizeSearch) -> pl.Trainer:
        return build_trainer(searching, [search], announces=False)

    rank_zero_print("searching the batch size in up to 9 training steps ...")
    with _without_messages():
        found = search_batch_size(recipe, data, BatchSizeSearch(settings.run.global_batch_size), trainer)
    rank_zero_print(_batch_size_line(found, settings.run, settings.launch.world_size))
    chosen = _with_setting(experiment, "batch_size", found.batch_size)
    set_batch_size(data, found.batch_size)
    return chosen


def with_found_rate(experiment: Experiment, folder: Path | None) -> Experiment:
    """The experiment with the number that ``--lr find`` stands for; the same experiment where a number was given.

    The updates are those of the run: its weights to begin with, order, global batch, devices and precision, without
    warm-up and schedule.

    Args:
        folder: of the run, for the image.

    Raises:
        UserError: no rate was found.
    """
    settings, recipe = experiment.settings, experiment.recipe
    if settings.config.get("lr") != FIND:
        return experiment
    sweep = RateSweep(recipe.hparams.lr)
    searching = _searching(experiment, _AVERAGES, max_epochs=-1, max_steps=sweep.updates, log_every_n_steps=1)

    def trainer(sweep: RateSweep) -> pl.Trainer:
        return build_trainer(searching, [sweep], announces=False)

    rank_zero_print(f"searching the learning rate in up to {sweep.updates} updates ...")
    with _without_messages():
        found = sweep_rates(recipe, experiment.data, sweep, trainer)
    image = folder / FIGURES / "lr_find.png" if folder else None
    if image and is_rank_zero():
        with best_effort(FIGURES):
            draw_rate_test(found, image)
    rank_zero_print(f"{found.line()}; to repeat the run without the search pass --lr {found.lr:g}")
    recipe.hparams["lr"] = found.lr
    return _with_setting(experiment, "lr", found.lr)
