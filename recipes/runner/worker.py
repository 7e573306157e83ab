"""A worker: a process that the agent has started, and that runs the program from its first line, as under torchrun."""

import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from callbacks.lib.signals import SIGNALS

STORE_PREFIX = "LIGHTNING_RECIPES_STORE_PREFIX"
"""The variable that tells the workers of a node agent of ours where in the agents' store this start of them meets."""

STARTED_AT = "LIGHTNING_RECIPES_STARTED_AT"
"""The variable with the time at which the command was started, by `time.monotonic`."""


def is_worker(env: Mapping[str, str]) -> bool:
    """Whether an agent of ours has started this process."""
    return STORE_PREFIX in env


@dataclass
class Program:
    """The program that the workers run.

    Args:
        args: its `sys.argv`.
        module: its name, where it was started by ``python -m``.
        path: its file, where it was started by that.
        variables: values that its module starts with.
        environ: the environment variables of a worker, without those of its rank.
    """

    args: list[str]
    module: str | None
    path: str | None
    variables: dict[str, Any]
    environ: dict[str, str]

    @classmethod
    def of_this_process(cls) -> "Program | None":
        """The program that this process runs; None where it is typed into an interpreter or a notebook."""
        main = sys.modules["__main__"]
        spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is None and path is None:
            return None
        named = {"PROGRAM": vars(main)["PROGRAM"]} if "PROGRAM" in vars(main) else {}
        module = spec.name.removesuffix(".__main__") if spec else None
        return cls(list(sys.argv), module, str(Path(path).resolve()) if path else None, named, dict(os.environ))


def work(program: Program) -> None:
    """Run the program as one rank of its run; torch's agent has set the variables of the rank.

    Raises:
        SystemExit: the program ended with a status other than 0.
    """
    of_rank = dict(os.environ)
    os.environ.clear()
    os.environ.update(program.environ | {name: of_rank[name] for name in of_rank if _is_of_rank(name)})
    _end_with_agent()
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)  # The fork server ignores them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only.rank = int(os.environ["RANK"])  # type: ignore[attr-defined]
    sys.argv = list(program.args)
    try:
        if program.module:
            runpy.run_module(program.module, program.variables, run_name="__main__", alter_sys=True)
        else:
            assert program.path is not None
            sys.path.insert(0, str(Path(program.path).parent))
            runpy.run_path(program.path, program.variables, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):  # The agent waits for a return, and takes a process that exits for a failed one.
            raise


def _is_of_rank(name: str) -> bool:
    """Whether torch's agent sets this variable for a worker."""
    prefixes = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
    return name.startswith(prefixes)


def _end_with_agent() -> None:
    """End this process when the agent that asked for it has ended, whatever its main thread waits for."""
    agent = multiprocessing.parent_process()
    assert agent is not None

    def watch() -> None:
        agent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the agent").start()


def end_with_torchrun(env: Mapping[str, str]) -> None:
    """End this process when the torchrun that has started it is gone: its successor's would train beside it."""
    if "TORCHELASTIC_RUN_ID" not in env or is_worker(env) or os.name == "nt":
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(3.0)  # In a regular end torchrun may be the first to exit.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch torchrun").start()
