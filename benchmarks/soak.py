"""What a long run uses up: ``python -m benchmarks.soak --seconds 3600``.

Trains epochs of four updates of the ResNet recipe (a thin network, the bundled digits) in one process for an hour: with
workers that load, validation, curves in TensorBoard and a checkpoint in each epoch, and images in every fiftieth. After
each epoch it counts what the process holds and what lies in the run's folder, and at the end it compares the first
tenth of the epochs with the last. The exit status is 1 if something grew.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import lightning.pytorch as pl
import psutil
from rich import box
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from benchmarks.harness.tiny_recipes import TINY_RECIPES
from callbacks.drawing.evaluation_samples import EvaluationSamples
from callbacks.lib.trainer_attributes import callbacks_of
from recipes import run

__all__ = ["QUANTITIES", "Quantity", "Sample", "Sampler", "growth", "main"]

_FEWEST = 3  # Epochs, where the start has taken all the time.
_WARM_UP = 5  # Epochs in which caches are filled and libraries loaded.
_DRAW_EVERY = 50


@dataclass(frozen=True)
class Sample:
    """What a process holds after an epoch; `children` and descriptors are those of this process.

    Args:
        memory: resident, of this process, in bytes.
        worker_memory: of its children, in bytes: their proportional share where pages are shared.
        files: in the run's folder.
        checkpoints: bytes of the checkpoints.
        logs: bytes of all other files, which grow with each epoch that is logged.
        wall: seconds of the epoch.
        cpu: seconds of the processor in it, of this process and of its children.
    """

    memory: int
    worker_memory: int
    descriptors: int
    threads: int
    children: int
    files: int
    checkpoints: int
    logs: int
    wall: float
    cpu: float


@dataclass(frozen=True)
class Quantity:
    """A field of `Sample`, and how much it may differ between the first and the last tenth.

    Args:
        share: the tolerance relative to the first tenth.
        more: the tolerance in the quantity's unit.
        judged: False where growth is expected, or due to others.
        scale: from the field's unit to the one that is printed.
    """

    name: str
    unit: str
    share: float = 0.0
    more: float = 0.0
    judged: bool = True
    scale: float = 1.0


QUANTITIES = {
    "memory": Quantity("memory", "MB", 0.02, 8e6, scale=1e-6),
    "worker_memory": Quantity("memory of workers", "MB", 0.02, 8e6, scale=1e-6),
    "descriptors": Quantity("open descriptors", ""),
    "threads": Quantity("threads", ""),
    "children": Quantity("child processes", ""),
    "files": Quantity("files in the run's folder", ""),
    "checkpoints": Quantity("checkpoints", "kB", 0.01, scale=1e-3),
    "logs": Quantity("logs and curves", "kB", judged=False, scale=1e-3),
    "cpu": Quantity("processor time of an epoch", "ms", 0.05, scale=1e3),
    "wall": Quantity("duration of an epoch", "ms", judged=False, scale=1e3),
}
"""What is compared, by field. The duration depends on what else the machine does, and is only printed."""


def _folder_sizes(folder: Path) -> tuple[int, int, int]:
    """Files, bytes of checkpoints, and bytes of the others."""
    sizes = [(path.suffix == ".ckpt", path.stat().st_size) for path in folder.rglob("*") if path.is_file()]
    checkpoints = sum(size for saved, size in sizes if saved)
    return len(sizes), checkpoints, sum(size for _, size in sizes) - checkpoints


class Sampler(pl.Callback):
    """Counts after each epoch what the process holds, and ends the run after some time and a few epochs.

    Args:
        samples: the list that they are added to.
    """

    def __init__(self, samples: list[Sample], seconds: float) -> None:
        self.samples, self._process = samples, psutil.Process()
        self._end = time.monotonic() + seconds
        self._began = self._now()

    def _now(self) -> tuple[float, float]:
        times = [self._process.cpu_times(), *(child.cpu_times() for child in self._process.children())]
        waited = times[0].children_user + times[0].children_system
        return time.monotonic(), waited + sum(one.user + one.system for one in times)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        now, process = self._now(), self._process
        if trainer.current_epoch:  # The epoch before this one has ended, with its checkpoint.
            children = process.children()
            self.samples.append(
                Sample(
                    process.memory_info().rss,
                    sum(child.memory_full_info().pss for child in children),
                    process.num_fds(),
                    process.num_threads(),
                    len(children),
                    *_folder_sizes(Path(trainer.default_root_dir)),
                    now[0] - self._began[0],
                    now[1] - self._began[1],
                )
            )
        if trainer.current_epoch % _DRAW_EVERY == 1:
            for callback in callbacks_of(trainer):
                if isinstance(callback, EvaluationSamples):
                    callback.on_train_end(trainer, pl_module)  # Once a run is too seldom here.
        if now[0] > self._end and len(self.samples) >= _FEWEST:
            trainer.should_stop = True
        self._began = self._now()


def _ends(samples: Sequence[Sample], field: str) -> tuple[float, float]:
    """The medians of the first and of the last tenth, after the warm-up."""
    values = [float(getattr(sample, field)) for sample in samples[_WARM_UP:] or samples]
    tenth = max(1, len(values) // 10)
    return median(values[:tenth]), median(values[-tenth:])


def growth(samples: Sequence[Sample]) -> list[str]:
    """The names of what grew beyond its tolerance.

    Example:
        >>> flat = Sample(*[10**8] * 2, *[7] * 4, *[10**6] * 2, *[0.1] * 2)
        >>> growth([flat] * 40)
        []
        >>> growth([flat] * 20 + [Sample(**asdict(flat) | {"descriptors": 8})] * 20)
        ['open descriptors']
    """
    grown = []
    for field, quantity in QUANTITIES.items():
        first, last = _ends(samples, field)
        if quantity.judged and last - first > first * quantity.share + quantity.more:
            grown.append(quantity.name)
    return grown


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(samples: Sequence[Sample]) -> Table:
    table = Table("", "first tenth", "last tenth", "change", "least", "most", box=box.MARKDOWN)
    for field, quantity in QUANTITIES.items():
        first, last = _ends(samples, field)
        values = [getattr(sample, field) for sample in samples[_WARM_UP:] or samples]
        numbers = [_figure(value * quantity.scale) for value in (first, last, last - first, min(values), max(values))]
        numbers[2] = "+" * (last > first) + numbers[2]
        table.add_row(f"{quantity.name}{', ' if quantity.unit else ''}{quantity.unit}", *numbers)
    return table


def _flags(folder: Path) -> list[str]:
    return [
        # Smaller images are held in memory, and no worker is needed.
        *(*TINY_RECIPES["resnet"].flags, "--image-size", "64", "--batch-size", "16"),
        *("--limit-train-batches", "4", "--limit-val-batches", "2", "--num-workers", "1", "--log-every-n-steps", "2"),
        *("--max-epochs", "10000000", "--schedule", "constant", "--accelerator", "cpu", "--precision", "32-true"),
        *("--enable-progress-bar", "false", "--run-dir", str(folder), "--name", "soak"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the table, and return 1 if something grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600, metavar="N", help="of training (default: an hour)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the sample of every epoch there")
    args = parser.parse_args(argv)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        run(*TINY_RECIPES["resnet"].classes(), lambda: [Sampler(samples, args.seconds)], _flags(Path(folder)))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(sample) for sample in samples]), encoding="utf-8")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(f"{len(samples):,} epochs in {sum(sample.wall for sample in samples):,.0f} s, {os.cpu_count()} cores")
    console.print(_table(samples))
    grown = growth(samples)
    console.print(f"[red]grew: {', '.join(grown)}" if grown else "nothing grew")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
