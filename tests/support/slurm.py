"""A real Slurm of two nodes on this machine: its daemons, on free ports of the loopback interface, in one folder.

Nothing of the system is changed: SLURM_CONF names the configuration, and munged has a key and a socket of its own.
"""

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.agents import wait_until
from tests.support.ranks import free_port

__all__ = ["NODES", "PROGRAMS", "Slurm"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "salloc", "srun", "scontrol")
NODES = ("n1", "n2")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# A node has to have the name of this host, or slurmd does not start.
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 State=UNKNOWN\n"


class Slurm:
    """The daemons, from `start` to `stop`.

    Args:
        folder: for configuration, state and logs; short, since a socket lies in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start it, and wait until both nodes are idle."""
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        host = socket.gethostname().split(".")[0]
        names = {"host": host, "user": getpass.getuser(), "folder": self.folder, "port": free_port()}
        nodes = "".join(_NODE.format(name=name, host=host, port=free_port()) for name in NODES)
        (self.folder / "slurm.conf").write_text(nodes + _CONFIGURATION.format(**names))
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        own = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._run("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *own)
        wait_until((self.folder / "munge.socket").is_socket, "munged's socket")
        self._run("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        wait_until(self._is_idle, "two idle nodes")

    def _is_idle(self) -> bool:
        try:
            return self.call("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * 2
        except AssertionError:  # The controller is still starting.
            return False

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._run("slurmd", "-D", "-N", node, name=node)

    def _run(self, *command: str, name: str = "") -> None:
        # The kernel ends the daemon where this process is killed.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self.folder / f"{name or command[0]}.out").open("a") as out:
            self._daemons[name or command[0]] = subprocess.Popen(
                [*guard, *command], cwd=self.folder, env=self.env, stdout=out, stderr=out
            )

    def stop(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(Exception):
            self.call("scancel", "--user", getpass.getuser())
        for pid, _ in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(300)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _processes(self) -> Iterator[tuple[int, dict[str, str]]]:
        """The processes of jobs, and their variables."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                pairs = path.read_bytes().decode(errors="replace").split("\0")
                env = dict(pair.partition("=")[::2] for pair in pairs)
                if env.get("SLURM_CONF") == self.env["SLURM_CONF"] and "SLURM_TASK_PID" in env:
                    yield int(path.parent.name), env

    def tasks(self, job: str) -> dict[int, int]:
        """The processes that the first srun of a job has started, by rank."""
        return {
            int(env["SLURM_PROCID"]): pid
            for pid, env in self._processes()
            if (env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID"), env["SLURM_TASK_PID"]) == (job, "0", str(pid))
        }

    def lose_node(self, node: str) -> None:
        """Kill a node's daemon, its tasks and their parents, the step daemons, as when its power fails."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        for pid in [pid for pid, env in self._processes() if env.get("SLURMD_NODENAME") == node]:
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if "slurmstepd" in Path(f"/proc/{parent}/cmdline").read_text():
                    os.kill(parent, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def call(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm prints; it has to succeed."""
        done = subprocess.run(command, env=self.env | dict(env or {}), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", number)))

    def start_now(self, number: str) -> None:
        """Have a requeued job start at once; Slurm would wait for two minutes."""
        wait_until(lambda: self.job(number)["JobState"] == "PENDING", f"job {number} in the queue")
        # The end of the first script is reported later, and would end the second one, which Slurm's delay prevents.
        raw = self.job(number)["JobId"]
        gone = f"job {number} has no process"
        wait_until(lambda: all(env["SLURM_JOB_ID"] != raw for _, env in self._processes()), gone)
        time.sleep(2)
        self.call("scontrol", "update", f"jobid={number}", "StartTime=now")
