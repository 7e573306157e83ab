"""Inputs of a recipe's network: their preprocessing and their type.

Tested in `tests/recipes/test_prediction.py`.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.contract import Transient, data_contract, marked_parameters
from datamodules.lightning import apply_to_collection, pl
from recipes.base import Recipe


def in_dtype(batch: Any, dtype: torch.dtype | str) -> Any:
    """Convert the floating-point tensors of a batch to a type, as Lightning's precision plugins do."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(batch, Tensor, convert)


def in_dtype_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Convert float64 inputs, and integer images, to the type of the module's parameters.

    Other inputs are unchanged: integers of another shape may be tokens, and Lightning converts other floats if its
    precision requires that.
    """
    if inputs.dtype != torch.float64 and (inputs.is_floating_point() or inputs.dim() != 4):
        return inputs
    return inputs.to(next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32))


def new_data_module(recipe: Recipe) -> pl.LightningDataModule | None:
    """Return a data module with the settings and state of the training, but without its files.

    The settings are known while a data module of the recipe's ``data_class`` is attached, and after a checkpoint of
    such a run has been loaded; otherwise the result is None.
    """
    if recipe.data_class is None:
        return None
    data = recipe.data_module()
    saved = recipe.saved_data
    if isinstance(data, recipe.data_class):
        saved = dict(data.hparams), data.state_dict()
    if saved is None:
        return None
    # Transient settings, such as a folder to write into, are not taken from a checkpoint.
    parameters = inspect.signature(recipe.data_class).parameters.keys() - marked_parameters(
        recipe.data_class, Transient
    )
    data_module = recipe.data_class(**{name: value for name, value in saved[0].items() if name in parameters})
    data_module.load_state_dict(saved[1])
    return data_module


def preprocessing(recipe: Recipe) -> nn.Module | None:
    """Return the module that maps uint8 images to a network's inputs, as the data module does in training.

    The result is None if `new_data_module` returns None, or if the inputs are not images.
    """
    return data_contract(new_data_module(recipe)).preprocessing()
