"""Train from Python: `fit` does what a recipe's command line does, and returns what was trained."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from signal import SIGINT
from typing import Any

from callbacks.lib.signals import SIGNALS, Preempted, ending_on_signals
from datamodules.contract import data_contract
from datamodules.errors import UserError
from datamodules.lightning import Callback, pl
from datamodules.lightning_package import check_package, lightning_package
from recipes.base import Recipe
from recipes.finding import recipe_class
from recipes.runner.classes import Classes
from recipes.runner.command import Command
from recipes.runner.console import warnings_only
from recipes.runner.failures import failures_reported
from recipes.runner.flags import Given
from recipes.runner.notebook import in_notebook
from recipes.runner.requests import Request
from recipes.runner.run import Run
from recipes.runner.run_result import RunResult

_SETTINGS_OF_OTHER_COMMANDS = frozenset({"ckpt", "output", "format"})
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID")


def _data_of(recipe: type[Recipe], data: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return what `data` means: a data module or its class, its arguments, and samples for it."""
    if isinstance(data, (pl.LightningDataModule, type)):
        return data, {}, None
    if recipe.data_class is None:
        raise UserError(f"{recipe.__name__} names no data module as its data_class; pass data=, a LightningDataModule")
    if data is None:
        return recipe.data_class, {}, None
    if isinstance(data, str | os.PathLike):
        return recipe.data_class, {data_contract(recipe.data_class).place_parameter: os.fspath(data)}, None
    return recipe.data_class, {}, data


@dataclass(frozen=True)
class _MakeCallbacks:
    """Makes the callbacks of a Trainer; other processes can receive it."""

    callbacks: Sequence[Callback] | Callable[[], Sequence[Callback]]

    def __call__(self) -> Sequence[Callback]:
        made = self.callbacks() if callable(self.callbacks) else self.callbacks
        for callback in made:
            check_package(lightning_package(), callback)
        return made


@contextmanager
def _one_run_of_a_program() -> Iterator[None]:
    """Turn the end by Ctrl-C into a KeyboardInterrupt, and restore the environment after the run."""
    variables = dict(os.environ)
    try:
        with ending_on_signals(*SIGNALS):
            yield
    except Preempted as stopped:
        if stopped.signum == SIGINT:
            raise KeyboardInterrupt from None
        raise
    except SystemExit as stopped:
        if isinstance(stopped.__context__, KeyboardInterrupt):  # Lightning turns a KeyboardInterrupt into an exit.
            raise KeyboardInterrupt from None
        raise
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)


def _call(recipe: str | type[Recipe], settings: Mapping[str, Any]) -> str:
    """Return the call of `fit`, for results.json."""
    name = repr(recipe) if isinstance(recipe, str) else recipe.__name__
    arguments = [f"{setting}={value!r}" for setting, value in settings.items()]
    return f"fit({', '.join([name, *arguments])})"


def fit(
    recipe: str | type[Recipe],
    data: Any = None,
    *,
    callbacks: Callback | Sequence[Callback] | Callable[[], Sequence[Callback]] = (),
    verbose: bool = True,
    **settings: Any,
) -> RunResult:
    """Train a recipe with the settings and guarantees of its command line, and return the best model.

    The run has a folder with checkpoints, curves and results, can be interrupted and resumed, and ends with the weights
    that the command line gives. Ctrl-C saves and raises KeyboardInterrupt.

    One device trains by default. ``devices=N`` starts N processes on this machine, which import the classes: a program
    that defines them itself calls `fit` under ``if __name__ == "__main__":``. The result is read from the run's folder.
    A program that torchrun or Slurm starts trains on all of their devices.

    Args:
        recipe: the name of a recipe, such as mnist, resnet or seq2seq, or a class of yours.
        data: a path; images and labels in memory, as `MNISTDataModule.take_samples` takes them, or a dict of such
            pairs for "train", "val" and "test"; a LightningDataModule or its class; None takes what the settings say.
        callbacks: for the Trainer; a function that makes them, where they must not see both training and test.
        verbose: print what the command line prints; otherwise warnings only.
        settings: the parameters of the recipe, its data module, and the run, by the names of the flags:
            ``python -m recipes.mnist --help-all`` says what each does. Further parameters of the Trainer go into a
            dict, as in ``trainer={"benchmark": True}``.

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
    for value in (data, callbacks):
        check_package(lightning_package(), value)
    recipe_type = recipe_class(recipe) if isinstance(recipe, str) else recipe
    data_source, arguments, samples = _data_of(recipe_type, data)
    if isinstance(recipe, Recipe):
        raise UserError(f"fit() builds the recipe: pass the class, {type(recipe).__name__}, and its settings by name")
    if isinstance(data_source, type) and not issubclass(data_source, pl.LightningDataModule):
        raise UserError(f"data={data_source.__name__}: expected a LightningDataModule or its class, a path, or samples")
    unsupported = _SETTINGS_OF_OTHER_COMMANDS & settings.keys()
    if unsupported:
        raise UserError(f"fit() takes no {', '.join(sorted(unsupported))}: other commands of a recipe do")
    if "devices" not in settings and not any(name in os.environ for name in _LAUNCHER_VARIABLES):
        arguments["devices"] = 1
    make_callbacks = _MakeCallbacks([callbacks] if isinstance(callbacks, Callback) else callbacks)
    program = f"python -m recipes.{recipe}" if isinstance(recipe, str) else "python PROGRAM.py"
    typed = Command(program, call=_call(recipe, settings))
    with nullcontext() if verbose else warnings_only():
        classes = Classes(recipe_type, data_source, make_callbacks, samples)
        this_run = Run(classes, typed, time.monotonic(), verbose=verbose)
        request = Request("fit", Given(this_run.resolver.parser.read_arguments({**arguments, **settings}), {}))
        # A notebook shows standard error in another place than standard output.
        stream = redirect_stderr(sys.stdout) if in_notebook() else nullcontext()
        with stream, _one_run_of_a_program(), failures_reported(this_run.after_loss, this_run.after_error):
            result = this_run.execute(request)
    assert result is not None
    result.model.cpu().eval()
    return result
