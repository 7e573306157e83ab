"""A program in place of Slurm's ``scontrol``, for the ordinary tests; tests/end_to_end/slurm/ has the real one."""

import os
from pathlib import Path

__all__ = ["BATCH", "RUNNING", "fake_scontrol"]

BATCH = {"SLURM_JOB_ID": "71", "ENVIRONMENT": "BATCH"}
"""What identifies a batch job in the environment of its processes."""

RUNNING = "JobId=71 JobName=a.sh JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1"


def fake_scontrol(
    folder: Path,
    show: str = RUNNING,
    seconds: float = 0,
    status: int = 0,
    after: str = "",
    ends: bool = False,
    killed: int = 0,
) -> dict[str, str]:
    """Write it, and return the variables with which a run finds it.

    It prints `show`; a request to requeue is written to ``asked``, takes `seconds` and ends with `status`, and from
    then on it prints `after`. It sends itself the signals that Slurm sends to a job's processes; a request that does
    not lead a session of its own, or that one of them ends, is not written. With `ends`, the process that made it gets
    SIGTERM, too, before the reply. The first `killed` calls end with SIGKILL.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record").write_text(f"{show}\n")
    for i in range(killed):
        (folder / f"killed{i}").touch()
    program = folder / "scontrol"
    program.write_text(
        "#!/bin/sh\n"
        f'[ -z "$(ls {folder}/killed* 2>/dev/null)" ] || {{ rm $(ls {folder}/killed* | head -n 1); kill -KILL $$; }}\n'
        "kill -USR1 $$\nkill -INT $$\n"
        f'[ "$1" = show ] && exec cat {folder}/record\n'
        "[ $(cut -d' ' -f6 /proc/$$/stat) = $$ ] || exit 9\n"
        f"kill -TERM $$ {'$PPID' if ends else ''}\n"
        f"echo $$ > {folder}/number\n"
        f"sleep {seconds}\n"
        f'echo "$@" >> {folder}/asked\n'
        f"[ -z '{after}' ] || echo '{after}' > {folder}/record\n"
        f"exit {status}\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}
