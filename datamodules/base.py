"""Base class of all data modules: the data contract, and access to rank, world size and device of the Trainer.

Tested in `tests/datamodules/images/test_mnist.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from datamodules.contract import DataContract
from datamodules.lightning import pl
from datamodules.lightning_package import OneLightning
from datamodules.notes import inform


class Process(NamedTuple):
    """Process that reads batches: its rank, its device, and the number of processes on its machine."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    on_machine: int = 1


class BaseDataModule(OneLightning, pl.LightningDataModule, DataContract):
    """Base class of the data modules. Without a Trainer it acts as rank 0 of 1 on the CPU, for a plain PyTorch loop."""

    hparams: Any  # Lightning annotates a mapping; the object also has the values as attributes.

    def __init__(self) -> None:
        super().__init__()
        self._noted: set[str] = set()

    @property
    @override
    def seed(self) -> int:
        return int(self.hparams.seed)

    @property
    def _process(self) -> Process:
        trainer = self.trainer
        if trainer is None:
            return Process()
        device = trainer.strategy.root_device
        return Process(trainer.global_rank, trainer.world_size, device, max(1, trainer.num_devices))

    @property
    def _shuffles(self) -> bool:
        """Whether training batches are shuffled. ``overfit_batches`` turns it off, to repeat the same batches."""
        # Trainer sets this attribute in a helper, where mypy does not see it.
        return not getattr(self.trainer, "overfit_batches", 0)

    def _note(self, text: str, log: Callable[[str], None] = inform) -> None:
        """Log a text once: callbacks may build the same loader again."""
        if text not in self._noted:
            self._noted.add(text)
            log(text)
