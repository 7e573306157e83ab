"""What the restarts of a launch have in common, and other launches do not: the name under which a job finds its run."""

import os
import re
import socket
from collections.abc import Mapping

from callbacks.lib.signals import is_batch_job
from datamodules.errors import UserError

__all__ = ["is_restarted", "launch_name"]

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _slurm_name(environment: Mapping[str, str]) -> str | None:
    """Of a step of a batch job; in an interactive one a person may run several things."""
    if not is_batch_job(environment) or "SLURM_PROCID" not in environment:
        return None
    job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
    return f"slurm-{job}" + (f"-step{step}" if step.isdigit() and 0 < int(step) < 1_000_000 else "")


def _torchrun_restarts(environment: Mapping[str, str]) -> bool:
    counts = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return "TORCHELASTIC_RUN_ID" in environment and any(count != "0" for count in counts)


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Whether somebody starts this launch again: a requeue of Slurm, or a torchrun that may restart."""
    return _slurm_name(environment) is not None or _torchrun_restarts(environment)


def launch_name(environment: Mapping[str, str]) -> str | None:
    """A name of this job that its restarts and requeues share, and other jobs do not; None where nobody restarts us.

    Raises:
        UserError: torchrun restarts us on several nodes, and nothing tells this job from others.

    Example:
        >>> launch_name({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"})
        'slurm-17'
    """
    slurm = _slurm_name(environment)
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    # --standalone draws an id, another one when Slurm puts the job back into the queue.
    given = run != "none" and not (slurm and _UUID.fullmatch(run))
    if given and is_restarted(environment):
        return f"elastic-{re.sub(r'[^A-Za-z0-9._-]', '_', run)}"
    if slurm or not _torchrun_restarts(environment):
        return slurm
    if environment.get("GROUP_WORLD_SIZE", "1") != "1":
        # Address and port of the agents' store are other ones in each round, and so may be the first node.
        raise UserError(
            "torchrun starts this run again after a failure, and without a name it would begin anew each time: add"
            " --rdzv-id NAME to torchrun's flags on every node, or pass --name NAME, or --resume none to begin anew"
        )
    # On one node the agent, which outlives its workers, tells jobs apart.
    return f"elastic-{socket.gethostname()}-{os.getppid()}"
