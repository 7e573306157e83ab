"""The faults that `benchmarks.faults.battery` brings about, and what has to come of each: a table."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.hostile_files import (
    name_a_victim,
    write_aliases,
    write_bomb,
    write_code,
    write_digit_bomb,
    write_image_bomb,
    write_import,
    write_victim,
)

__all__ = ["EVERY_RECIPE", "FAULTS", "SAVE_EVERY", "FaultCase"]

SAVE_EVERY = 5
"""Updates between two saves."""
EVERY_RECIPE = ("mnist", "resnet", "seq2seq")

# torch's message about memory that cannot be allocated differs between versions and systems.
_MEMORY = r"(?i)not enough memory|can't allocate|cannot allocate"


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _set_clock_back(path: Path) -> None:
    # As if what was saved last had been saved a year before the others.
    os.utime(path, (time.time() - 3e7,) * 2)


@dataclass(frozen=True)
class FaultCase:
    """A fault, and what has to come of it.

    Args:
        fault: fields of `benchmarks.faults.faulty_run.Fault`.
        message: what the user has to read, a regular expression.
        statuses: of the exit, any of them; what a shell reports of a signal is 128 + its number.
        lost: updates that may be lost, since the last save; None for any number.
        resumes: the same command is typed again, and has to end with the weights of an undisturbed run.
        world_size: processes.
        manual_launch: one command for each process, as on nodes of their own, instead of one for all.
        damage: done to last.ckpt afterwards.
        resumed: what the resumed run has to print, a regular expression.
        more: further flags, for the run with the fault only; FOLDER in them is a folder of the case.
        shell: starts the command, as ``"$@"``, in bash; FOLDER in it is a folder of the case.
        files: makes files in that folder.
        remains: files of that folder that have to be there afterwards.
        recipes: that the fault is for.
        needs_root: mounts file systems in a namespace of its own.
    """

    fault: dict[str, Any]
    message: str
    statuses: tuple[int, ...] = (1,)
    lost: int | None = SAVE_EVERY
    resumes: bool = True
    world_size: int = 1
    manual_launch: bool = False
    damage: Callable[[Path], None] | None = None
    resumed: str = ""
    more: tuple[str, ...] = ()
    shell: str = ""
    files: Callable[[Path], None] | None = None
    remains: tuple[str, ...] = ()
    recipes: tuple[str, ...] = EVERY_RECIPE
    needs_root: bool = False


def _signal(name: str, status: int, world_size: int = 1, **fault: Any) -> FaultCase:
    """A signal loses nothing."""
    return FaultCase({"kind": name, "at": 17, **fault}, "resume with", (status,), 0, world_size=world_size)


def _refused(message: str, *more: str, **options: Any) -> FaultCase:
    """A run that cannot start says so."""
    return FaultCase({}, message, (2,), resumes=False, more=more, **options)


KILLED = (-signal.SIGKILL,)
_WITHOUT_REPORT = r"error: rank 1 \(node \d, .*\) ended without a report"
_KILL: dict[str, Any] = {"kind": "kill", "at": 17}
# In the second epoch, when there is a checkpoint besides last.ckpt.
_LATE: dict[str, Any] = {"kind": "kill", "at": 34}

FAULTS: dict[str, FaultCase] = {
    "kill -9 in training": FaultCase(_KILL, "", KILLED),
    "kill -9 before the first update": FaultCase({"kind": "kill", "moment": "start"}, "", KILLED, 0),
    "kill -9 in validation": FaultCase(_KILL | {"moment": "validation"}, "", KILLED, 2 * SAVE_EVERY),
    "kill -9 during a save": FaultCase(_KILL | {"moment": "save"}, "", KILLED),
    "kill -9 at an epoch's end": FaultCase(_KILL | {"moment": "epoch"}, "", KILLED, 2 * SAVE_EVERY),
    "kill -9 of rank 1 of 2": FaultCase(_KILL | {"rank": 1}, _WITHOUT_REPORT, world_size=2),
    "kill -9 of rank 0 of 2": FaultCase(_KILL | {"rank": 0}, "", KILLED, world_size=2),
    "kill -9 of rank 1's node": FaultCase(_KILL | {"rank": 1}, _WITHOUT_REPORT, world_size=2, manual_launch=True),
    "SIGTERM": _signal("term", 143),
    "SIGTERM in validation": _signal("term", 143, moment="validation"),
    "SIGTERM to rank 0 of 2": _signal("term", 143, 2, rank=0),
    "SIGTERM to rank 1 of 2": _signal("term", 143, 2, rank=1),
    "SIGTERM to both of 2": _signal("term", 143, 2),
    "SIGUSR1": _signal("usr1", 138),
    "Ctrl-C": _signal("int", 130),
    "last.ckpt cut off": FaultCase(
        _LATE, "", KILLED, None, damage=_truncate, resumed=r"last\.ckpt is skipped: it was cut off"
    ),
    "last.ckpt all zeros": FaultCase(_LATE, "", KILLED, None, damage=_zero, resumed=r"last\.ckpt is skipped"),
    "last.ckpt with a flipped bit": FaultCase(
        _LATE, "", KILLED, None, damage=_flip, resumed=r"last\.ckpt is skipped: it is damaged"
    ),
    "last.ckpt missing": FaultCase(_LATE, "", KILLED, None, damage=Path.unlink),
    "clock set back a year": FaultCase(_LATE, "", KILLED, damage=_set_clock_back),
    "disk full at a save": FaultCase(
        {"kind": "disk", "moment": "save", "at": 10}, r"was not saved \(.*\); .* training continues", (0, 1), 0
    ),
    "disk full until the end": FaultCase(
        {"kind": "disk", "at": 36, "lasting": 1000}, r"was not saved|not saved:", (1,), None
    ),
    "standard output's disk full": FaultCase({}, "No space left on device", (0,), 0, shell='"$@" > /dev/full'),
    "both streams' disk full": FaultCase({}, "", (0,), 0, shell='"$@" > /dev/full 2>&1'),
    "reader of standard output gone": FaultCase({}, "", (0,), 0, shell='"$@" | head -1'),
    "standard output closed": FaultCase({}, "", (0,), 0, shell='"$@" >&-'),
    "standard output in ASCII": FaultCase(
        {}, "best checkpoint", (0,), 0, shell='LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii "$@"'
    ),
    "run's folder removed": FaultCase({"kind": "remove folder", "at": 17}, "was removed meanwhile", (1,), 0),
    "no room in /dev/shm": _refused(
        "--num-workers 0",
        *("--num-workers", "2"),
        shell="""unshare -m bash -c 'mount -t tmpfs -o size=64k tmpfs /dev/shm && "$@"' bash "$@" """,
        recipes=("resnet",),
        needs_root=True,
    ),
    "worker killed": FaultCase(
        {"kind": "kill workers", "at": 8}, r"error: .*worker", more=("--num-workers", "1"), recipes=("resnet",)
    ),
    "24 open files at most": FaultCase(
        {},
        "ulimit -n",
        (1, 2),
        resumes=False,
        more=("--num-workers", "4"),
        shell='ulimit -n 24; "$@"',
        recipes=("resnet",),
    ),
    "stranger in place of rank 1": FaultCase(
        {},
        "refused .* secret",
        (0,),
        0,
        world_size=2,
        manual_launch=True,
        # It types the command of node 1 without knowing the secret.
        shell='(LIGHTNING_RECIPES_SECRET=a-stranger-has-this-one "$@" --node-rank 1 > /dev/null 2>&1 &); "$@"',
    ),
    "checkpoint that names a file of the user's": FaultCase(
        _LATE, "", KILLED, files=write_victim, damage=name_a_victim, remains=("victim.ckpt",)
    ),
    "gzip bomb of sentences": _refused(
        "bomb.tsv.gz", "--data-file", "FOLDER/bomb.tsv.gz", files=write_bomb, recipes=("seq2seq",)
    ),
    "gzip bomb of digits": _refused(
        "ubyte.gz", *("--dataset", "mnist", "--data-dir", "FOLDER"), files=write_digit_bomb, recipes=("mnist",)
    ),
    "images of 60,000 x 60,000 pixels": _refused(
        "cannot be read as an image: .* pixels",
        *("--dataset", "folder", "--data-dir", "FOLDER"),
        files=write_image_bomb,
        recipes=("resnet",),
    ),
    "settings of a billion values": _refused("aliases", "--config", "FOLDER/settings.yaml", files=write_aliases),
    "settings that import a module": _refused(
        # The module prints that.
        r"^(?!.*The Zen of Python).*this\.s",
        *("--config", "FOLDER/settings.yaml"),
        files=write_import,
    ),
    "weights that run code": _refused("code", "--weights", "FOLDER/weights.pth", files=write_code, recipes=("resnet",)),
    "folder that cannot be written": _refused("cannot make the run's folder", "--run-dir", "/proc/runs"),
    "NaN in the weights": FaultCase({"kind": "nan", "at": 12}, "the run has diverged: .* NaN", (1,)),
    "exception in a step": FaultCase({"kind": "raise", "moment": "step", "at": 17}, "this step is broken"),
    "exception in rank 1's step": FaultCase(
        {"kind": "raise", "moment": "step", "at": 17, "rank": 1}, r"error: rank 1 .*this step is broken", world_size=2
    ),
    "exception in a callback": FaultCase({"kind": "raise", "at": 17}, "this step is broken"),
    "exception in a worker": FaultCase({"kind": "worker"}, r"sample \d+ cannot be read", resumes=False),
    "out of memory": FaultCase({"kind": "memory", "moment": "step", "at": 17}, _MEMORY),
    "node cut off": FaultCase(
        {"kind": "stop", "at": 17, "rank": 1},
        r"(?i)timed? ?out|does not answer",
        world_size=2,
        manual_launch=True,
        more=("--collective-timeout", "10"),
    ),
    "port taken": _refused(
        r"port \d+", "--master-port", "TAKEN", "--rendezvous-timeout", "10", world_size=2, manual_launch=True
    ),
    "master out of reach": _refused(
        "(?i)reach|rendezvous",
        *("--num-nodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "FREE"),
        *("--rendezvous-timeout", "5"),
    ),
    "4 nodes without a rendezvous": _refused("--master-addr", "--num-nodes", "4"),
    "more devices than exist": _refused(r"--accelerator gpu|GPU|cuda", "--accelerator", "gpu", "--devices", "8"),
}
"""Everything that is brought about, by name."""
