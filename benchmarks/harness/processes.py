"""Child processes that print a measurement as JSON in their last line.

In one process, each measurement would include what an earlier import or allocation has left.
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
    # Importing Lightning in this process has set it; a user's process begins without.
    inherited.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *args],
        env=inherited | {"PYTHONPATH": path} | env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)[:200]} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def seconds_of(*args: str, **env: str) -> float:
    """Seconds that Python takes with these arguments, from start to end."""
    start = time.perf_counter()
    _run(args, env)
    return time.perf_counter() - start


def answer_of(*args: str, **env: str) -> Any:
    """The JSON in the last line that Python prints with these arguments."""
    return json.loads(_run(args, env).splitlines()[-1])


def run_module(module: str, *args: str, **env: str) -> None:
    """Run ``python -m module`` with these arguments to its end.

    Raises:
        RuntimeError: it fails; with the end of what it has written.
    """
    _run(["-m", module, *args], env)


def free_port() -> int:
    """A free TCP port of this machine, below those that the system gives to a socket that asks for any."""
    while True:
        port = random.SystemRandom().randrange(16000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
