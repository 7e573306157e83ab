"""Runs child processes that print a measurement as JSON in their last line.

Within one process, a measurement would depend on earlier imports and allocations.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "answer_of", "free_port", "run_module", "seconds_of"]

ROOT = Path(__file__).parents[2]


def _run(args: Sequence[str], env: dict[str, str]) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    # Importing Lightning has set this variable here. A process of a user starts without it.
    inherited.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    path = os.pathsep.join(folder for folder in (str(ROOT), os.environ.get("PYTHONPATH", "")) if folder)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", *args],
        env=inherited | {"PYTHONPATH": path} | env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if result.returncode:
        raise RuntimeError(f"{' '.join(args)[:200]} ended with status {result.returncode}:\n{result.stderr[-2000:]}")
    return result.stdout


def seconds_of(*args: str, **env: str) -> float:
    """Return the seconds that Python takes with these arguments, from start to end."""
    start = time.perf_counter()
    _run(args, env)
    return time.perf_counter() - start


def answer_of(*args: str, **env: str) -> Any:
    """Return the JSON in the last line that Python prints with these arguments."""
    return json.loads(_run(args, env).splitlines()[-1])


def run_module(module: str, *args: str, **env: str) -> None:
    """Run ``python -m module`` with these arguments, and wait for its end.

    Raises:
        RuntimeError: the module fails; the message has the end of its output.
    """
    _run(["-m", module, *args], env)


def free_port() -> int:
    """Return a free TCP port of this machine, below the ephemeral ports, which the system could give to others."""
    while True:
        port = random.SystemRandom().randrange(16000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
