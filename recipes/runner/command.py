"""What the user typed, to be printed with other flags; and how messages name settings to who asks.

Messages name a setting as Python does, `weights` or ``weights="FILE"``, since callbacks and data modules also serve
other programs. `as_flags` alone spells settings as flags, for users who have typed a command line.
"""

import re
import shlex
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from datamodules.errors import UserError

DEFAULT_PORT = 29500


def flag_of(name: str) -> str:
    """The flag of a parameter.

    Example:
        >>> flag_of("max_epochs")
        '--max-epochs'
    """
    return f"--{name.replace('_', '-')}"


_SETTING = re.compile(r"""`([a-z_0-9]+)`|(?<![\w/.\-=`'"])([a-z][a-z_0-9]*)=("[^"]*"|'[^']*'|[^\s,;:()]+)""")
"""A setting in a message; not in a path such as runs/lr=0.1, nor in a command such as --lr=0.1."""


def as_flags(message: str, names: Container[str]) -> str:
    """A message that names settings as Python does, with those that are flags spelled so.

    Args:
        names: of the flags.

    Example:
        >>> as_flags('no weights: pass `weights_skip`, or weights="FILE".', {"weights", "weights_skip"})
        'no weights: pass --weights-skip, or --weights FILE.'
    """

    def spell(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in names:
            return found[0]
        if found[1]:
            return flag_of(name)
        if found[3] in ("True", "False"):
            return flag_of(name if found[3] == "True" else f"no_{name}")
        quoted = found[3][0] in "\"'"
        value = found[3] if quoted else found[3].rstrip(".")
        inside = value[1:-1] if quoted else value
        text = value if " " in inside else inside
        return f"{flag_of(name)} {text}{found[3][len(value) :]}"

    return _SETTING.sub(spell, message)


@contextmanager
def errors_with_flags(names: Container[str]) -> Iterator[None]:
    """Spell the settings in a `UserError` as flags."""
    try:
        yield
    except UserError as error:
        error.args = (as_flags(str(error), names), *error.args[1:])
        raise


@dataclass(frozen=True)
class Command:
    """What the user typed, to be printed with other flags.

    Args:
        program: without what starts it on several devices.
        launcher: torchrun or slurm, where one of them starts the processes: `nodes` times `devices`.
        call: of `recipes.fit`, by a program that goes on after the run; empty where something was typed.

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
        """The same for processes that a launcher has started; others are started by the program itself."""
        return replace(self, launcher=launcher, nodes=nodes, devices=devices)

    def alone(self, command: str = "") -> "Command":
        """The program, and a command of it, without the flags."""
        return replace(self, program=f"{self.program} {command}".rstrip(), args=())

    def using(self, **flags: Any) -> str:
        """The command with these flags replaced; None removes a flag."""
        start = self.program
        if self.launcher == "slurm":
            start = f"srun --nodes={self.nodes} --ntasks-per-node={self.devices} {start}"
        elif self.launcher == "torchrun":
            several = f"--nnodes {self.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:{DEFAULT_PORT}"
            where = "--standalone" if self.nodes == 1 else several
            start = f"torchrun {where} --nproc-per-node {self.devices} {start.removeprefix('python ')}"
        if self.launcher in ("slurm", "torchrun"):
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

    def split(self, nodes: int, devices: int) -> str:
        """The command for other numbers of nodes and devices."""
        if self.launcher in ("slurm", "torchrun"):
            return self.started_by(self.launcher, nodes, devices).using()
        return self.using(devices=devices, **({} if nodes == self.nodes else {"num_nodes": nodes}))
