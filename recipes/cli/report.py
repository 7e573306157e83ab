"""What a run leaves behind for people: the table at its end, results.json and the final entry in TensorBoard."""

import csv
import json
import math
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.markup import escape
from torch import nn
from typing_extensions import override

from datamodules.errors import UserError
from recipes.recipe import Recipe

__all__ = ["Stopwatch", "count_parameters", "flops_per_sample", "hardware", "report", "shown", "write_rows"]


class Stopwatch(pl.Callback):
    """Seconds of training and of the validation in it, the epochs trained meanwhile, the parameters that trained.

    `has_begun` says whether a first batch was about to be trained, when all that is refused had been refused.
    """

    def __init__(self) -> None:
        self.seconds = self.validation_seconds = 0.0
        self.epochs = 0.0
        self.trainable = 0
        self.has_begun = False
        self._began = self._validation_began = 0.0
        self._first_batch = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began, self._first_batch = time.monotonic(), trainer.fit_loop.total_batch_idx

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.has_begun = True

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.monotonic() - self._began
        # Now: what was frozen is as before when the run has ended.
        self.trainable = count_parameters(pl_module)[1]
        batches = trainer.fit_loop.total_batch_idx - self._first_batch
        # Of whole epochs: limit_train_batches cuts them.
        self.epochs = batches / max(1, len(trainer.train_dataloader))  # type: ignore[arg-type]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validation_seconds += time.monotonic() - self._validation_began

    def samples_per_second(self, samples_per_epoch: int) -> float:
        """Training samples of all devices per second of training."""
        return self.epochs * samples_per_epoch / max(1e-9, self.seconds - self.validation_seconds)


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """All parameters, and those that train."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)


def flops_per_sample(module: pl.LightningModule) -> int | None:
    """Floating-point operations of one forward pass of one sample, a multiply-add counted as two.

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
    return counter.get_total_flops()


def _for_people(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g}"


def hardware(trainer: pl.Trainer) -> str:
    """The kind and number of the devices."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"{platform.machine()} {device.type} with {threads} thread{'s' if threads > 1 else ''}"
    return f"{trainer.world_size} x {name}"


def shown(path: str | Path) -> str:
    """A path as a person would type it from here."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _print_lines(lines: list[str]) -> None:
    """Never wrapped or cut: paths and commands are there to be copied."""
    console = Console(highlight=False)
    for line in lines:
        console.print(line.rstrip(), soft_wrap=True)


def print_pairs(rows: dict[str, str]) -> None:
    """Print two columns: what, and its value."""
    width = max(map(len, rows))
    _print_lines([f"[bold]{name:<{width}}[/]  {escape(value)}" for name, value in rows.items()])


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table with a column per key; runners-up, under ``class_2`` and so on, share the last one."""
    ranked = re.compile(r"_[1-9]\d*$")
    columns = [name for name in rows[0] if not ranked.search(name)]
    runners_up = [name for name in rows[0] if name not in columns]
    cells = [columns + ["then"] * bool(runners_up)]
    for row in rows:
        others = [_cell(row[name]) for name in runners_up]
        pairs = ", ".join(" ".join(others[i : i + 2]) for i in range(0, len(others), 2))
        cells.append([_cell(row[name]) for name in columns] + [pairs] * bool(runners_up))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [escape("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip()) for row in cells]
    _print_lines([f"[bold]{lines[0]}[/]", *lines[1:]])


def check_output(output: str | None) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if output is not None and Path(output).suffix not in (".json", ".csv"):
        raise UserError(f"--output {output}: expected a name that ends in .json or .csv")
    if output is not None and not Path(output).parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {Path(output).parent}")


def write_rows(path: Path, rows: list[dict[str, Any]] | dict[str, Any]) -> None:
    """Write JSON or CSV, by the file's ending; the file is either the old one or the whole new one."""
    part = path.with_name(f".{path.name}.part")
    if path.suffix == ".csv":
        table = rows if isinstance(rows, list) else [rows]
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    else:
        part.write_text(json.dumps(rows, indent=2, default=str) + "\n")
    part.replace(path)


def report(
    trainer: pl.Trainer,
    recipe: Recipe,
    data: pl.LightningDataModule,
    folder: Path | None,
    stopwatch: Stopwatch,
    scores: dict[str, float],
    best: str | None,
    config: dict[str, Any],
    program: str,
    wall_seconds: float,
) -> None:
    """Print the final table, and write results.json and TensorBoard's graph and hyper-parameters into `folder`."""
    parameters, trainable = count_parameters(recipe)[0], stopwatch.trainable
    flops = flops_per_sample(recipe)
    sizes = getattr(data, "sizes", {})
    rate = stopwatch.samples_per_second(sizes.get("train", 0))
    title = getattr(getattr(data, "info", None), "title", type(data).__name__)
    rows = {
        "data": f"{title}: " + ", ".join(f"{size:,} {part}" for part, size in sizes.items()),
        "parameters": f"{parameters:,} ({trainable:,} trainable)",
        **({"FLOPs per sample": f"{_for_people(flops)}, forward"} if flops is not None else {}),
        **recipe.headline(scores),
        "training": f"{stopwatch.seconds:.1f} s, {rate:,.0f} samples/s; {wall_seconds:.1f} s in all",
    }
    if folder is not None and best:
        rows |= {
            "best checkpoint": shown(best),
            "TensorBoard": f"tensorboard --logdir {shown(folder.parent)}",
            "predict": f"{program} predict --ckpt {shown(best)} {recipe.predict_example}",
        }
    print_pairs(rows)
    if folder is None:
        return
    results = {
        "scores": scores,
        "data": {"name": title, "sizes": sizes},
        "parameters": parameters,
        "trainable_parameters": trainable,
        "flops_per_sample": flops,
        "training_seconds": stopwatch.seconds,
        "validation_seconds": stopwatch.validation_seconds,
        "wall_seconds": wall_seconds,
        "samples_per_second": rate,
        "best_checkpoint": best,
        "hardware": hardware(trainer),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "lightning": pl.__version__},
        "config": config,
    }
    write_rows(folder / "results.json", results)
    plain = {name: value for name, value in config.items() if isinstance(value, (int, float, str, bool))}
    final = {f"final/{name}": v for name, v in scores.items() if "_class_" not in name and math.isfinite(v)}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(plain, final)
            try:
                logger.log_graph(recipe)
            except Exception as error:  # Tracing runs the user's forward, in ways that it may not be made for.
                print(f"TensorBoard shows no graph: {str(error).splitlines()[0]}", file=sys.stderr)  # noqa: T201
            logger.save()
