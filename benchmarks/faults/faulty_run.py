"""A tiny run of a recipe with a fault in it, which `benchmarks.faults.battery` starts.

The variable FAULT names the recipe, and what happens, when and on which rank, as JSON: the fields of `Fault`.
"""

import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.cli.quick_imports import quick_imports

with quick_imports():
    import lightning.pytorch as pl
    import psutil
    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info
    from typing_extensions import override

    from benchmarks.harness.tiny_recipes import TINY_RECIPES
    from recipes import run

__all__ = ["Fault", "Faulty"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Args:
        folder: where the run writes what it has done (``updates``) and when the fault was injected (``injected``).
        recipe: a key of `TINY_RECIPES`.
        kind: a key of `KINDS`, worker, nan, remove folder, or nothing.
        moment: update, step, validation, save, epoch or start.
        at: the update that it happens after.
        lasting: updates after which a full disk has room again.
        rank: which one it happens to; -1 is every one.
        pause: seconds between updates, so that signals from outside arrive in the middle.
    """

    folder: str
    recipe: str = "mnist"
    kind: str = "nothing"
    moment: str = "update"
    at: int = 0
    lasting: int = 1
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


def _kill_workers() -> None:
    for child in psutil.Process().children():
        child.kill()


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
    "kill workers": _kill_workers,
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
        elif fault.kind == "remove folder":
            shutil.rmtree(trainer.default_root_dir)
        elif moment == "save" and fault.kind == "kill":
            threading.Thread(target=self._kill_while_writing, daemon=True).start()
        else:
            KINDS[fault.kind]()

    def _kill_while_writing(self) -> None:
        while not any(self.folder.glob("runs/*/*/checkpoints/.*.part")):
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
        if self.fault.kind == "disk" and trainer.global_step >= self.fault.at + self.fault.lasting:
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
    """Samples that cannot be read in a worker."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        assert get_worker_info() is not None
        self.mark.write_text(str(time.time()))
        raise OSError(f"sample {index} cannot be read")


def _with_broken_worker(data_class: type[pl.LightningDataModule], mark: Path) -> type[pl.LightningDataModule]:
    """A data module that loads in a worker, which fails."""

    class BrokenWorker(data_class):  # type: ignore[misc, valid-type]
        @override
        def train_dataloader(self) -> Any:
            return DataLoader(_Broken(mark), batch_size=16, num_workers=1)

    return BrokenWorker


def main() -> None:
    """Run the recipe with the fault of the environment."""
    fault = Fault(**json.loads(os.environ["FAULT"]))
    recipe_class, data_class = TINY_RECIPES[fault.recipe].classes()
    if fault.kind == "worker":
        data_class = _with_broken_worker(data_class, Path(fault.folder) / "injected")
    run(recipe_class, data_class, lambda: [Faulty(fault)])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
