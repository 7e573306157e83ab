"""The same command line, typed again after each interruption, ends with the bits of the run that was never stopped."""

import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from tests.support.agents import weights_of
from tests.support.ranks import run_ranks

ARGS = ["--dataset", "digits", "--max-epochs", "3", "--batch-size", "128", "--accelerator", "cpu", "--precision", "32"]
ARGS += ["--accumulate", "2", "--save-every", "2 steps", "--val-check-interval", "2", "--no-enable-progress-bar"]
AUTO = ["--name", "run", "--resume", "auto"]


class Killer(pl.Callback):
    """Ends its process without notice at the n-th call of a hook in an epoch, once all ranks are there."""

    def __init__(self, hook: str, epoch: int, number: int) -> None:
        self.epoch, self.left = epoch, number
        if hook:
            setattr(self, hook, self._count)

    def _count(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.current_epoch == self.epoch and not trainer.sanity_checking:
            self.left -= 1
            if self.left < 0:
                trainer.strategy.barrier()
                time.sleep(0.05)  # The barrier's last message is to leave this process before it ends.
                os.kill(os.getpid(), signal.SIGKILL)


class Witness(pl.Callback):
    """Writes down where each life began: the epoch and the update."""

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and not hasattr(self, "began"):
            self.began = trainer.current_epoch, batch_idx
            with Path("began").open("a") as file:
                file.write(f"{self.began}\n")


def live(args: list[str], folder: str, dies: tuple[str, int, int] = ("", 0, 0)) -> str:
    """What one life of the command line prints, in a fresh process."""
    from datamodules import MNISTDataModule
    from recipes import run
    from tests.support.plain_recipe import Plain

    # As in a process that a launcher starts; this one imported Lightning before it had a rank.
    rank_zero_only.rank = int(os.environ.get("RANK", "0"))
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(Plain, MNISTDataModule, callbacks=lambda: [Killer(*dies), Witness()], args=args)
    return out.getvalue()


def last_weights(folder: Path) -> str:
    return weights_of(folder / "runs/plain/run/checkpoints/last.ckpt")


def ranked(world_size: int) -> list[str]:
    return [*ARGS, *AUTO, "--devices", str(world_size), *(["--strategy", "ddp"] if world_size > 1 else [])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    """The weights of the run that was never stopped, on one device."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(live, 1, ranked(1), str(folder))
    return last_weights(folder)


LIVES = {
    "within an epoch": [("on_train_batch_end", 0, 3), ("on_train_batch_end", 1, 3)],
    # The second validation of an epoch: the update before a validation is saved after it.
    "elsewhere": [
        *[("on_validation_batch_start", 0, 1), ("on_train_epoch_end", 0, 0), ("on_validation_end", 1, 1)],
        *[("on_train_epoch_start", 2, 0), ("on_train_batch_end", 2, 3), ("on_train_end", 3, 0)],
        ("on_test_batch_start", 3, 0),
    ],
}


@pytest.mark.parametrize("where", ["within an epoch", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_the_same_command_line_resumes_after_kill_9(where, whole, tmp_path):
    for dies in LIVES[where]:
        with pytest.raises(AssertionError, match="died with exit status -9"):
            run_ranks(live, 1, ranked(1), str(tmp_path), dies)
    run_ranks(live, 1, ranked(1), str(tmp_path))
    assert last_weights(tmp_path) == whole
    assert (tmp_path / "runs" / "plain" / "run" / "results.json").is_file()
    assert [folder.name for folder in (tmp_path / "runs" / "plain").iterdir()] == ["run"]
    began = (tmp_path / "began").read_text().split("\n")
    assert began.count("(0, 0)") == 1, "no life began anew"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "devices"),
    [([], (1, 2, 1)), (["--accumulate", "1", "--global-batch-size", "256"], (2, 1, 2))],
    ids=["accumulated", "global batch"],
)
def test_a_killed_run_resumes_with_equal_bits_on_other_devices(size, devices, whole, tmp_path):
    for number, dies in zip(devices, (("on_train_batch_start", 1, 3), ("on_train_batch_start", 2, 1)), strict=False):
        with pytest.raises(AssertionError, match="died with exit status -9"):
            run_ranks(live, number, [*ranked(number), *size], str(tmp_path), dies)
    out = run_ranks(live, devices[2], [*ranked(devices[2]), *size], str(tmp_path))[0]
    assert f"devices: {devices[1]} before, {devices[2]} now; the updates and their order stay" in out
    assert f"global batch 256 = 2 micro-batches of 128 on {devices[2]} device" in out
    assert last_weights(tmp_path) == whole
