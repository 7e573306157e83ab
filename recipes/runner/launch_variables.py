"""Read the environment variables that Slurm, torchrun and users set for a process."""

import os
import sys
from collections.abc import Mapping

from datamodules.errors import UserError

_FIRST_PORT = 15000
_NUMBER_OF_PORTS = 17000  # Below the range of ephemeral ports, so that no outgoing connection has the port.
# Steps from this number on are the batch script, the shell of salloc, and processes that ssh has started.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def first_number(env: Mapping[str, str], *names: str) -> int:
    """Return the first of these variables that is a number, or 0."""
    for name in names:
        if env.get(name, "").isdigit():
            return int(env[name])
    return 0


def integer_of(env: Mapping[str, str], name: str) -> int | None:
    """Return an integer from an environment variable that the user may have set."""
    value = env.get(name, "").strip()
    if not value:
        return None
    if not value.isdigit():
        raise UserError(f"the environment says {name}={value}, which is not a whole number; unset or correct it")
    return int(value)


def slurm_port(env: Mapping[str, str]) -> int:
    """Return the port of a Slurm step, which all its processes compute from the numbers of the job and the step."""
    return _FIRST_PORT + (7 * first_number(env, "SLURM_JOB_ID") + first_number(env, "SLURM_STEP_ID")) % _NUMBER_OF_PORTS


def is_slurm_step(env: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as a task.

    A batch script, a shell of salloc or ``srun --pty bash``, and programs that a user starts in them, are not tasks.
    """
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= env.keys():
        return False
    if first_number(env, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return False
    # A program in the shell of an srun inherits the variables of the shell's step, and the shell's terminal. A task
    # that srun starts from this shell inherits SLURM_PTY_PORT, but not the terminal.
    in_terminal = env.get("SLURM_TASK_PID") != str(os.getpid()) and sys.stdin is not None and sys.stdin.isatty()
    return not ("SLURM_PTY_PORT" in env and in_terminal)
