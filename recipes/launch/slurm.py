"""The job step of this process, from the variables that Slurm sets.

Lightning's `SLURMEnvironment` does not serve here: it finds "rack1" for the first host of "rack[1-2]n[7,8]", gives all
steps of a job the same port, and reads and writes ``os.environ`` where a plan has to be a function of its arguments.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SlurmStep", "first_host", "slurm_step"]

# Below the range of ephemeral ports.
_FIRST_PORT, _PORTS = 15000, 17000


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


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation.

    Example:
        >>> [first_host(text) for text in ("tux03", "tux[03-05,9],gpu1", "rack[1-2]n[7,8]", "a,b")]
        ['tux03', 'tux03', 'rack1n7', 'a']
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0] if first else "")


def slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """The job step of this process; None outside srun, such as in a batch script or on a login node."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= env.keys():
        return None

    def number(*names: str) -> int:
        return next((int(env[name]) for name in names if env.get(name, "").isdigit()), 0)

    hosts = next((env[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if env.get(n)), "")
    return SlurmStep(
        number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1,
        number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1,
        number("SLURM_NODEID"),
        number("SLURM_LOCALID"),
        first_host(hosts) or "127.0.0.1",
        _FIRST_PORT + (7 * number("SLURM_JOB_ID") + number("SLURM_STEP_ID")) % _PORTS,
    )
