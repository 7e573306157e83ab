"""The flags about the launch of a run, and the corrected command line to print in an error."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from datamodules.ranges import NATURAL, SECONDS, Range, check_ranges

__all__ = ["DEFAULT_PORT", "Command", "LaunchSettings", "flag_of"]

DEFAULT_PORT = 29500


def flag_of(name: str) -> str:
    """The flag of a parameter.

    Example:
        >>> flag_of("max_epochs")
        '--max-epochs'
    """
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class LaunchSettings:
    """How the processes of a run find each other.

    Args:
        node_rank: number of this node, from 0, where the run is started manually on each node; also NODE_RANK.
        master_addr: host name or address of node 0; also MASTER_ADDR.
        master_port: free TCP port of node 0, 29500 where none is given; also MASTER_PORT.
        rendezvous_timeout: seconds to wait at the start for node 0 and for the other nodes.
        collective_timeout: seconds that a rank waits for the others in a collective call before it fails.
    """

    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rendezvous_timeout: float = 60.0
    collective_timeout: float = 1800.0

    def __post_init__(self) -> None:
        check_ranges(
            node_rank=(self.node_rank, NATURAL),
            master_port=(self.master_port, Range(1, 65535, whole=True)),
            rendezvous_timeout=(self.rendezvous_timeout, SECONDS),
            collective_timeout=(self.collective_timeout, SECONDS),
        )


@dataclass(frozen=True)
class Command:
    """What the user typed, to be printed with other flags.

    Args:
        program: without what starts it on several devices.
        launcher: torchrun or slurm, where one of them starts the processes: `nodes` times `devices`.

    Example:
        >>> typed = Command("python -m recipes.mnist", ["--num_nodes=2", "--lr", "0.1"])
        >>> typed.using(num_nodes=4, node_rank="I")
        'python -m recipes.mnist --lr 0.1 --num-nodes 4 --node-rank I'
        >>> typed.started_by("slurm", 2, 8).using(master_port=1234)
        'srun --nodes=2 --ntasks-per-node=8 python -m recipes.mnist --lr 0.1 --master-port 1234'
    """

    program: str
    args: Sequence[str] = ()
    launcher: str = ""
    nodes: int = 1
    devices: int = 1

    def started_by(self, launcher: str, nodes: int, devices: int) -> "Command":
        """The same for processes that a launcher has started; others are started by the program itself."""
        return replace(self, launcher=launcher, nodes=nodes, devices=devices)

    def using(self, **flags: Any) -> str:
        """The command with these flags replaced; None removes a flag."""
        start = self._start()
        if start != self.program:
            flags = {"devices": None, "num_nodes": None} | flags
        kept: list[str] = []
        skip = False
        for i, arg in enumerate(self.args):
            name, equals, _ = arg.removeprefix("--").partition("=")
            if skip:
                skip = False
            elif arg.startswith("--") and name.replace("-", "_") in flags:
                skip = not equals and i + 1 < len(self.args) and not self.args[i + 1].startswith("--")
            else:
                kept.append(shlex.quote(arg))
        for name, value in flags.items():
            if value is not None:
                kept += [flag_of(name), shlex.quote(str(value))]
        return " ".join([start, *kept])

    def _start(self) -> str:
        if self.launcher == "slurm":
            return f"srun --nodes={self.nodes} --ntasks-per-node={self.devices} {self.program}"
        if self.launcher != "torchrun":
            return self.program
        several = f"--nnodes {self.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:{DEFAULT_PORT}"
        where = "--standalone" if self.nodes == 1 else several
        return f"torchrun {where} --nproc-per-node {self.devices} {self.program.removeprefix('python ')}"

    def split(self, nodes: int, devices: int) -> str:
        """The command for other numbers of nodes and devices."""
        if self.launcher in ("slurm", "torchrun"):
            return self.started_by(self.launcher, nodes, devices).using()
        return self.using(devices=devices, **({} if nodes == self.nodes else {"num_nodes": nodes}))

    def torchrun(self, nodes: int, devices: int) -> str:
        """The command that starts the same run through torchrun."""
        return self.started_by("torchrun", nodes, devices).using()

    def srun(self, nodes: int, devices: int) -> str:
        """The command that starts the same run through Slurm."""
        return self.started_by("slurm", nodes, devices).using()
