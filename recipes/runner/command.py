"""Print what the user typed with other flags."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from datamodules.errors import flag_of

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Command:
    """What the user typed, to be printed with other flags.

    Args:
        program: how the program is started on one device.
        args: its arguments.
        launcher: torchrun or slurm, where one of them starts the processes.
        nodes: the nodes on which the launcher starts them.
        devices: the processes on each node.
        call: the call of `recipes.fit` in a program; empty where a command was typed.

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
    call: str = ""

    @property
    def in_program(self) -> bool:
        """Whether nothing was typed, and a program has called `recipes.fit`."""
        return bool(self.call)

    def started_by(self, launcher: str, nodes: int, devices: int) -> "Command":
        """Return this command as one whose processes a launcher starts; `using` prints its line."""
        return replace(self, launcher=launcher, nodes=nodes, devices=devices)

    def alone(self, command: str = "") -> "Command":
        """Return the program with a command of it, without the flags."""
        return replace(self, program=f"{self.program} {command}".rstrip(), args=())

    def using(self, **flags: Any) -> str:
        """Return the command with these flags replaced; None removes a flag."""
        start = self.program
        if self.launcher == "slurm":
            start = f"srun --nodes={self.nodes} --ntasks-per-node={self.devices} {start}"
        elif self.launcher == "torchrun":
            rendezvous = f"--nnodes {self.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:{DEFAULT_PORT}"
            topology = "--standalone" if self.nodes == 1 else rendezvous
            start = f"torchrun {topology} --nproc-per-node {self.devices} {start.removeprefix('python ')}"
        if self.launcher in ("slurm", "torchrun"):
            # The launcher decides how many processes there are and where they are, which these flags might contradict.
            flags = dict.fromkeys(("devices", "num_nodes", "node_rank", "master_addr")) | flags
        words: list[str] = []
        skips_value = False
        for i, arg in enumerate(self.args):
            name, equals, _ = arg.removeprefix("--").partition("=")
            if skips_value:
                skips_value = False
            elif arg.startswith("--") and name.replace("-", "_") in flags:
                skips_value = not equals and i + 1 < len(self.args) and not self.args[i + 1].startswith("--")
            else:
                words.append(shlex.quote(arg))
        for name, value in flags.items():
            if value is not None:
                words += [flag_of(name), shlex.quote(str(value))]
        return " ".join([start, *words])

    def split(self, nodes: int, devices: int) -> str:
        """Return the command for other numbers of nodes and devices."""
        if self.launcher in ("slurm", "torchrun"):
            return self.started_by(self.launcher, nodes, devices).using()
        if nodes == self.nodes:
            return self.using(devices=devices)
        return self.using(devices=devices, num_nodes=nodes)
