"""Carry out a command: fit, validate, test, predict, verify or export."""

from datamodules.errors import UserError, spelled
from datamodules.lightning import MisconfigurationException, is_overridden
from recipes.export import export
from recipes.runner.evaluation import evaluate
from recipes.runner.experiment import Experiment, as_user_errors
from recipes.runner.guards import restoring
from recipes.runner.printing import relative_path
from recipes.runner.report import print_pairs
from recipes.runner.run_result import RunResult
from recipes.runner.stock_loaders import evaluate_each_sample_once
from recipes.runner.training import train, verify
from recipes.runner.verify import Interval

_NEEDS = {
    "fit": ("training_step", "train_dataloader"),
    "validate": ("validation_step", "val_dataloader"),
    "test": ("test_step", "test_dataloader"),
    "predict": ("predict_step", "predict_dataloader"),
}
"""The method of the recipe and the method of the data module that each command calls."""


def run_command(experiment: Experiment, started_at: float, interval: Interval | None = None) -> RunResult | None:
    """Carry out a command.

    Args:
        started_at: `time.monotonic` at the start of the program.
        interval: the part of a run that verify trains again.

    Returns:
        The result of fit; None for the other commands.
    """
    if experiment.command == "export":
        _export(experiment)
        return None
    _check_parts(experiment)
    if experiment.trainer.options().get("use_distributed_sampler", True):
        evaluate_each_sample_once(experiment.data, experiment.launch.rank, experiment.launch.world_size)
    with as_user_errors(MisconfigurationException):
        if experiment.command != "fit":
            evaluate(experiment, _NEEDS[experiment.command][0])
            return None
        if interval is None:
            return train(experiment, started_at)
        with restoring(experiment.point.checkpoint):
            verify(experiment, interval)
        return None


def _check_parts(experiment: Experiment) -> None:
    """Refuse a command for which the recipe or the data module has no method."""
    command = experiment.command
    step, loader = _NEEDS[command]
    for owner, name in ((experiment.recipe, step), (experiment.data, loader)):
        if not is_overridden(name, owner):
            raise UserError(f"{command} needs a method {name}, and {type(owner).__name__} has none")
    validates = experiment.validates and experiment.trainer.limit_val_batches != 0
    if command == "fit" and experiment.run.patience is not None and not validates:
        raise UserError(f"{spelled('patience')} counts validations, and this run has none; leave it out")


def _export(experiment: Experiment) -> None:
    run = experiment.run
    exported = export(experiment.recipe, run.ckpt or "", run.format or "", run.output)
    inputs = {f"input {name}": description for name, description in exported.inputs.items()}
    print_pairs({"written": relative_path(exported.path), **inputs, "checked": exported.check})
