"""The learning rate of ``--lr find``: found before the run by a Trainer of its own, then a setting like any other."""

import logging
from collections.abc import Iterator
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
from recipes.cli.experiment import FIND, Experiment
from recipes.cli.settings import RunSettings, run_callbacks
from recipes.cli.trainer import build_trainer
from recipes.launch.rank_zero import is_rank_zero, rank_zero_print
from recipes.lr_finder import RateSweep, draw_rate_test, sweep_rates
from recipes.results.results_file import FIGURES

__all__ = ["with_found_rate"]

# What neither changes an update nor is wanted twice.
_LEFT_OUT = {
    *("warmup", "ema", "swa", "lawa", "average_from", "average_every", "early_stopping", "patience", "callbacks"),
    "histogram_every",
}
_TRAINER: dict[str, Any] = {
    **dict.fromkeys(("fast_dev_run", "barebones", "enable_checkpointing", "enable_progress_bar"), False),
    **dict.fromkeys(("max_time", "min_epochs", "min_steps", "profiler"), None),
    **{"max_epochs": -1, "limit_val_batches": 0, "num_sanity_val_steps": 0, "log_every_n_steps": 1},
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
    run = replace(settings.run, **{name: getattr(RunSettings, name) for name in _LEFT_OUT}, training_monitor=False)
    options = {**settings.trainer, **_TRAINER, "max_steps": sweep.updates}

    def callbacks() -> list[Callback]:
        seeds = SeedControl(experiment.seed, run.deterministic, run.benchmark)
        return [each for each in run_callbacks(run, recipe, seeds) if not isinstance(each, FiniteWeights)]

    searching = Experiment(
        replace(settings, run=run, trainer=options), recipe, experiment.data, callbacks, experiment.seed
    )

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
    config = MappingProxyType({**settings.config, "lr": found.lr})
    recipe.run_config = dict(config)
    return replace(experiment, settings=replace(settings, recipe={**settings.recipe, "lr": found.lr}, config=config))
