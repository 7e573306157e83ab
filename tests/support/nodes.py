"""Command lines in fresh processes, as the shells of several nodes would start them, on loopback.

Like those of `tests.support.ranks` the processes are forked from a server that has imported everything; a process may
end in any way.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from recipes.runner import agent
from tests.support.ranks import context

__all__ = ["Ended", "Program", "Shell", "start"]


class Ended(NamedTuple):
    """What became of a process: its exit status (negative for a signal) and its output."""

    status: int
    out: str
    err: str


def _enter(env: dict[str, str], folder: str, name: str) -> None:
    """Make this process one of a folder, with these variables and its output in files."""
    os.chdir(folder)
    for stream, number in (("out", 1), ("err", 2)):
        file = os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(env)


def _run(args: list[str], env: dict[str, str], folder: str, name: str) -> None:
    os.setsid()
    _enter(env, folder, name)
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)
    sys.argv = args
    sys.path.insert(0, str(Path(args[0]).resolve().parent))
    runpy.run_path(args[0], run_name="__main__")


def _type(args: list[str], env: dict[str, str], folder: str, name: str) -> None:
    _enter(env, folder, name)
    if env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)
    else:
        os.environ.pop("OMP_NUM_THREADS")
    # This process has imported everything, like the server that an agent forks its workers from.
    agent.start_method = lambda: "fork"  # type: ignore[assignment]
    agent.start_fork_server = list  # type: ignore[assignment]
    # For the caller in each event of a rendezvous, torch would search all modules for the source, for seconds.
    dynamic_rendezvous.get_method_name = lambda: ""  # type: ignore[assignment]
    agent._SECONDS_TO_SAVE = float(env.get("SECONDS_TO_SAVE", 600))
    sys.argv = [str(Path(__file__).with_name("launch_recipe.py")), *args]
    runpy.run_path(sys.argv[0], run_name="__main__")


class Program:
    """A program that runs, on one thread and in a session of its own, as `python FILE ARGUMENTS` does.

    Everything that it imports has been imported.
    """

    target = staticmethod(_run)

    def __init__(self, folder: Path, name: str, args: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | dict(env or {})
        self.folder, self.name = folder, name
        self.process = context.Process(target=self.target, args=([*args], variables, str(folder), name))
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


class Shell(Program):
    """A command line that runs, on one thread; with an empty OMP_NUM_THREADS nobody has set a number."""

    target = staticmethod(_type)

    def __init__(self, folder: Path, name: str, args: Sequence[str], env: Mapping[str, str]) -> None:
        fit = ["--accelerator", "cpu", "--precision", "32", "--max-epochs", "2"]
        super().__init__(folder, name, [*args] if args[:1] == ["verify"] else [*fit, *args], env)


def start(folder: Path, each: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[Ended]:
    """Type a command line in each of several shells and wait for all of them."""
    shells = [Shell(folder, f"shell{i}", args, env) for i, (args, env) in enumerate(each)]
    return [shell.wait() for shell in shells]
