"""Hold the classes that a command works with, and derive its flags from their constructors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentParser

from datamodules.contract import USUALLY_FREE, Free, OneCall, data_contract, marked_parameters
from datamodules.lightning import Callback, pl
from recipes.base import Recipe
from recipes.runner.flag_help import PREDICT_INPUTS
from recipes.runner.flags import FlagGroup, FlagParser
from recipes.runner.launch import LaunchSettings
from recipes.runner.merging import Marks
from recipes.runner.settings import NullEnds, OfMachine, RunSettings, TrainerSettings


def takes_inputs(data_class: type[pl.LightningDataModule]) -> bool:
    """Return whether a data module's constructor takes the arguments of the predict command."""
    return PREDICT_INPUTS in ArgumentParser(exit_on_error=False).add_class_arguments(data_class)


@dataclass(frozen=True)
class Classes:
    """The classes that a command line is made for.

    Args:
        recipe: the class of the recipe.
        data: the class of the data module, or a data module that was passed to `recipes.fit`.
        callbacks: makes further callbacks for the Trainer, new ones at each call.
        samples: samples in memory for the data module; None if it reads files.
    """

    recipe: type[Recipe]
    data: type[pl.LightningDataModule] | pl.LightningDataModule
    callbacks: Callable[[], Sequence[Callback]] = tuple
    samples: Any = None

    @property
    def data_class(self) -> type[pl.LightningDataModule]:
        """The class of the data module."""
        return self.data if isinstance(self.data, type) else type(self.data)

    @property
    def both(self) -> tuple[type, type]:
        """The classes of recipe and data module."""
        return self.recipe, self.data_class

    def build_data(self, options: Mapping[str, Any]) -> pl.LightningDataModule:
        """Build the data module, and pass it the samples that were given in memory."""
        if not isinstance(self.data, type):
            return self.data
        data = self.data(**options)
        if self.samples is not None:
            data_contract(data).take_samples(self.samples)
        return data

    def parser(self, program: str = "") -> FlagParser:
        """Build the parser, with a flag for every parameter of the two constructors and of the run."""
        data_groups = []
        # A data module that was passed to `fit` is built already, so its parameters are no flags.
        if isinstance(self.data, type):
            data_groups.append(FlagGroup("Data", self.data, frozenset({PREDICT_INPUTS})))
        groups = [
            FlagGroup("Run", RunSettings),
            *data_groups,
            FlagGroup("Recipe", self.recipe),
            # After the recipe, so that the recipe's default counts where they share a name.
            FlagGroup("Trainer", TrainerSettings),
            FlagGroup("Launch", LaunchSettings),
        ]
        parser = FlagParser(groups, program)
        parser.set_defaults(self.recipe.trainer_defaults)
        return parser

    def with_inputs(self, options: dict[str, Any], inputs: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of the data module, and the inputs of predict among them."""
        if not inputs:
            return options
        return {**options, PREDICT_INPUTS: list(inputs)}


def marks_of(parser: FlagParser) -> Marks:
    """Return which flags are special, by the marks of their types."""
    return Marks(
        free=parser.marked(Free) | USUALLY_FREE,
        one_call=parser.marked(OneCall) | {PREDICT_INPUTS},
        of_machine=parser.marked(OfMachine),
        null_ends=parser.marked(NullEnds),
    )


def free_parameters(classes: Classes) -> frozenset[str]:
    """Return the parameters of recipe and data that do not define the experiment."""
    return marked_parameters(classes.recipe, Free) | marked_parameters(classes.data_class, Free) | USUALLY_FREE
