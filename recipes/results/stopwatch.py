"""What a run measures of itself while it trains: seconds by part, samples, parameters and memory."""

import contextlib
import time
from collections.abc import Mapping, Sized
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from callbacks.lib.part_timer import PartTimer
from datamodules.contract import DataContract
from recipes.results.results_file import PARTS

__all__ = [
    "SampleCounter",
    "Stopwatch",
    "count_parameters",
    "loader_sizes",
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


def _with_total(seconds: Mapping[str, float]) -> dict[str, float]:
    rounded = {part: round(seconds.get(part, 0.0), 6) for part in PARTS}
    return {**rounded, "total": round(sum(rounded.values()), 6)}


class Stopwatch(PartTimer, pl.Callback):
    """Measures the seconds of each of `PARTS`, the epochs trained, and the parameters that trained.

    `started` is True from the first epoch on, unless it ended before an update was made. `sizes` holds the samples of
    the parts that the loaders tell and the data module does not have to. Checkpoints hold the seconds up to them.

    Args:
        started_at: `time.monotonic` when the program was started.
    """

    def __init__(self, started_at: float | None = None) -> None:
        super().__init__("start_up", started_at)
        self.epochs = 0.0
        self.trainable = 0
        self.sizes: dict[str, int] = {}
        self.started = False
        self._first_batch = self._first_update = 0
        self._earlier: dict[str, float] = {}

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        now = self.seconds()
        seconds = {part: now.get(part, 0.0) + self._earlier.get(part, 0.0) for part in PARTS}
        checkpoint["stopwatch"] = {"seconds": seconds, "trainable": self.trainable}

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit" and (saved := checkpoint.get("stopwatch")):
            self._earlier = {part: float(saved["seconds"][part]) for part in PARTS}
            self.trainable = int(saved["trainable"])

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            untyped: Any = trainer
            # All callbacks save through it, and it gathers the state of all ranks before it writes.
            untyped.save_checkpoint = self.timed("save")(trainer.save_checkpoint)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            del trainer.save_checkpoint

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_batch, self._first_update = trainer.fit_loop.total_batch_idx, trainer.global_step
        # Here, since frozen layers are unfrozen when the run has ended.
        self.trainable = count_parameters(pl_module)[1]
        self.replace_first("other")
        self.begin("train")

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = True

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit" and trainer.global_step == self._first_update:
            self.started = False

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.end()
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
            self.begin("validate")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.end()

    def by_part(self) -> dict[str, float]:
        """Seconds of each part since the program was started, and their sum under ``"total"``."""
        return _with_total(self.seconds())

    def earlier_by_part(self) -> dict[str, float] | None:
        """The same of the earlier starts of a resumed run, up to the checkpoint it was resumed from; None without."""
        return _with_total(self._earlier) if self._earlier else None

    def samples_per_second(self, samples_per_epoch: int) -> float:
        """Training samples of all devices per second of training, without validation, saving and drawing."""
        return self._samples(samples_per_epoch) / max(1e-9, self.seconds().get("train", 0.0))

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
