"""All nodes have to share the run's folder: rank 0 writes checkpoints there, and all ranks read the best one."""

import secrets
import socket
import time
from pathlib import Path

import lightning.pytorch as pl
from typing_extensions import override

from callbacks.lib.exchange import broadcast, gather
from datamodules.errors import UserError

__all__ = ["SharedFolder"]

_MARK = ".seen-by-all"
_TIMEOUT = 5.0  # Seconds for a network file system.


def _sees(mark: Path, token: str) -> bool:
    deadline = time.monotonic() + _TIMEOUT
    while True:
        try:
            # NFS caches for a minute that a file does not exist, until its folder is listed.
            for parent in reversed(mark.parents[:3]):
                list(parent.iterdir())
            if mark.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


class SharedFolder(pl.Callback):
    """Refuses a run whose nodes do not share its folder; it would fail only after training.

    Runs on: `setup` of a training on several nodes.

    Args:
        folder: the folder of the run, as rank 0 has it.

    Raises:
        UserError: on all ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.num_nodes == 1:
            return
        token, folder = secrets.token_hex(8), str(self.folder)
        if trainer.is_global_zero:
            (self.folder / _MARK).write_text(token)
        token, folder = broadcast(trainer.strategy, (token, folder))
        seen = _sees(Path(folder) / _MARK, token)
        answers = gather(trainer.strategy, None if seen else (trainer.node_rank, socket.gethostname()))
        if trainer.is_global_zero:
            (self.folder / _MARK).unlink()
        if without := sorted({answer for answer in answers if answer}):
            nodes = ", ".join(f"node {number} ({host})" for number, host in without)
            raise UserError(
                f"the run's folder {folder} of node 0 is not the one that {nodes} sees there; pass a `run_dir` that all"
                " nodes share, such as one in the home folder of a cluster"
            )
