"""A recipe that can fail in every way on one rank, and data that count how often they are prepared."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import torch

from datamodules import DataContract, UserError
from recipes import run
from tests.support.minimal_recipe import Line, Points


class FailingLine(Line):
    """A straight line.

    Args:
        fail_rank: the rank that fails in the second update of an epoch.
        fail_how: by an exception, kill -9, Ctrl-C to it alone, kill -STOP or waiting for ever.
        fail_until: fails in the first so many starts of torchrun only.
    """

    title = "failing"

    def __init__(
        self,
        fail_rank: int | None = None,
        fail_how: Literal["raise", "kill", "interrupt", "stop", "wait"] = "raise",
        fail_until: int = 1000,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        starts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if batch_idx == 1 and self.global_rank == self.hparams.fail_rank and starts < self.hparams.fail_until:
            how = self.hparams.fail_how
            if how == "raise":
                raise ValueError("a bad pixel\nin the corner")
            Path("failing").touch()
            if how == "wait":
                time.sleep(1000)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(how, signal.SIGINT))
        return super().training_step(batch, batch_idx)


class CountedPoints(Points, DataContract):
    """Points that each node prepares for itself, and that fail where they are prepared twice.

    Args:
        curve: what they lie on; "auto" is found out on rank 0.
    """

    def __init__(self, curve: str | None = "auto", broken_rank: int | None = None) -> None:
        super().__init__(broken_rank)
        self.curve = curve

    def resolve(self) -> dict[str, Any]:
        assert os.environ.get("RANK", "0") == "0", "rank 0 decides"
        if Path("no-curve").exists():
            raise UserError("there is no curve")
        return {"curve": "line"}

    def prepare_data(self) -> None:
        node, start = os.environ.get("NODE_RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        Path(f"prepared-on-{node}-{start}").open("x").close()


if __name__ == "__main__":
    run(FailingLine, CountedPoints)
