"""Predictions of a recipe: for inputs from Python, and as rows of a table."""

import os
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.lib.lightning_internals import attached_trainer
from datamodules.contract import DataContract, data_contract
from datamodules.errors import UserError
from datamodules.lightning import pl
from datamodules.loading.loaders import sample_numbers
from recipes.base import Recipe
from recipes.inputs import in_dtype, new_data_module
from recipes.registry import recipe_class

_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_RUNNER_UP = re.compile(r"(class|probability)_\d+")


def all_rows(recipe: Recipe, outputs: Sequence[Any], data: DataContract) -> list[dict[str, Any]]:
    """Return the rows of all inputs in their order; an unreadable input has a row without a prediction.

    Args:
        recipe: the recipe, whose `prediction_rows` returns the rows of the outputs.
        outputs: results of `predict_step`, one for each batch.
        data: the data module of the inputs, after the last batch.

    Returns:
        The rows; if there is a note about an input, all rows have the column ``note``.
    """
    names = data.prediction_names
    notes = {**data.unclear_inputs, **{number: error.problem for number, error in data.unreadable_inputs.items()}}
    rows = recipe.prediction_rows(outputs, names)
    if not notes:
        return rows
    columns: dict[str, Any] = dict.fromkeys([*(rows[0] if rows else ()), *recipe.prediction_columns])
    completed: list[dict[str, Any]] = []
    # Rows are matched to inputs by their first column, the name of the input. If the same input is passed twice in a
    # row, the rows of its name are split evenly.
    for name, group in groupby(enumerate(names), key=itemgetter(1)):
        numbers = [number for number, _ in group]
        count = 0
        while count < len(rows) and next(iter(rows[count].values())) == name:
            count += 1
        rows_of_name = rows[:count]
        rows = rows[count:]
        for position, number in enumerate(numbers):
            rows_of_input = rows_of_name[position * count // len(numbers) : (position + 1) * count // len(numbers)]
            if not rows_of_input and number in notes:
                rows_of_input = [columns | {recipe.prediction_columns[0]: name}]
            for row in rows_of_input:
                completed.append(row | {"note": notes.get(number) or row.get("note")})
    return completed


def _as_text(value: Any) -> str:
    """Return a table cell as text."""
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def prediction_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the table that the predict command prints: the most probable class only, and notes if there are any.

    Args:
        rows: the predictions, at least one; all rows have the same keys.

    Returns:
        A row for each prediction, with the cells as text by column.
    """
    has_notes = any(row.get("note") for row in rows)
    shown = [name for name in rows[0] if not _RUNNER_UP.fullmatch(name) and (name != "note" or has_notes)]
    table = []
    for row in rows:
        cells = {name: _as_text(row[name]) for name in shown}
        if has_notes and not row["note"]:
            cells["note"] = ""
        table.append(cells)
    return table


@torch.inference_mode()
def predict(recipe: Any, inputs: Any) -> list[dict[str, Any]]:
    """Predict as the predict command does, on the device of a recipe.

    The recipe needs the settings of its data: it has them from its checkpoint, or from the data module of its Trainer.
    A recipe of a run in bf16-mixed or 16-mixed predicts in the same precision. After a run in bf16-true or 64-true,
    `load_from_checkpoint` returns a recipe in float32, which predicts in float32.

    Args:
        recipe: a recipe, the result of `recipes.fit`, or the path of a checkpoint.
        inputs: inputs of the predict command, and objects in memory: images as files, folders, PIL images, arrays or
            tensors, or a list of them; sentences as text. Or a data module: its test part, else its validation part,
            is predicted; without these parts, the batches of its ``predict_dataloader()``.

    Returns:
        The rows that the command writes into its ``--output``, one or more for each input.

    Raises:
        UserError: no input can be read, there is no such checkpoint, or the recipe does not know how the data were
            prepared.

    Example:
        >>> model = MNISTClassifier.load_from_checkpoint("best.ckpt")  # doctest: +SKIP
        >>> [row["class"] for row in predict(model, ["3.png", "photographs/"])]  # doctest: +SKIP
        ['3', '7', '1']
    """
    recipe = _recipe_of(recipe)
    if isinstance(inputs, pl.LightningDataModule):
        return _predict_part(recipe, inputs)
    data = new_data_module(recipe)
    if data is None:
        name = type(recipe).__name__
        if recipe.data_class is None:
            raise UserError(f"{name} names no data module that prepares its inputs; set {name}.data_class")
        raise UserError(
            f"this {name} does not know how its data were prepared; load it from the checkpoint of a run, as in"
            f" {name}.load_from_checkpoint(FILE)"
        )
    contract = data_contract(data)
    contract.set_inputs(inputs)
    data.setup("predict")
    try:
        outputs = _outputs(recipe, data, data.predict_dataloader())
    finally:
        data.teardown("predict")
    return all_rows(recipe, outputs, contract)


def _recipe_of(given: Any) -> Recipe:
    """Return the recipe for an argument of `predict`: a recipe, the result of a run, or a checkpoint."""
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        if not path.is_file():
            raise UserError(f"there is no checkpoint {path}; pass one such as runs/mnist/NAME/checkpoints/best.ckpt")
        names = load_plain(path).get("recipes", [])
        if not names:
            raise UserError(f"{path} is no checkpoint of a recipe")
        return recipe_class(names[0]).load_from_checkpoint(path)
    recipe = getattr(given, "model", given)
    if not isinstance(recipe, Recipe):
        raise UserError(
            f"predict() takes a recipe, the result of fit() or the path of a checkpoint, and was given a"
            f" {type(given).__name__}"
        )
    return recipe


def _outputs(recipe: Recipe, data: pl.LightningDataModule, batches: Iterable[Any]) -> list[Any]:
    """Return the outputs of `predict_step`, in evaluation mode and on the device of the recipe."""
    # Restored module by module: `recipe.train()` would also put frozen layers into training mode.
    modes = [(module, module.training) for module in recipe.modules()]
    recipe.eval()
    trainer = attached_trainer(recipe)
    dtype = _MIXED.get(recipe.saved_precision if trainer is None else str(trainer.precision))
    outputs = []
    try:
        for i, batch in enumerate(batches):
            batch = data.on_after_batch_transfer(data.transfer_batch_to_device(batch, recipe.device, 0), 0)
            with torch.autocast(recipe.device.type, dtype, enabled=dtype is not None):
                outputs.append(recipe.predict_step(in_dtype(batch, recipe.dtype), i))
    finally:
        for module, training in modes:
            module.training = training
    return outputs


def _predict_part(recipe: Recipe, data: pl.LightningDataModule) -> list[dict[str, Any]]:
    """Predict the test part of a data module, else its validation part."""
    contract = data_contract(data)
    if "predict_inputs" not in data.hparams:
        data.setup("predict")
        return recipe.prediction_rows(_outputs(recipe, data, data.predict_dataloader()), ())
    data.setup("test")
    part = "test"
    loader = data.test_dataloader()
    if not loader:
        data.setup("validate")
        part = "val"
        loader = data.val_dataloader()
    if not loader:
        raise UserError(f"{contract.title} has neither a test nor a validation part to predict")
    outputs = _outputs(recipe, data, contract.numbered(loader))
    # After the last batch: images that turn out to be unreadable have no number.
    numbers = sample_numbers(loader)
    assert numbers is not None
    names = contract.sample_names(part)
    return recipe.prediction_rows(
        outputs, [str(names[number]) if names else f"sample {number}" for number in numbers.tolist()]
    )
