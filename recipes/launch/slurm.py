"""The job step of this process, from the variables that Slurm sets.

Lightning's `SLURMEnvironment` does not serve here: it finds "rack1" for the first host of "rack[1-2]n[7,8]", gives all
steps of a job the same port, and reads and writes ``os.environ`` where a plan has to be a function of its arguments.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SlurmAllocation", "SlurmStep", "first_host", "shell_of_srun", "slurm_allocation", "slurm_step"]

# Below the range of ephemeral ports.
_FIRST_PORT, _PORTS = 15000, 17000
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # From here on: the batch script, the shell of salloc, processes that ssh has started.


@dataclass(frozen=True)
class SlurmStep:
    """The processes that one srun has started, and the place of this one.

    Args:
        node: number of this node in the step.
        local: number of this process on its node.
        port: a TCP port computed from the numbers of the job and the step, so that all processes agree.
    """

    nodes: int
    tasks: int
    node: int
    local: int
    first_host: str
    port: int


@dataclass(frozen=True)
class SlurmAllocation:
    """What a Slurm job has been given: nodes, and on each the tasks and GPUs that were asked for."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int = 0


def _number(env: Mapping[str, str], *names: str) -> int:
    """The first of these variables that is a number, or 0."""
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), 0)


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation.

    Example:
        >>> [first_host(text) for text in ("tux03", "tux[03-05,9],gpu1", "rack[1-2]n[7,8]", "a,b")]
        ['tux03', 'tux03', 'rack1n7', 'a']
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0] if first else "")


def slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """The job step of this process; None where srun has not started it, as in a batch script or a shell of salloc."""
    step = _number(env, "SLURM_STEP_ID")
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= env.keys() or step >= _FIRST_SPECIAL_STEP:
        return None
    hosts = next((env[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if env.get(n)), "")
    nodes = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    return SlurmStep(
        nodes,
        _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1,
        _number(env, "SLURM_NODEID"),
        _number(env, "SLURM_LOCALID"),
        first_host(hosts) if nodes > 1 and hosts else "127.0.0.1",
        _FIRST_PORT + (7 * _number(env, "SLURM_JOB_ID") + step) % _PORTS,
    )


def slurm_allocation(env: Mapping[str, str]) -> SlurmAllocation | None:
    """The nodes and tasks of this Slurm job; None outside of one.

    Example:
        >>> slurm_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8"})
        SlurmAllocation(nodes=2, tasks_per_node=4, gpus_per_node=0)
        >>> slurm_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})  # salloc -N2 sets no tasks.
        SlurmAllocation(nodes=2, tasks_per_node=1, gpus_per_node=0)
    """
    if "SLURM_JOB_ID" not in env:
        return None
    nodes = _number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    tasks = _number(env, "SLURM_NTASKS_PER_NODE") or -(-_number(env, "SLURM_NTASKS") // nodes)
    return SlurmAllocation(nodes, tasks or 1, _number(env, "SLURM_GPUS_PER_NODE"))


def shell_of_srun(env: Mapping[str, str]) -> bool:
    """Whether this program was typed in the shell of ``srun --pty bash``: then the tasks of the step are shells.

    A step within that shell inherits its SLURM_PTY_PORT, but not its terminal.
    """
    typed = env.get("SLURM_TASK_PID") != str(os.getpid()) and sys.stdin is not None and sys.stdin.isatty()
    return "SLURM_PTY_PORT" in env and typed
