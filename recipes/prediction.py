"""Predictions of a recipe: for inputs from Python, and as rows of a table."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from callbacks.lib.hooks import attached_trainer
from datamodules.contract import DataContract, data_contract
from datamodules.errors import UserError
from datamodules.loading.loaders import sample_numbers
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.packed_sentences import TranslationBatch
from recipes.base import Recipe
from recipes.inputs import in_dtype, new_data_module

_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_RUNNER_UP = re.compile(r"(class|probability)_\d+")


def all_rows(recipe: Recipe, outputs: Sequence[Any], data: DataContract) -> list[dict[str, Any]]:
    """The rows of all inputs in their order: those of the predictions, and one for each input without a prediction.

    Args:
        recipe: its `prediction_rows` makes the rows of the outputs.
        outputs: what `predict_step` returned, a batch each.
        data: the data module of the inputs, after the last batch.

    Returns:
        Where something is to be said of an input, all rows have the column ``note``.
    """
    names, notes = data.prediction_names, {**data.unclear_inputs, **data.unreadable_inputs}
    rows = recipe.prediction_rows(outputs, names)
    if not notes:
        return rows
    columns: dict[str, Any] = dict.fromkeys([*(rows[0] if rows else ()), *recipe.prediction_columns])
    found: list[dict[str, Any]] = []
    # The same input may be given twice in succession; the first column is its name.
    for name, group in groupby(enumerate(names), key=itemgetter(1)):
        numbers = [number for number, _ in group]
        count = sum(1 for _ in takewhile(lambda row: next(iter(row.values())) == name, rows))  # noqa: B023
        mine, rows = rows[:count], rows[count:]
        for place, number in enumerate(numbers):
            each = mine[place * count // len(numbers) : (place + 1) * count // len(numbers)]
            if not each and number in notes:
                each = [columns | {recipe.prediction_columns[0]: name}]
            note = notes.get(number)
            found += [row | {"note": note.removeprefix(f"{name} ") if note else row.get("note")} for row in each]
    return found


def _as_text(value: Any) -> str:
    """A cell of a table."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def prediction_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """What the predict command prints of `all_rows`: of several classes the likeliest, and notes where there are any.

    Args:
        rows: the predictions, at least one; all rows have the same keys.

    Returns:
        A row per prediction, with the cells as text under the column's name.
    """
    hidden = {"note"} if not any(row.get("note") for row in rows) else set()
    shown = [name for name in rows[0] if name not in hidden and not _RUNNER_UP.fullmatch(name)]
    return [{name: "" if name == "note" and not row[name] else _as_text(row[name]) for name in shown} for row in rows]


@torch.inference_mode()
def predict(recipe: Recipe, inputs: Any) -> list[dict[str, Any]]:
    """Predict as the predict command does, on the device of a recipe.

    The recipe needs to know how its data were prepared: from a checkpoint that it was loaded from, or from the data
    module of a Trainer that it is attached to. A run in bf16-mixed or 16-mixed predicts in it here, too; of one in
    bf16-true or 64-true, `load_from_checkpoint` has made a recipe in float32, which predicts in that.

    Args:
        inputs: what the predict command takes, and objects in memory: images as files, folders, PIL images, arrays or
            tensors, or a list of them; sentences as text. Or a data module: its test part, else its validation part,
            is predicted; of a module without inputs to predict, what its ``predict_dataloader()`` yields.

    Returns:
        The rows that the command writes into its ``--output``, one or more for each input.

    Raises:
        UserError: nothing that was given can be read, or it is not known how the data were prepared.

    Example:
        >>> model = MNISTClassifier.load_from_checkpoint("best.ckpt")  # doctest: +SKIP
        >>> [row["class"] for row in predict(model, ["3.png", "photographs/"])]  # doctest: +SKIP
        ['3', '7', '1']
    """
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
    contract.take_inputs(inputs)
    data.setup("predict")
    try:
        outputs = _outputs(recipe, data, data.predict_dataloader())
    finally:
        data.teardown("predict")
    return all_rows(recipe, outputs, contract)


def _outputs(recipe: Recipe, data: pl.LightningDataModule, batches: Iterable[Any]) -> list[Any]:
    """What `predict_step` makes of batches, in evaluation mode and on the device of the recipe."""
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
    """Predict the samples of a data module."""
    contract = data_contract(data)
    if "predict_inputs" not in data.hparams:
        data.setup("predict")
        return recipe.prediction_rows(_outputs(recipe, data, data.predict_dataloader()), ())
    data.setup("test")
    part, loader = "test", data.test_dataloader()
    if not loader:
        data.setup("validate")
        part, loader = "val", data.val_dataloader()
    if not loader:
        raise UserError(f"{contract.title} has neither a test nor a validation part to predict")
    if isinstance(data, TranslationDataModule):
        sentences: list[Tensor] = []
        outputs = _outputs(recipe, data, _numbered_sentences(loader, sentences))
        return recipe.prediction_rows(outputs, data.source_sentences(torch.cat(sentences)))
    outputs = _outputs(recipe, data, _numbered_images(loader))
    numbers, names = sample_numbers(loader), contract.sample_names(part)
    assert numbers is not None
    return recipe.prediction_rows(outputs, [str(names[n]) if names else f"sample {n}" for n in numbers.tolist()])


def _numbered_images(loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The images of an evaluation with their places in it, in place of labels."""
    seen = 0
    for images, *_ in loader:
        yield images, torch.arange(seen, seen + len(images))
        seen += len(images)


def _numbered_sentences(loader: Iterable[Any], numbers: list[Tensor]) -> Iterator[TranslationBatch]:
    """The sentences of an evaluation with their places in it; their numbers in the corpus are added to a list."""
    seen = 0
    for batch in loader:
        numbers.append(batch.numbers)
        yield batch._replace(numbers=torch.arange(seen, seen + len(batch.numbers)))
        seen += len(batch.numbers)
