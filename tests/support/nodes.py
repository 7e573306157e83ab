"""Command lines in fresh processes, as the shells of several nodes would start them, on loopback.

Like those of `tests.support.ranks` the processes are forked from a server that has imported everything; a process may
end in any way.
"""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.runner import agent
from tests.support.ranks import context

__all__ = ["Ended", "Shell", "start"]


@dataclass(frozen=True)
class Ended:
    """What became of a process: its exit status (negative for a signal) and its output."""

    status: int
    out: str
    err: str


def _type(args: list[str], env: dict[str, str], folder: str, name: str) -> None:
    os.chdir(folder)
    for stream, number in (("out", 1), ("err", 2)):
        file = os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(env)
    if env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)
    else:
        os.environ.pop("OMP_NUM_THREADS")
    # This process has imported everything, like the server that an agent forks its workers from.
    agent.start_method = lambda: "fork"  # type: ignore[assignment]
    agent.start_fork_server = list  # type: ignore[assignment]
    agent._SECONDS_TO_SAVE = float(env.get("SECONDS_TO_SAVE", 600))
    sys.argv = [str(Path(__file__).with_name("launch_recipe.py")), *args]
    runpy.run_path(sys.argv[0], run_name="__main__")


class Shell:
    """A command line that runs, on one thread; with an empty OMP_NUM_THREADS nobody has set a number."""

    def __init__(self, folder: Path, name: str, args: Sequence[str], env: Mapping[str, str]) -> None:
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | dict(env)
        self.folder, self.name = folder, name
        fit = ["--accelerator", "cpu", "--precision", "32", "--max-epochs", "2"]
        arguments = [*args] if args[:1] == ["verify"] else [*fit, *args]
        self.process = context.Process(target=_type, args=(arguments, variables, str(folder), name))
        self.process.start()

    def read(self, stream: str) -> str:
        """What it has printed so far."""
        path = self.folder / f"{self.name}.{stream}"
        return path.read_text() if path.exists() else ""

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.process.terminate()

    def wait(self, timeout: float = 600.0) -> Ended:
        """Its end; past `timeout` seconds it is killed and the test fails."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"{self.name} did not end within {timeout} s:\n{self.read('out')}{self.read('err')}")
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, self.read("out"), self.read("err"))


def start(folder: Path, each: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[Ended]:
    """Type a command line in each of several shells and wait for all of them."""
    shells = [Shell(folder, f"shell{i}", args, env) for i, (args, env) in enumerate(each)]
    return [shell.wait() for shell in shells]
