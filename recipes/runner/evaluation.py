"""Carry out the commands validate, test and predict."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError
from recipes.prediction import all_rows, prediction_table
from recipes.runner.experiment import Experiment
from recipes.runner.guards import guarded
from recipes.runner.report import print_rows, print_scores
from recipes.runner.results import write_rows
from recipes.runner.run_files import tables_of
from recipes.runner.trainer import build_trainer
from recipes.runner.training import merged
from recipes.tables import ResultTable
from recipes.weights import load_initial_weights


def evaluate(experiment: Experiment, step: str) -> None:
    """Validate, test or predict with a checkpoint.

    Args:
        step: the recipe's method that the command calls, such as validation_step.
    """
    recipe = experiment.recipe
    data = experiment.data
    ckpt = experiment.run.ckpt
    predicts = experiment.command == "predict"
    trainer = build_trainer(experiment, experiment.callbacks())
    # Lightning converts the module only after it has loaded the checkpoint; float32 parameters would round float64.
    trainer.precision_plugin.convert_module(recipe)
    if ckpt is None:
        load_initial_weights(recipe, exact=True)
    rows: Sequence[dict[str, Any]]
    with guarded(trainer, experiment, restores=ckpt):
        if predicts:
            outputs = trainer.predict(recipe, data, ckpt_path=ckpt, weights_only=True)
            rows = all_rows(recipe, outputs or [], data_contract(data))
        else:
            evaluate_loaders = trainer.validate if experiment.command == "validate" else trainer.test
            scores_of_loaders = evaluate_loaders(recipe, data, ckpt_path=ckpt, weights_only=True, verbose=False)
            rows = [merged(scores_of_loaders)] if scores_of_loaders else []
    if not rows:
        raise UserError(f"there is nothing to {experiment.command}: the data have no such part, or it is empty")
    if not any(rows):
        raise UserError(f"{step} of {type(recipe).__name__} logs no score; call self.log(NAME, VALUE) in it")
    if not trainer.is_global_zero:
        return
    tables = tables_of(trainer)
    problem = _write(experiment, rows, tables)
    if predicts:
        print_rows(prediction_table(rows))
    else:
        print_scores(rows[0], tables, {} if problem else _files_of(experiment, tables))
    if problem:
        raise RunFailedError(f"{experiment.run.output} could not be written: {problem}")
    unreadable = list(data_contract(data).unreadable_inputs.values())
    # After the other inputs were predicted and written, so that one bad file does not cost their predictions.
    if predicts and unreadable:
        total = len(data_contract(data).prediction_names)
        raise RunFailedError(f"{len(unreadable):,} of {total:,} inputs could not be read: {unreadable[0]}")


def _files_of(experiment: Experiment, tables: Mapping[str, ResultTable]) -> dict[str, Path]:
    """Return the paths of the tables, beside ``--output``; none without it."""
    if not experiment.run.output:
        return {}
    output = Path(experiment.run.output)
    return {name: output.with_name(f"{output.stem}_{name}") for name in tables}


def _write(experiment: Experiment, rows: Sequence[dict[str, Any]], tables: Mapping[str, ResultTable]) -> str:
    """Write ``--output`` and the tables beside it; return the reason of a failure, or an empty text."""
    if not experiment.run.output:
        return ""
    output = Path(experiment.run.output)
    text_columns = experiment.recipe.prediction_columns[1:2]
    content: Any = rows if experiment.command == "predict" else rows[0]
    if output.suffix == ".txt":
        content = [{name: row[name] or "" for name in text_columns} for row in rows]
    try:
        write_rows(output, content, text_columns if output.suffix == ".txt" else None)
        for name, path in _files_of(experiment, tables).items():
            write_rows(path, tables[name].rows, tables[name].columns)
    except OSError as error:
        return error.strerror or str(error)
    return ""
