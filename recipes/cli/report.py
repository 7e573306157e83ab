"""The results of a run: the table at its end, results.json and TensorBoard's hyper-parameters."""

import inspect
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from rich.markup import escape

from callbacks.lib.best_effort import best_effort, unsaved
from callbacks.lib.memory import peak_memory
from callbacks.lib.terminal import fit_pairs, fit_rows, print_error, terminal_width
from callbacks.step_summary import StepSummary, with_unit
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError
from recipes.cli.experiment import Experiment, takes_inputs
from recipes.files import write_rows
from recipes.launch.settings import Command
from recipes.results.html_report import REPORT, write_report
from recipes.results.origin import commit_of, hardware, versions
from recipes.results.results_file import PARTS, RESULTS, Best, Results, write_results
from recipes.results.stopwatch import Stopwatch, count_parameters, loader_sizes
from recipes.results.texts import memory_text
from recipes.resume.saved_run import read_run

__all__ = [
    "Outcome",
    "check_output",
    "flops_per_sample",
    "print_pairs",
    "print_rows",
    "report",
    "report_unsaved",
    "shown",
]


def flops_per_sample(module: pl.LightningModule) -> int | None:
    """Floating-point operations of a forward pass of one sample; a multiply-add counts as two.

    None where the module has no ``example_input_array``.
    """
    from torch.utils.flop_counter import FlopCounterMode

    example = module.example_input_array
    if not isinstance(example, torch.Tensor):
        return None
    if example.is_floating_point():
        # precision 64-true and 16-true change the weights' type.
        example = example.to(next(module.parameters()).dtype)
        module.example_input_array = example
    training = module.training
    module.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(example[:1].to(module.device))
    module.train(training)
    return int(counter.get_total_flops())


def shown(path: str | Path) -> str:
    """A path relative to the current folder, where it lies in it."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _print_lines(lines: list[str]) -> None:
    """Print lines as they are, in which ``[bold]`` and ``[/]`` are markup."""
    console = Console(highlight=False, force_jupyter=False)  # A notebook shows standard output, too.
    for line in lines:
        console.print(line.rstrip(), soft_wrap=True)


def print_pairs(rows: dict[str, str]) -> None:
    """Print two columns, a name and its value, or lines of both where the terminal is narrow."""
    pairs = fit_pairs(rows, terminal_width(sys.stdout))
    _print_lines([f"[bold]{name}[/]" + escape("\n".join(lines)) for name, lines in pairs])


def print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table with a column per key, or lines of each row on a narrow terminal; nothing without rows."""
    if not rows:
        return
    width = terminal_width(sys.stdout)
    first, *others = map(escape, fit_rows(rows, width))
    _print_lines([f"[bold]{first}[/]", *others])


def check_output(output: str | None, endings: Sequence[str]) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if output is not None and Path(output).suffix not in endings:
        raise UserError(f"--output {output}: expected a name that ends in {' or '.join(endings)}")
    if output is not None and not Path(output).parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {Path(output).parent}")


def _describe(seconds: Mapping[str, float]) -> str:
    """The seconds of a run's parts in words, the longest first."""
    names = dict(zip(PARTS, ("start-up", "training", "validation", "saving", "drawing", "scoring", "other")))
    parts = sorted(((value, names.get(part, part)) for part, value in seconds.items() if part != "total"), reverse=True)
    return f"{seconds['total']:.1f} s: " + ", ".join(f"{name} {value:.1f}" for value, name in parts if value >= 0.05)


@dataclass(frozen=True)
class Outcome:
    """What a run has reached.

    Args:
        scores: of the best checkpoint.
        best: its path; None where none was saved.
        stopped_early: why, where early stopping has ended it.
        epochs: completed in all, also before a resume.
    """

    scores: dict[str, float]
    best: str | None
    stopped_early: str
    epochs: int


def _source_of(kind: type) -> Path | None:
    """The file of a class; None for one of a notebook or an interactive session."""
    try:
        return Path(inspect.getfile(kind))
    except (OSError, TypeError):
        return None


def _best(outcome: Outcome, monitor: str | None) -> Best | None:
    if outcome.best is None:
        return None
    saved, value = read_run(outcome.best), outcome.scores.get(monitor or "")
    monitored = monitor if value is not None else None
    return Best(checkpoint=outcome.best, epoch=saved.epoch, step=saved.updates, monitor=monitored, value=value)


def report(
    trainer: pl.Trainer,
    experiment: Experiment,
    folder: Path | None,
    stopwatch: Stopwatch,
    outcome: Outcome,
    command: Command,
    summary: StepSummary | None = None,
) -> None:
    """Write results.json and TensorBoard's graph and hyper-parameters into `folder`, and print the final table.

    Args:
        command: as it was typed.
        summary: has estimated the memory of training.
    """
    recipe, data, config = experiment.recipe, data_contract(experiment.data), experiment.settings.config
    program, scores, best = command.program, outcome.scores, outcome.best
    parameters, trainable = count_parameters(recipe)[0], stopwatch.trainable
    flops = flops_per_sample(recipe)
    sizes = stopwatch.sizes | loader_sizes(test=trainer.test_dataloaders) | dict(data.sizes)
    rate, seconds = stopwatch.samples_per_second(sizes.get("train", 0)), stopwatch.by_part()
    headline, device = recipe.headline(scores), trainer.strategy.root_device
    memory = {
        "host": peak_memory(torch.device("cpu")),
        "device": peak_memory(device) if device.type == "cuda" else None,
    }
    validation = " with validation" if seconds["validate"] else ""
    speed = f", {rate:,.0f} samples/s" if rate else ""
    rows = {
        "data": ": ".join(filter(None, (data.title, ", ".join(f"{n:,} {part}" for part, n in sizes.items())))),
        "parameters": f"{parameters:,} ({trainable:,} trainable)",
        **({"FLOPs per sample": f"{with_unit(flops)}, forward"} if flops is not None else {}),
        **headline,
        "training": f"{seconds['train'] + seconds['validate']:.1f} s{validation}{speed}",
        "time": _describe(seconds),
        "peak memory": memory_text(memory),
    }
    estimate = summary.estimate if summary else {}
    if summary and estimate:
        took = with_unit(summary.taken, "B")
        rows["memory of training"] = f"{took}, {with_unit(estimate['total'], 'B')} were estimated"
    if outcome.stopped_early:
        rows["stopped early"] = outcome.stopped_early
    if folder is not None and best:
        rows |= {
            "best checkpoint": shown(best),
        }
        if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            rows["TensorBoard"] = f"tensorboard --logdir {shlex.quote(shown(folder.parent))}"
        example = f" {recipe.predict_example}" if takes_inputs(type(experiment.data)) else ""
        if example or is_overridden("predict_dataloader", experiment.data):
            rows["predict"] = f"{program} predict --ckpt {shlex.quote(shown(best))}{example}"
    if folder is None:
        print_pairs(rows)
        return
    ended_at = datetime.now().astimezone()
    results = Results(
        recipe=recipe.title,
        command=command.using(),
        started_at=(ended_at - timedelta(seconds=seconds["total"])).isoformat(timespec="seconds"),
        ended_at=ended_at.isoformat(timespec="seconds"),
        host=platform.node(),
        hardware=hardware(trainer),
        devices=trainer.num_devices,
        num_nodes=trainer.num_nodes,
        versions=versions(),
        commit=commit_of(source) if (source := _source_of(type(recipe))) else None,
        scores=scores,
        headline=headline,
        best=_best(outcome, recipe.monitor),
        seconds=seconds,
        earlier_seconds=stopwatch.earlier_by_part(),
        epochs=outcome.epochs,
        samples_per_second=rate,
        peak_memory_bytes=memory,
        memory_estimate_bytes=estimate or None,
        stopped_early=outcome.stopped_early or None,
        parameters=parameters,
        trainable_parameters=trainable,
        flops_per_sample=flops,
        data={"name": data.title, "sizes": sizes, "left_out": dict(data.left_out)},
        config=dict(config),
        changed=list(experiment.settings.changed),
    )
    # Before anything is printed: a terminal may have gone.
    with best_effort(RESULTS):
        write_results(folder, results)
        tables = recipe.result_tables()
        for name, table in tables.items():
            with best_effort(name):
                write_rows(folder / name, table.rows, table.columns)
        if tables:
            rows["tables"] = f"{', '.join(tables)} in {shown(folder)}"
        if experiment.settings.run.report:
            with best_effort(REPORT):
                rows["report"] = shown(write_report(folder))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_graph(recipe)
            logger.save()
    print_pairs(rows)


def report_unsaved(folder: Path | None) -> None:
    """Say at the end of a run what could not be written, in one line.

    Args:
        folder: of the run; None for one without.

    Raises:
        RunFailedError: the results were not written.
    """
    lost = unsaved()
    what = "; ".join(f"{name} ({reason})" for name, reason in lost.items())
    if RESULTS in lost:
        raise RunFailedError(f"the training is done and its weights are saved, but not: {what}")
    if lost:
        saved = f"; the weights and {RESULTS} are in {shown(folder)}" if folder else ""
        print_error(f"warning: not saved: {what}{saved}")
