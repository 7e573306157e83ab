"""torchrun's agents as the shells of several nodes would start them, on loopback, and ways to end them."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from datamodules.errors import UserError
from recipes.runner.saved_run import read_run

__all__ = [
    "Agent",
    "children_of",
    "is_fork_server",
    "shell_environment",
    "updates_done",
    "wait_until",
    "weights_of",
]

ROOT = Path(__file__).parents[2]


def shell_environment() -> dict[str, str]:
    """The variables of a shell in which the package is installed, with nothing that a launcher has set."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    with contextlib.suppress(FileNotFoundError):
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for file in files for child in file.read_text().split()]
    return []


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 600.0) -> None:
    """Wait for something that other processes bring about."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout:g} s")
        time.sleep(0.05)


def updates_done(checkpoint: Path) -> int:
    """The updates behind a checkpoint; 0 where there is none."""
    try:
        return read_run(checkpoint).updates
    except UserError:
        return 0


def weights_of(checkpoint: Path) -> str:
    """A hash of all tensors of the model in a checkpoint."""
    sha256 = hashlib.sha256()
    for key, tensor in torch.load(checkpoint, weights_only=True)["state_dict"].items():
        sha256.update(key.encode() + tensor.numpy().tobytes())
    return sha256.hexdigest()


def is_fork_server(pid: int) -> bool:
    """Whether a process is the one that an agent of ours forks its workers from."""
    with contextlib.suppress(OSError):
        return b"recipes.runner.start" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class Agent:
    """One node's agent, ours or torchrun, with its output in a file.

    Args:
        folder: where it runs.
        name: of its file of output.
        args: the command.
        env: variables in addition to those of a shell.
    """

    def __init__(self, folder: Path, name: str, args: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.name, self.path = name, folder / f"{name}.log"
        with self.path.open("w") as file:
            self.process = subprocess.Popen(
                list(args),
                cwd=folder,
                env=shell_environment() | dict(env or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        """What it and its workers have printed so far."""
        return self.path.read_text()

    def workers(self) -> list[int]:
        """The processes of the run that it has started, or that its fork server has forked for it."""
        children = children_of(self.process.pid)
        forked = [pid for child in children if is_fork_server(child) for pid in children_of(child)]
        return forked or children

    def kill(self) -> None:
        """Kill -9 to it and to its workers at once, as when a node loses its power."""
        self.process.send_signal(signal.SIGSTOP)
        for pid in [*self.workers(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(300)

    def wait(self, timeout: float = 600.0) -> int:
        """Its exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout:g} s:\n{self.output()[-4000:]}") from None
