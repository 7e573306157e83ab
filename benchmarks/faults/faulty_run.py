"""The MNIST recipe on the bundled digits with a fault in it, which `benchmarks.faults.battery` starts.

The variable FAULT names what happens, when and on which rank, as JSON; the fields of `Fault` are its names.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from typing_extensions import override

from datamodules import MNISTDataModule
from recipes import MNISTClassifier, run

__all__ = ["Fault", "Faulty"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Args:
        folder: where the run writes what it has done (``updates``) and when the fault was injected (``injected``).
        kind: a key of `KINDS`, worker, or nothing.
        moment: update, step, validation, save, epoch or start.
        at: the update that it happens after.
        rank: which one it happens to; -1 is every one.
        pause: seconds between updates, so that signals from outside arrive in the middle.
    """

    folder: str
    kind: str = "nothing"
    moment: str = "update"
    at: int = 0
    rank: int = -1
    pause: float = 0.0


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _send(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


def _raise() -> None:
    raise RuntimeError("this step is broken")


def _exhaust_memory() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def _limit_files() -> None:
    """Files beyond a thousand bytes cannot be written, as on a disk that is full; until `_lift_limit`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _lift_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


KINDS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "term": _send(signal.SIGTERM),
    "usr1": _send(signal.SIGUSR1),
    "int": _send(signal.SIGINT),
    "stop": _send(signal.SIGSTOP),
    "raise": _raise,
    "memory": _exhaust_memory,
    "disk": _limit_files,
    "parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
}


class Faulty(pl.Callback):
    """Brings a fault about, and writes down how far the run had come."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.folder = fault, Path(fault.folder)

    def _mark(self, name: str, text: str) -> None:
        beside = self.folder / f"{name}.{os.getpid()}"
        beside.write_text(text)
        beside.replace(self.folder / name)

    def _inject(self, trainer: pl.Trainer, module: pl.LightningModule, moment: str, at: int | None = None) -> None:
        fault = self.fault
        hit = fault.rank in (-1, trainer.global_rank) and fault.moment == moment
        if fault.kind in ("nothing", "worker") or not hit or (fault.at if at is None else at) != fault.at:
            return
        if trainer.global_step < fault.at or (self.folder / "injected").exists():
            return
        self._mark("injected", str(time.time()))
        if fault.kind == "nan":
            next(module.parameters()).data.fill_(float("nan"))
        elif moment == "save" and fault.kind == "kill":
            threading.Thread(target=self._kill_while_writing, daemon=True).start()
        else:
            KINDS[fault.kind]()

    def _kill_while_writing(self) -> None:
        checkpoints = self.folder / "runs" / "mnist"
        while not any(checkpoints.glob("*/checkpoints/.*.part")):
            pass
        _kill()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._inject(trainer, pl_module, "start")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._inject(trainer, pl_module, "step", trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero:
            self._mark("updates", str(trainer.global_step))
        if self.fault.kind == "disk" and trainer.global_step > self.fault.at:
            _lift_limit()
        time.sleep(self.fault.pause)
        self._inject(trainer, pl_module, "update", trainer.global_step)

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self._inject(trainer, pl_module, "validation")

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._inject(trainer, pl_module, "save")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._inject(trainer, pl_module, "epoch")


class _Broken(Dataset[Any]):
    """Images that cannot be read in a worker."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None and index > 40:
            raise OSError(f"image {index} cannot be read")
        return torch.zeros(1, 28, 28), 0


class _BrokenWorker(MNISTDataModule):
    """Loads in a worker, which fails."""

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(_Broken(256), batch_size=16, num_workers=1)


def main() -> None:
    """Run the recipe with the fault of the environment."""
    fault = Fault(**json.loads(os.environ["FAULT"]))
    run(MNISTClassifier, _BrokenWorker if fault.kind == "worker" else MNISTDataModule, lambda: [Faulty(fault)])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
