"""Environment variables with which torchrun, Slurm, a script or our agent describes this process.

Two files of the package read such variables: this file, and `launch.py`, which plans with the ranks and sizes. Slurm's
variables of a job are read in `callbacks.lib.signals`, which requeues the job. This module is imported before torch, so
it imports neither torch nor Lightning.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence

from callbacks.lib.signals import is_batch_job
from datamodules.errors import UserError, spelled

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
_OF_A_WORKER = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
# Steps with this number or a higher number are the batch script, the shell of salloc, and processes started by ssh.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def without_local_rank(args: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the arguments without ``--local-rank``, which ``python -m torch.distributed.launch`` adds."""
    rank = env.get("LOCAL_RANK")
    return [arg for arg in args if arg not in (f"--local-rank={rank}", f"--local_rank={rank}")]


def names_a_rank(env: Mapping[str, str]) -> bool:
    """Return whether a launcher has set the rank of this process."""
    return any(name in env for name in _RANKS)


def is_another_rank(env: Mapping[str, str]) -> bool:
    """Return whether a launcher has set a rank other than 0 for this process."""
    return any(env.get(name, "0") != "0" for name in _RANKS)


def is_on_another_node(env: Mapping[str, str]) -> bool:
    """Return whether this process is on a node other than node 0."""
    return env.get("NODE_RANK", "0") != "0"


def of_a_worker(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch's agent sets for its workers."""
    return {name: value for name, value in env.items() if name.startswith(_OF_A_WORKER)}


def first_number(env: Mapping[str, str], *names: str) -> int:
    """Return the first number among these variables of a launcher, or 0."""
    numbers = [int(env[name]) for name in names if env.get(name, "").isdigit()]
    return numbers[0] if numbers else 0


def integer_of(env: Mapping[str, str], name: str) -> int | None:
    """Return an integer from an environment variable that the user may have set.

    Raises:
        UserError: the value is not a whole number.
    """
    value = env.get(name, "").strip()
    if value and not value.isdigit():
        raise UserError(f"the environment says {name}={value}, which is not a whole number; unset or correct it")
    return int(value) if value else None


def is_slurm_step(env: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as a task.

    A batch script, a shell of salloc or ``srun --pty bash``, and programs that a user starts in them, are not tasks.
    """
    has_step = {"SLURM_STEP_ID", "SLURM_PROCID"} <= env.keys()
    is_special = first_number(env, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP
    # A program in the shell of an srun inherits the variables of the shell's step, and the shell's terminal. A task
    # that srun starts from this shell inherits SLURM_PTY_PORT, but not the terminal.
    in_terminal = env.get("SLURM_TASK_PID") != str(os.getpid()) and sys.stdin is not None and sys.stdin.isatty()
    return has_step and not is_special and not ("SLURM_PTY_PORT" in env and in_terminal)


def started_by_launcher(env: Mapping[str, str]) -> bool:
    """Return whether torchrun, srun or a script has started this process as one of the ranks of a run."""
    return "RANK" in env or is_slurm_step(env)


def is_by_torchrun(env: Mapping[str, str]) -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in env


def restarts_by_torch(env: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of restarts of these processes by torchrun or our agent, and its limit."""
    return first_number(env, "TORCHELASTIC_RESTART_COUNT"), first_number(env, "TORCHELASTIC_MAX_RESTARTS")


def store_prefix_of_torchrun(env: Mapping[str, str]) -> str:
    """Return a prefix for the keys of this start in the store of torchrun's agents; "" without a shared store."""
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return f"lightning_recipes/{restarts_by_torch(env)[0]}"


def error_file_of_agent(env: Mapping[str, str]) -> str | None:
    """Return the file in which a process records its failure for its agent, ours or torchrun's."""
    return env.get("TORCHELASTIC_ERROR_FILE")


def cores_of_task(env: Mapping[str, str]) -> int | None:
    """Return Slurm's number of cores of each task; None if it is not set."""
    return first_number(env, "SLURM_CPUS_PER_TASK") or None


def slurm_hosts(env: Mapping[str, str]) -> str:
    """Return the hosts of this step in Slurm's notation, or ""."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return next((env[name] for name in names if env.get(name)), "")


def job_name(env: Mapping[str, str], name: str | None = None) -> str | None:
    """Return a name of this job that is the same in restarts and requeues, and unique to it; None without restarts.

    Args:
        name: the name of the run, for a run on several nodes under torchrun without any other name of the job.

    Raises:
        UserError: the name is needed, but it is None.
    """
    # In an interactive job, a user may run several programs.
    if "SLURM_PROCID" in env and is_batch_job(env):
        step = first_number(env, "SLURM_STEP_ID")
        of_step = f"-step{step}" if 0 < step < _FIRST_SPECIAL_STEP else ""
        return f"slurm-{env['SLURM_JOB_ID']}{of_step}"
    run = env.get("TORCHELASTIC_RUN_ID")
    if run is None or not any(restarts_by_torch(env)):
        return None
    if run != "none":
        return f"elastic-{re.sub(r'[^A-Za-z0-9._-]', '_', run)}"
    if env.get("GROUP_WORLD_SIZE", "1") != "1":
        if name is not None:
            return name
        raise UserError(
            "torchrun restarts this run, and each restart would start fresh: add --rdzv-id NAME to torchrun's flags on"
            f" every node, or pass {spelled('name', 'NAME')}"
        )
    # On one node, the agent identifies the job, because it outlives its workers.
    return f"elastic-{socket.gethostname()}-{os.getppid()}"
