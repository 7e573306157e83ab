"""``results.json``: what a run has reached, with what, and how long it took; and what measures that."""

import contextlib
import csv
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from typing_extensions import override

from callbacks.lib.writing import atomic_write
from datamodules.errors import UserError
from recipes.version import __version__

RESULTS = "results.json"

# Files that are complete, or as they were before.

_ERRORS = "surrogateescape"  # A file's name in another encoding is written as its bytes.


def write_text(path: Path, text: str) -> None:
    """Write a file of text.

    Raises:
        OSError: the file is as it was before.
    """
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8", errors=_ERRORS)


def write_rows(
    path: Path, rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], columns: Sequence[str] | None = None
) -> None:
    """Write JSON, CSV, or the first column as lines of text, by the file's suffix.

    Args:
        columns: of a CSV or text file; by default the keys of the first row.

    Raises:
        OSError: the file is as it was before.
    """
    table = [rows] if isinstance(rows, Mapping) else rows
    if path.suffix == ".txt" and columns:
        # A line for each row, whatever its text holds: other programs compare the files line by line.
        write_text(path, "".join(" ".join(str(row[columns[0]]).split("\n")) + "\n" for row in table))
        return
    if path.suffix != ".csv":
        write_text(path, json.dumps(rows, indent=2, ensure_ascii=False, default=str) + "\n")
        return
    with atomic_write(path) as part, part.open("w", newline="", encoding="utf-8", errors=_ERRORS) as file:
        writer = csv.DictWriter(file, fieldnames=columns or list(table[0]))
        writer.writeheader()
        writer.writerows(table)


# results.json


def read_results(folder: Path) -> dict[str, Any]:
    """The results of a finished run.

    Raises:
        UserError: the folder has none, since the run has not finished or it is none of a run; or the file is damaged.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise UserError(f"there is no {path}: expected the folder of a run that has finished")
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("scores"), dict):
        raise UserError(f"{path} holds no results of a run: expected an object with an entry scores")
    return found


# Where a run comes from


def _device(trainer: pl.Trainer) -> str:
    """The kind of the devices."""
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {device.type}"


def hardware(trainer: pl.Trainer) -> str:
    """The kind and number of the devices, and the threads of each process where they compute."""
    threads = torch.get_num_threads()
    on_cpu = f" with {threads} thread{'s' if threads > 1 else ''}"
    return f"{trainer.world_size} x {_device(trainer)}{on_cpu if trainer.strategy.root_device.type != 'cuda' else ''}"


def _processor() -> str:
    """The model of the CPU and the instructions that torch uses of it."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # Not on Linux.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"


def environment(trainer: pl.Trainer) -> dict[str, Any]:
    """What may change the bits of a run that is trained again or resumed, and how it was split, which does not."""
    return {
        "device": _device(trainer),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        **{name: version for name, version in versions().items() if name != "python"},
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
    }


def differences(before: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What may change the bits and differs between two values of `environment`, in words; empty where nothing does."""
    return "; ".join(
        f"{name} {value}, and {before[name]} in the run"
        for name, value in here.items()
        if name not in ("devices", "num_nodes") and before.get(name, value) != value
    )


def versions() -> dict[str, str]:
    """The versions of this package, Python, torch and Lightning; with a GPU those of CUDA or ROCm, cuDNN and NCCL."""
    found: dict[str, Any] = {
        "lightning-recipes": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "lightning": pl.__version__,
    }
    if torch.cuda.is_available():
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        found |= {"cuda": torch.version.cuda, "rocm": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
        found["nccl"] = ".".join(map(str, nccl))
    return {name: str(version) for name, version in found.items() if version}


# What a run measures of itself


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


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """The number of all parameters, and of those that require a gradient."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)


def process_age() -> float:
    """Seconds since this process was started."""
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that this process has held: of tensors on its GPU, or of the host's memory, as Linux tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    # The peak of getrusage begins at the memory of the process that started this one.
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


class Stopwatch(pl.Callback):
    """Measures the seconds of start-up and of training, the epochs trained, and the parameters that trained.

    `sizes` holds the samples of the parts that the loaders of the training tell.

    Args:
        started_at: `time.monotonic` when the program was started.
    """

    def __init__(self, started_at: float) -> None:
        self.epochs = 0.0
        self.trainable = 0
        self.sizes: dict[str, int] = {}
        self._first_batch = 0
        self._started_at = self._train_start = started_at
        self._train_seconds = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_batch = trainer.fit_loop.total_batch_idx
        self._train_start = time.monotonic()
        self._train_seconds -= self._train_start

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._train_seconds += time.monotonic()
        # Here, since frozen layers are unfrozen when the run has ended.
        self.trainable = count_parameters(pl_module)[1]
        batches = trainer.fit_loop.total_batch_idx - self._first_batch
        loader: Any = trainer.train_dataloader
        # An evaluation that follows replaces them.
        self.sizes = loader_sizes(train=loader, val=trainer.val_dataloaders)
        # In full epochs: limit_train_batches shortens them.
        with contextlib.suppress(TypeError):  # Without length, as of an iterable.
            self.epochs = batches / max(1, len(loader))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._train_seconds += time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._train_seconds -= time.monotonic()

    def seconds(self) -> dict[str, float]:
        """Seconds from the start of the program to that of the training, of training without validation, and in all."""
        total = time.monotonic() - self._started_at
        parts = {"start_up": self._train_start - self._started_at, "train": self._train_seconds, "total": total}
        return {name: round(value, 6) for name, value in parts.items()}
