"""Run the program in a worker process, which the agent has started, as torchrun would."""

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
"""The environment variable with the prefix of this start's keys in the agents' store; our agent sets it."""

STARTED_AT = "LIGHTNING_RECIPES_STARTED_AT"
"""The environment variable with the start time of the command, by `time.monotonic`."""


def is_worker(env: Mapping[str, str]) -> bool:
    """Return whether our agent has started this process."""
    return STORE_PREFIX in env


@dataclass
class Program:
    """The program that the workers run.

    Args:
        args: the program's `sys.argv`.
        module: the module, where the program was started by ``python -m``.
        path: the file, where the program was started by its file.
        variables: initial global variables of the program's module.
        environ: the environment variables of a worker, without those of its rank.
    """

    args: list[str]
    module: str | None
    path: str | None
    variables: dict[str, Any]
    environ: dict[str, str]

    @classmethod
    def of_this_process(cls) -> "Program | None":
        """Return the program of this process; None in an interpreter or a notebook."""
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        path = getattr(main, "__file__", None)
        if spec is None and path is None:
            return None
        variables = {"PROGRAM": vars(main)["PROGRAM"]} if "PROGRAM" in vars(main) else {}
        module = spec.name.removesuffix(".__main__") if spec else None
        return cls(list(sys.argv), module, str(Path(path).resolve()) if path else None, variables, dict(os.environ))


def work(program: Program) -> None:
    """Run the program as one rank of its run; torch's agent has set the variables of the rank.

    Raises:
        SystemExit: the program ended with a status other than 0.
    """
    rank_environ = dict(os.environ)
    # The fork server has the environment of its own start; the program needs that of the agent's command.
    os.environ.clear()
    os.environ.update(program.environ | {name: rank_environ[name] for name in rank_environ if _is_of_rank(name)})
    _end_with_agent()
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)  # The worker inherits from the fork server that they are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from datamodules.lightning import rank_zero_only

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
        # torch's agent takes every process that exits for a failed one, so status 0 has to become a return.
        if end.code not in (None, 0):
            raise


def _is_of_rank(name: str) -> bool:
    """Return whether torch's agent sets this variable for a worker."""
    prefixes = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
    return name.startswith(prefixes)


def _end_with_agent() -> None:
    """End this process when its agent has ended, whatever its main thread waits for."""
    agent = multiprocessing.parent_process()
    assert agent is not None

    def watch() -> None:
        agent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the agent").start()


def end_with_torchrun(env: Mapping[str, str]) -> None:
    """End this process when its torchrun has gone: the next torchrun's processes would train beside it."""
    if "TORCHELASTIC_RUN_ID" not in env or is_worker(env) or os.name == "nt":
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(3.0)  # At a regular end torchrun may exit before its processes.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch torchrun").start()
