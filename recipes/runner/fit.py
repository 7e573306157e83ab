"""Training from Python: `fit` does what a recipe's command line does, and returns what was trained."""

import html
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from signal import SIGINT
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from callbacks.lib.signals import SIGNALS, Preempted, ending_on_signals
from datamodules.contract import data_contract
from datamodules.errors import UserError
from recipes.base import Recipe
from recipes.runner.commands import Trained
from recipes.runner.console import warnings_only
from recipes.runner.curves import run_curves
from recipes.runner.experiment import Classes
from recipes.runner.failures import failures_reported
from recipes.runner.flags import nearest
from recipes.runner.notebook import framed, in_notebook, plots, table
from recipes.runner.results import read_results
from recipes.runner.run import CommandLine

RECIPES = ("mnist", "resnet", "seq2seq")
_NOT_OF_FIT = frozenset({"ckpt", "output", "format"})
_LAUNCHED = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, repr=False)
class Fitted:
    """What `fit` has trained.

    Args:
        model: the recipe with the weights of the best checkpoint, in evaluation mode on the CPU.
        scores: of that checkpoint, such as "val/accuracy" and "test/loss".
        folder: of the run, with its checkpoints, curves and ``results.json``; None where nothing was saved.
        checkpoint: that the weights are of; None where none was saved.
        data: that it was trained on; None where the run had finished before.
    """

    model: Recipe
    scores: dict[str, float]
    folder: Path | None
    checkpoint: Path | None
    data: pl.LightningDataModule | None

    @override
    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {text.partition(' (')[0]}" for name, text in self._headline.items())
        return f"<Fitted {self.model.title}: {scores or 'no score'}; {self.folder or 'not saved'}>"

    @property
    def _headline(self) -> dict[str, str]:
        return self.model.headline(self.scores)

    def _repr_html_(self) -> str:
        """The scores and the curves, for notebooks."""
        figures = run_curves(self.folder, self.model.monitor) if self.folder else {}
        place = f"<p>The whole run: {html.escape(str(self.folder / 'report.html'))}</p>" if self.folder else ""
        return framed(table([self._headline]), plots(figures), place)


def find_recipe(recipe: str | type[Recipe]) -> type[Recipe]:
    """The class of a recipe by its name."""
    if not isinstance(recipe, str):
        return recipe
    if recipe not in RECIPES:
        raise UserError(f"there is no recipe {recipe!r}; expected {', '.join(RECIPES)}, or a class of yours")
    module = import_module(f"recipes.{recipe}.recipe")
    return next(kind for kind in vars(module).values() if isinstance(kind, type) and vars(kind).get("title") == recipe)


def _without_parameters(self: object) -> None:
    """A constructor."""


def _data_class(recipe: type[Recipe], data: Any) -> tuple[type[pl.LightningDataModule], dict[str, Any], Any]:
    """The class of the data module, its arguments as far as `data` gives them, and samples that it takes."""
    if isinstance(data, type):
        return data, {}, None
    if isinstance(data, pl.LightningDataModule):
        kind = type(data)

        def given(cls: type) -> pl.LightningDataModule:
            return data

        # Its settings are its own: the class that stands for it has none.
        members = {"__new__": given, "__init__": _without_parameters, "__doc__": kind.__doc__}
        return type(kind.__name__, (kind,), members), {}, None
    if recipe.data_class is None:
        raise UserError(f"{recipe.__name__} names no data module as its data_class; pass data=, a LightningDataModule")
    if data is None:
        return recipe.data_class, {}, None
    if isinstance(data, str | os.PathLike):
        return recipe.data_class, {data_contract(recipe.data_class).place_parameter: os.fspath(data)}, None
    return recipe.data_class, {}, data


def _as_text(name: str, value: Any) -> str:
    """A value as it is typed after a flag."""
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple | set | frozenset | range):
        value = list(value)
    try:
        return json.dumps(value, allow_nan=True)
    except TypeError:
        kind = type(value).__name__
        raise UserError(
            f"{name} is a {kind}, and settings are numbers, text, lists and dicts, which are saved with the run"
        ) from None


@contextmanager
def _one_run_of_a_program() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt again, and a further run finds the environment and threads of this one."""
    variables, threads = dict(os.environ), torch.get_num_threads()
    try:
        with ending_on_signals(*SIGNALS):
            yield
    except Preempted as stopped:
        if stopped.signum == SIGINT:
            raise KeyboardInterrupt from None
        raise
    except SystemExit as stopped:
        if isinstance(stopped.__context__, KeyboardInterrupt):  # Of which Lightning makes one.
            raise KeyboardInterrupt from None
        raise
    finally:
        torch.set_num_threads(threads)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)


def _fitted(trained: Trained, recipe_class: type[Recipe]) -> Fitted:
    if trained.recipe is not None and trained.outcome is not None:
        best = trained.outcome.best
        model, scores = trained.recipe, dict(trained.outcome.scores)
    else:
        assert trained.folder is not None
        results = read_results(trained.folder)
        saved = results["best"]["checkpoint"] if results["best"] else "last.ckpt"
        best = str(trained.folder / "checkpoints" / Path(saved).name)  # The folder may have moved.
        scores = results["scores"]
        model = recipe_class.load_from_checkpoint(best, map_location="cpu", weights_only=True)
    return Fitted(model.cpu().eval(), scores, trained.folder, Path(best) if best else None, trained.data)


def fit(
    recipe: str | type[Recipe],
    data: Any = None,
    *,
    callbacks: Callback | Sequence[Callback] | Callable[[], Sequence[Callback]] = (),
    verbose: bool = True,
    **settings: Any,
) -> Fitted:
    """Train a recipe with the settings and guarantees of its command line, and return the best model.

    The run has a folder with checkpoints, curves and results, can be interrupted and resumed, and ends with the weights
    that the command line gives. Ctrl-C saves and raises KeyboardInterrupt. One device trains; a program that torchrun
    or Slurm starts trains on all of theirs.

    Args:
        recipe: mnist, resnet, seq2seq, or a class of yours.
        data: a path; images and labels in memory, as `MNISTDataModule.take_samples` takes them, or a dict of such
            pairs for "train", "val" and "test"; a LightningDataModule or its class; None takes what the settings say.
        callbacks: for the Trainer; a function that makes them, where they must not see both training and test.
        verbose: print what the command line prints; otherwise warnings only.
        settings: the parameters of the recipe, its data module, the Trainer, and the run, by the names of the flags:
            ``help(MNISTClassifier)``, ``help(MNISTDataModule)`` and ``python -m recipes.mnist --help-all`` say what
            each does.

    Raises:
        UserError: a setting, the data or a checkpoint cannot be used.
        RunFailedError: the run failed after it had started.
        KeyboardInterrupt: Ctrl-C, after the state was saved.

    Example:
        >>> from datamodules import bundled_digits
        >>> options = {"max_epochs": 1, "verbose": False, "run_dir": getfixture("tmp_path")}
        >>> result = fit("mnist", data=bundled_digits(), **options)
        >>> result.model.training, result.checkpoint.name, sorted(result.scores)[:2]
        (False, 'best.ckpt', ['test/accuracy', 'test/accuracy_class_0'])
    """
    recipe_class = find_recipe(recipe)
    data_class, given, samples = _data_class(recipe_class, data)
    if refused := _NOT_OF_FIT & settings.keys():
        raise UserError(f"fit() has no {', '.join(sorted(refused))}: they belong to the other commands of a recipe")
    if "devices" not in settings and not any(name in os.environ for name in _LAUNCHED):
        given["devices"] = 1
    several = [callbacks] if isinstance(callbacks, Callback) else callbacks
    make = several if callable(several) else lambda: several
    classes = Classes(recipe_class, data_class, make, samples, in_program=True)
    args = [f"--{name}={_as_text(name, value)}" for name, value in (given | settings).items()]
    program = f"python -m recipes.{recipe}" if isinstance(recipe, str) else "python PROGRAM.py"
    with nullcontext() if verbose else warnings_only():
        line = CommandLine(classes, args, time.monotonic(), program)
        if unknown := settings.keys() - line.parser.types().keys():
            name = min(unknown)
            raise UserError(f"fit() has no parameter {name}{nearest(name, line.parser.types())}")
        # A notebook shows the two streams in two places.
        stream = redirect_stderr(sys.stdout) if in_notebook() else nullcontext()
        with stream, _one_run_of_a_program(), failures_reported(line.after_loss):
            trained = line.main()
    assert trained is not None
    return _fitted(trained, recipe_class)
