"""What a run measures of itself while it trains: seconds, samples and parameters."""

import contextlib
import sys
import time
from collections.abc import Sized
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from datamodules.contract import DataContract

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = [
    "SampleCounter",
    "Stopwatch",
    "count_parameters",
    "loader_sizes",
    "peak_memory",
    "process_age",
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


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """The number of all parameters, and of those that require a gradient."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)


def process_age() -> float:
    """Seconds since this process was started."""
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of tensors on its GPU, or of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    most = _peak_of_linux() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _peak_of_linux() -> int | None:
    """In kB. Linux starts the peak of `getrusage` at the memory of the process that started this one."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


class Stopwatch(pl.Callback):
    """Measures the seconds of start-up and of training, the epochs trained, and the parameters that trained.

    `started` is True from the first epoch on, unless it ended before an update was made. `sizes` holds the samples of
    the parts that the loaders tell and the data module does not have to.

    Args:
        started_at: `time.monotonic` when the program was started.
    """

    def __init__(self, started_at: float | None = None) -> None:
        self.epochs = 0.0
        self.trainable = 0
        self.sizes: dict[str, int] = {}
        self.started = False
        self._first_batch = self._first_update = 0
        self._started_at = self._train_start = time.monotonic() if started_at is None else started_at
        self._train_seconds = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_batch, self._first_update = trainer.fit_loop.total_batch_idx, trainer.global_step
        # Here, since frozen layers are unfrozen when the run has ended.
        self.trainable = count_parameters(pl_module)[1]
        self._train_start = time.monotonic()
        self._train_seconds -= self._train_start

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = True

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit" and trainer.global_step == self._first_update:
            self.started = False

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._train_seconds += time.monotonic()
        self.trainable = count_parameters(pl_module)[1]
        batches = trainer.fit_loop.total_batch_idx - self._first_batch
        loader: Any = trainer.train_dataloader
        # In full epochs: limit_train_batches shortens them.
        with contextlib.suppress(TypeError):  # Without length, as of an iterable.
            self.epochs = batches / max(1, len(loader))

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # With max_epochs=0 nothing has trained, and these would have.
        self.trainable = self.trainable or count_parameters(pl_module)[1]

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
        parts = {
            "start_up": self._train_start - self._started_at,
            "train": self._train_seconds,
            "total": time.monotonic() - self._started_at,
        }
        return {name: round(value, 6) for name, value in parts.items()}

    def samples_per_second(self, samples_per_epoch: int) -> float:
        """Training samples of all devices per second of training, without validation."""
        return self._samples(samples_per_epoch) / max(1e-9, self._train_seconds)

    def _samples(self, samples_per_epoch: int) -> float:
        return self.epochs * samples_per_epoch


class SampleCounter(Stopwatch):
    """Counts the samples of all ranks batch by batch, for a data module that does not tell how many there are."""

    def __init__(self, started_at: float | None = None) -> None:
        super().__init__(started_at)
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


def stopwatch_for(data: pl.LightningDataModule, started_at: float) -> Stopwatch:
    """A stopwatch that counts samples itself where the data module is none of `DataContract`."""
    return (Stopwatch if DataContract in type(data).__mro__ else SampleCounter)(started_at)
