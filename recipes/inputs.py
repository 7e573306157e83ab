"""The inputs of a recipe's network: how its data module prepares them, and their type."""

import inspect
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn

from datamodules.contract import OneCall, data_contract, marked_parameters
from recipes.base import Recipe


def in_dtype(batch: Any, dtype: torch.dtype | str) -> Any:
    """A batch whose floating-point tensors have this type, as Lightning's precision plugins convert it."""
    return apply_to_collection(batch, Tensor, lambda part: part.to(dtype) if part.is_floating_point() else part)


def in_dtype_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Float64 inputs, and images of whole numbers, in the type of the module's parameters; others as they are.

    Whole numbers of another shape may be tokens, and Lightning converts the other floats where its precision needs it.
    """
    if inputs.dtype != torch.float64 and (inputs.is_floating_point() or inputs.dim() != 4):
        return inputs
    return inputs.to(next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32))


def new_data_module(recipe: Recipe) -> pl.LightningDataModule | None:
    """A data module with the settings and the state of the one that a network was trained on, without its files.

    It is known while a data module of the recipe's ``data_class`` is attached, and after a checkpoint of one has been
    loaded; None otherwise.
    """
    data, saved = recipe.data_module(), recipe.saved_data
    if recipe.data_class is None:
        return None
    if isinstance(data, recipe.data_class):
        saved = dict(data.hparams), data.state_dict()
    if saved is None:
        return None
    # What belongs to one call, such as a folder to write into, is not taken from a checkpoint.
    wanted = inspect.signature(recipe.data_class).parameters.keys() - marked_parameters(recipe.data_class, OneCall)
    made = recipe.data_class(**{name: value for name, value in saved[0].items() if name in wanted})
    made.load_state_dict(saved[1])
    return made


def preprocessing(recipe: Recipe) -> nn.Module | None:
    """What maps uint8 images of the data set's form to a network's inputs, as the data module does in training.

    None where `new_data_module` knows none, and where the inputs are no images.
    """
    return data_contract(new_data_module(recipe)).preprocessing()
