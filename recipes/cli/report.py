"""The results of a run: the table at its end, results.json and TensorBoard's hyper-parameters."""

import contextlib
import json
import math
import platform
import sys
import time
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from rich.markup import escape
from torch import nn
from typing_extensions import override

from callbacks.lib.best_effort import best_effort, unsaved
from callbacks.lib.terminal import fit_pairs, terminal_width
from callbacks.lib.trainer_attributes import callbacks_of
from datamodules.contract import DataContract, data_contract
from datamodules.errors import RunFailedError, UserError
from recipes.cli.early_stopping import why_stopped
from recipes.cli.experiment import Experiment, takes_inputs
from recipes.launch.streams import print_error, unwritten_streams
from recipes.results.html_report import REPORT, write_report
from recipes.results.results_file import RESULTS, write_results
from recipes.version import __version__

__all__ = [
    "SampleCounter",
    "Stopwatch",
    "count_parameters",
    "flops_per_sample",
    "hardware",
    "report",
    "report_unsaved",
    "shown",
    "stopwatch_for",
]


def loader_sizes(**loaders: Any) -> dict[str, int]:
    """Samples in the data sets of the loaders of each part; without the parts that do not tell.

    Example:
        >>> loader_sizes(train=torch.utils.data.DataLoader(range(10), batch_size=4), val=None, test=iter("abc"))
        {'train': 10}
    """
    sizes = {}
    for part, loader in loaders.items():
        data = [getattr(one, "dataset", None) for one in CombinedLoader(loader).flattened]
        sized = [one for one in data if isinstance(one, Sized)]
        if sized and len(sized) == len(data):
            sizes[part] = sum(map(len, sized))
    return sizes


class Stopwatch(pl.Callback):
    """Measures seconds of training and of validation in it, the epochs trained, and the parameters that trained.

    `started` is True once the first batch is about to be trained, after all checks. `sizes` holds the samples of the
    parts that the loaders tell and the data module does not have to.
    """

    def __init__(self) -> None:
        self.seconds = self.validation_seconds = 0.0
        self.epochs = 0.0
        self.trainable = 0
        self.sizes: dict[str, int] = {}
        self.stopped_early = ""
        self.started = False
        self._began = self._validation_began = 0.0
        self._first_batch = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began, self._first_batch = time.monotonic(), trainer.fit_loop.total_batch_idx

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = True

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.monotonic() - self._began
        self.stopped_early = why_stopped(callbacks_of(trainer))
        # Here, since frozen layers are unfrozen when the run has ended.
        self.trainable = count_parameters(pl_module)[1]
        batches = trainer.fit_loop.total_batch_idx - self._first_batch
        loader: Any = trainer.train_dataloader
        # In full epochs: limit_train_batches shortens them.
        with contextlib.suppress(TypeError):  # Without length, as of an iterable.
            self.epochs = batches / max(1, len(loader))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validation_seconds += time.monotonic() - self._validation_began

    def samples_per_second(self, samples_per_epoch: int) -> float:
        """Training samples of all devices per second of training."""
        return self._samples(samples_per_epoch) / max(1e-9, self.seconds - self.validation_seconds)

    def _samples(self, samples_per_epoch: int) -> float:
        return self.epochs * samples_per_epoch


class SampleCounter(Stopwatch):
    """Counts the samples of all ranks batch by batch, for a data module that does not tell how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with contextlib.suppress(MisconfigurationException):  # It holds no tensor.
            self.samples += extract_batch_size(batch)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        count = torch.tensor(self.samples, device=pl_module.device)
        self.samples = int(trainer.strategy.reduce(count, reduce_op="sum"))
        self.sizes = loader_sizes(train=trainer.train_dataloader, val=trainer.val_dataloaders)

    @override
    def _samples(self, samples_per_epoch: int) -> float:
        return self.samples


def stopwatch_for(data: pl.LightningDataModule) -> Stopwatch:
    """A stopwatch that counts samples itself where the data module is none of `DataContract`."""
    return Stopwatch() if DataContract in type(data).__mro__ else SampleCounter()


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """The number of all parameters, and of those that require a gradient."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)


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


def _with_unit(number: float) -> str:
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
    """A path relative to the current folder, where it lies in it."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _print_lines(lines: list[str]) -> None:
    """Print lines as they are, in which ``[bold]`` and ``[/]`` are markup."""
    console = Console(highlight=False)
    for line in lines:
        console.print(line.rstrip(), soft_wrap=True)


def print_pairs(rows: dict[str, str]) -> None:
    """Print two columns, a name and its value, or lines of both where the terminal is narrow."""
    pairs = fit_pairs(rows, terminal_width(sys.stdout))
    _print_lines([f"[bold]{name}[/]" + escape("\n".join(lines)) for name, lines in pairs])


def print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table with a column per key; nothing without rows."""
    if not rows:
        return
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [escape("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip()) for row in cells]
    _print_lines([f"[bold]{lines[0]}[/]", *lines[1:]])


def check_output(output: str | None) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if output is not None and Path(output).suffix not in (".json", ".csv"):
        raise UserError(f"--output {output}: expected a name that ends in .json or .csv")
    if output is not None and not Path(output).parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {Path(output).parent}")


def report(
    trainer: pl.Trainer,
    experiment: Experiment,
    folder: Path | None,
    stopwatch: Stopwatch,
    scores: dict[str, float],
    best: str | None,
    program: str,
    wall_seconds: float,
) -> None:
    """Write results.json and TensorBoard's graph and hyper-parameters into `folder`, and print the final table."""
    recipe, data, config = experiment.recipe, data_contract(experiment.data), experiment.settings.config
    parameters, trainable = count_parameters(recipe)[0], stopwatch.trainable
    flops = flops_per_sample(recipe)
    sizes = stopwatch.sizes | loader_sizes(test=trainer.test_dataloaders) | dict(data.sizes)
    rate = stopwatch.samples_per_second(sizes.get("train", 0))
    headline = recipe.headline(scores)
    speed = f", {rate:,.0f} samples/s" if rate else ""
    rows = {
        "data": ": ".join(filter(None, (data.title, ", ".join(f"{n:,} {part}" for part, n in sizes.items())))),
        "parameters": f"{parameters:,} ({trainable:,} trainable)",
        **({"FLOPs per sample": f"{_with_unit(flops)}, forward"} if flops is not None else {}),
        **headline,
        "training": f"{stopwatch.seconds:.1f} s{speed}; {wall_seconds:.1f} s in all",
    }
    if stopwatch.stopped_early:
        rows["stopped early"] = stopwatch.stopped_early
    if folder is not None and best:
        rows |= {
            "best checkpoint": shown(best),
        }
        if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            rows["TensorBoard"] = f"tensorboard --logdir {shown(folder.parent)}"
        example = f" {recipe.predict_example}" if takes_inputs(type(experiment.data)) else ""
        if example or is_overridden("predict_dataloader", experiment.data):
            rows["predict"] = f"{program} predict --ckpt {shown(best)}{example}"
    if folder is None:
        print_pairs(rows)
        return
    results: Any = {
        "scores": scores,
        "data": {"name": data.title, "sizes": sizes},
        "parameters": parameters,
        "trainable_parameters": trainable,
        "flops_per_sample": flops,
        "training_seconds": stopwatch.seconds,
        "validation_seconds": stopwatch.validation_seconds,
        "wall_seconds": wall_seconds,
        "samples_per_second": rate,
        "best_checkpoint": best,
        "stopped_early": stopwatch.stopped_early or None,
        "hardware": hardware(trainer),
        "versions": {
            "lightning-recipes": __version__,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "lightning": pl.__version__,
        },
        "headline": headline,
        "config": dict(config),
        "changed": list(experiment.settings.changed),
    }
    # Before anything is printed: a terminal may have gone.
    with best_effort(RESULTS):
        write_results(folder, results)
        if experiment.settings.run.report:
            with best_effort(REPORT):
                rows["report"] = shown(write_report(folder))
    # TensorBoard holds numbers and text only.
    plain = {k: v if isinstance(v, (int, float, str)) else json.dumps(v) for k, v in config.items()}
    final = {f"final/{name}": v for name, v in scores.items() if "_class_" not in name and math.isfinite(v)}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(plain, final)
            try:
                logger.log_graph(recipe)
            except Exception as error:  # Tracing may fail on the user's forward.
                print(f"TensorBoard shows no graph: {str(error).splitlines()[0]}", file=sys.stderr)  # noqa: T201
            logger.save()
    print_pairs(rows)


def report_unsaved(folder: Path | None, removed: bool) -> None:
    """Say at the end of a run what could not be written, in one line.

    Args:
        folder: of the run; None for one without.
        removed: whether the folder was removed while the run trained.

    Raises:
        RunFailedError: the results were not written, or the folder was removed.
    """
    lost = unsaved() | unwritten_streams()
    what = "; ".join(f"{name} ({reason})" for name, reason in lost.items())
    if removed:
        also = f"; not saved: {what}" if what else ""
        raise RunFailedError(
            f"the training is done, but {shown(folder or '')} was removed meanwhile and holds only what was written"
            f" after that{also}"
        )
    if RESULTS in lost:
        raise RunFailedError(f"the training is done and its weights are saved, but not: {what}")
    if lost:
        saved = f"; the weights and {RESULTS} are in {shown(folder)}" if folder else ""
        print_error(f"warning: not saved: {what}{saved}")
