"""The name of a job, which its restarts share and other jobs do not: a restarted job finds its run by it."""

import os
import re
import socket
from collections.abc import Mapping

from callbacks.lib.slurm_job import is_batch_job
from datamodules.errors import UserError

__all__ = ["is_restarted", "launch_name", "torchrun_will_restart"]

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _slurm_name(environment: Mapping[str, str]) -> str | None:
    """For a step of a batch job; in an interactive job a user may run several programs."""
    if "SLURM_PROCID" not in environment or not is_batch_job(environment):
        return None
    job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
    return f"slurm-{job}" + (f"-step{step}" if step.isdigit() and 0 < int(step) < 1_000_000 else "")


def _torchrun_restarts(environment: Mapping[str, str]) -> bool:
    counts = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return "TORCHELASTIC_RUN_ID" in environment and any(count != "0" for count in counts)


def torchrun_will_restart(environment: Mapping[str, str]) -> bool:
    """Whether torchrun starts the processes again when one fails: it has restarts left.

    Example:
        >>> torchrun_will_restart({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "2"})
        True
    """
    done, most = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done.isdigit() and most.isdigit() and int(done) < int(most)


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Whether the launch may be restarted: by a requeue of Slurm, or by torchrun."""
    return _slurm_name(environment) is not None or _torchrun_restarts(environment)


def launch_name(environment: Mapping[str, str]) -> str | None:
    """A name of this job that its restarts and requeues share, and other jobs do not; None without restarts.

    Raises:
        UserError: torchrun restarts the run on several nodes, and nothing identifies this job.

    Example:
        >>> launch_name({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "ENVIRONMENT": "BATCH"})
        'slurm-17'
    """
    slurm = _slurm_name(environment)
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    # --standalone generates an id, and another one after Slurm has requeued the job.
    given = run != "none" and not (slurm and _UUID.fullmatch(run))
    if given and is_restarted(environment):
        return f"elastic-{re.sub(r'[^A-Za-z0-9._-]', '_', run)}"
    if slurm or not _torchrun_restarts(environment):
        return slurm
    if environment.get("GROUP_WORLD_SIZE", "1") != "1":
        # Address and port of the agents' store change in each round, and so may the first node.
        raise UserError(
            "torchrun restarts this run after a failure, and without a name each restart would start fresh: add"
            " --rdzv-id NAME to torchrun's flags on every node, or pass --name NAME, or --resume none to start fresh"
        )
    # On one node the agent, which outlives its workers, identifies the job.
    return f"elastic-{socket.gethostname()}-{os.getppid()}"
