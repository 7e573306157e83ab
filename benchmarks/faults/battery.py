"""What becomes of a run when something breaks: ``python -m benchmarks.faults`` prints a table of faults.

A fault is injected into a small run of the MNIST recipe; then the same command line is started again, and has to end
with the weights of an undisturbed run, to the bit. "Ended" counts from the fault to the end of the last process.
"""

import argparse
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.processes import free_port

__all__ = ["FAULTS", "FaultCase", "Outcome", "main"]

LIMIT = 30.0
"""Seconds that a run may take to end once something has broken."""
SAVE_EVERY = 5
EPOCHS = 2
_START = 180.0
_ROOT = Path(__file__).parents[2]

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
        lost: updates that may be lost, since the last save; None where the run is not resumed.
        world_size: processes.
        manual_launch: one command for each process, as on nodes of their own, instead of one for all.
        damage: done to last.ckpt afterwards.
        resumed: what the resumed run has to print, a regular expression.
        more: further flags, for the run with the fault only.
    """

    fault: dict[str, Any]
    message: str
    statuses: tuple[int, ...] = (1,)
    lost: int | None = SAVE_EVERY
    world_size: int = 1
    manual_launch: bool = False
    damage: Callable[[Path], None] | None = None
    resumed: str = ""
    more: tuple[str, ...] = ()


def _signal(name: str, status: int, world_size: int = 1, **fault: Any) -> FaultCase:
    """A signal loses nothing."""
    return FaultCase({"kind": name, "at": 17, **fault}, "resume with", (status,), 0, world_size)


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
        {"kind": "disk", "moment": "save", "at": 10}, r"was not saved \(.*\); .* training continues", (0, 1), None
    ),
    "folder that cannot be written": FaultCase(
        {}, "cannot make the run's folder", (2,), None, more=("--run-dir", "/proc/runs")
    ),
    "NaN in the weights": FaultCase({"kind": "nan", "at": 12}, "the run has diverged: .* NaN", (1,)),
    "exception in a step": FaultCase({"kind": "raise", "moment": "step", "at": 17}, "this step is broken"),
    "exception in rank 1's step": FaultCase(
        {"kind": "raise", "moment": "step", "at": 17, "rank": 1}, r"error: rank 1 .*this step is broken", world_size=2
    ),
    "exception in a callback": FaultCase({"kind": "raise", "at": 17}, "this step is broken"),
    "exception in a worker": FaultCase({"kind": "worker"}, r"image \d+ cannot be read", lost=None),
    "out of memory": FaultCase({"kind": "memory", "moment": "step", "at": 17}, _MEMORY),
    "node cut off": FaultCase(
        {"kind": "stop", "at": 17, "rank": 1},
        r"(?i)timed? ?out|does not answer",
        world_size=2,
        manual_launch=True,
        more=("--collective-timeout", "10"),
    ),
    "port taken": FaultCase(
        {},
        r"port \d+",
        (2,),
        None,
        2,
        manual_launch=True,
        more=("--master-port", "TAKEN", "--rendezvous-timeout", "10"),
    ),
    "master out of reach": FaultCase(
        {},
        "(?i)reach|rendezvous",
        (2,),
        None,
        more=(
            *("--num-nodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "FREE"),
            *("--rendezvous-timeout", "5"),
        ),
    ),
    "4 nodes without a rendezvous": FaultCase({}, "--master-addr", (2,), None, more=("--num-nodes", "4")),
    "more devices than exist": FaultCase(
        {}, r"--accelerator gpu|GPU|cuda", (2,), None, more=("--accelerator", "gpu", "--devices", "8")
    ),
}
"""Everything that is brought about, by name."""


@dataclass
class Outcome:
    """The outcome of one case; `faults` lists what differs from the expectation."""

    status: int = 0
    ended: float = 0.0
    lost: int | None = None
    equal: bool | None = None
    reported: bool = True
    faults: list[str] = field(default_factory=list)


@dataclass
class _Run:
    """One try: its folder, its flags, and how it is started."""

    folder: Path
    world_size: int
    manual_launch: bool
    epochs: int = EPOCHS

    def command(self, *more: str) -> list[str]:
        flags = {
            "--dataset": "digits",
            "--max-epochs": self.epochs,
            "--batch-size": 64 // self.world_size,
            "--global-batch-size": 64,
            "--save-every": f"{SAVE_EVERY} steps",
            "--name": "faulty",
            "--run-dir": self.folder / "runs",
            "--resume": "auto",
            "--accelerator": "cpu",
            "--precision": "32-true",
            "--num-workers": None,
            "--enable-progress-bar": "false",
            "--devices": 1 if self.manual_launch else self.world_size,
        }
        given = [str(part) for name, value in flags.items() if value is not None for part in (name, value)]
        return [sys.executable, "-W", "ignore", "-m", "benchmarks.faults.faulty_run", *given, *more]

    def start(self, fault: dict[str, Any], more: Sequence[str]) -> list["subprocess.Popen[str]"]:
        environment = os.environ | {
            "FAULT": json.dumps({"folder": str(self.folder), **fault}),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(_ROOT),
        }
        commands = [self.command(*more)]
        if self.manual_launch:
            port = str(free_port())
            meeting = ("--num-nodes", str(self.world_size), "--master-addr", "127.0.0.1", "--master-port", port)
            commands = [self.command(*meeting, "--node-rank", str(n), *more) for n in range(self.world_size)]
        return [
            subprocess.Popen(
                command,
                env=environment,
                cwd=_ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command in commands
        ]

    def finish(self, processes: Sequence["subprocess.Popen[str]"], after_fault: bool = False) -> tuple[int, str, bool]:
        """The exit status and the output of the first, and whether all ended in time; what is left is killed.

        Args:
            after_fault: count the time from the fault.
        """
        deadline = time.monotonic() + _START
        outputs, in_time = [], True
        for number, process in enumerate(processes):
            if after_fault and self._wait_for_the_fault(process, deadline):
                deadline = min(deadline, time.monotonic() + LIMIT)
            # A node that was stopped cannot end; its keeper, here the system, ends it.
            patience = 0.1 if number and self._stopped(process) else max(0.1, deadline - time.monotonic())
            try:
                outputs.append(process.communicate(timeout=patience)[0])
            except subprocess.TimeoutExpired:
                in_time = in_time and self._stopped(process)
                os.killpg(process.pid, signal.SIGKILL)
                outputs.append(process.communicate()[0])
        return processes[0].returncode, outputs[0], in_time

    def _wait_for_the_fault(self, process: "subprocess.Popen[str]", deadline: float) -> bool:
        while (
            not (mark := self.folder / "injected").exists() and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return mark.exists()

    @staticmethod
    def _stopped(process: "subprocess.Popen[str]") -> bool:
        stat = Path(f"/proc/{process.pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "T"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "runs" / "mnist" / "faulty" / "checkpoints"

    def digest(self) -> str:
        """SHA-256 of the weights in last.ckpt."""
        weights = torch.load(self.checkpoints / "last.ckpt", weights_only=True)["state_dict"]
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(name.encode())
            digest.update(weights[name].contiguous().numpy().tobytes())
        return digest.hexdigest()


def _fill_in(flags: Sequence[str], taken: int) -> list[str]:
    ports = {"TAKEN": str(taken), "FREE": str(free_port())}
    return [ports.get(flag, flag) for flag in flags]


def run_case(case: FaultCase, folder: Path, undisturbed: str) -> Outcome:
    """Bring a fault about in a folder of its own, type the command again, and compare."""
    folder.mkdir(parents=True)
    run, outcome = _Run(folder, case.world_size, case.manual_launch), Outcome()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        began = time.time()
        processes = run.start(case.fault, _fill_in(case.more, holder.getsockname()[1]))
        outcome.status, output, in_time = run.finish(processes, after_fault=True)
    mark = folder / "injected"
    outcome.ended = time.time() - (float(mark.read_text()) if mark.exists() else began)
    if case.fault and case.fault["kind"] not in ("worker",) and not mark.exists():
        outcome.faults.append("the fault did not happen")
    if not in_time:
        outcome.faults.append(f"still there after {LIMIT:.0f} s")
    if outcome.status not in case.statuses:
        outcome.faults.append(f"exit status {outcome.status}")
    outcome.reported = re.search(case.message, output, re.DOTALL) is not None
    if not outcome.reported:
        outcome.faults.append(f"no match for {case.message!r} in: {_tail(output)}")
    refused = case.statuses == (2,) and case.lost is None
    if refused or case.fault.get("kind") == "worker":
        return outcome
    return _resume(case, run, outcome, undisturbed)


def _resume(case: FaultCase, run: _Run, outcome: Outcome, undisturbed: str) -> Outcome:
    done = int(marker.read_text()) if (marker := run.folder / "updates").exists() else 0
    last = run.checkpoints / "last.ckpt"
    if case.damage is not None:
        case.damage(last)
    again = _Run(run.folder, run.world_size, run.manual_launch)
    status, output, _ = again.finish(again.start({}, ()))
    if status:
        outcome.faults.append(f"the resumed run ended with {status}: {_tail(output)}")
    found = re.search(r"resuming from .* after ([\d,]+) updates", output)
    if case.fault["kind"] != "disk":
        outcome.lost = done - (int(found[1].replace(",", "")) if found else 0)
    if case.lost is not None and (outcome.lost or 0) > case.lost:
        outcome.faults.append(f"{outcome.lost} updates lost, at most {case.lost} may be")
    if not re.search(case.resumed, output):
        outcome.faults.append(f"no match for {case.resumed!r} in: {_tail(output)}")
    outcome.equal = not status and again.digest() == undisturbed
    if not outcome.equal:
        outcome.faults.append("other weights than undisturbed")
    return outcome


def _tail(output: str) -> str:
    return " / ".join(output.strip().splitlines()[-3:])[-300:]


def _undisturbed(folder: Path, world_size: int, manual_launch: bool, epochs: int = EPOCHS) -> str:
    folder.mkdir(parents=True)
    run = _Run(folder, world_size, manual_launch, epochs)
    status, output, _ = run.finish(run.start({}, ()))
    if status:
        raise SystemExit(f"the undisturbed run failed: {_tail(output)}")
    return run.digest()


def kill_again_and_again(folder: Path, kills: int, seed: int, console: Console) -> bool:
    """Kill one run at random moments, each time start it by the same command line, and compare its end."""
    epochs = EPOCHS + kills // 3  # Longer than all lives together.
    undisturbed = _undisturbed(folder / "undisturbed", 1, False, epochs)
    run, moments = _Run(folder / "killed", 1, False, epochs), random.Random(seed)
    run.folder.mkdir()
    marker, done = run.folder / "updates", 0
    for number in range(kills):
        marker.unlink(missing_ok=True)
        process = run.start({"pause": 0.05}, ())[0]
        while not marker.exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.6))
        if process.poll() is not None:
            console.print(f"after {number} kills the run had ended before the next one could come")
            process.communicate()
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        done = number + 1
    status, output, _ = run.finish(run.start({}, ()))
    if status:
        console.print(f"[red]the last run ended with {status}: {_tail(output)}")
        return False
    equal = run.digest() == undisturbed
    verdict = "[green]the weights of an undisturbed run" if equal else "[red]OTHER weights than an undisturbed run"
    console.print(f"{done} kills with SIGKILL at random moments (seed {seed}), and in the end {verdict}")
    return equal


def _row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    lost = [outcome.lost for outcome in outcomes if outcome.lost is not None]
    equal = [outcome.equal for outcome in outcomes if outcome.equal is not None]
    ended = [outcome.ended for outcome in outcomes]
    return [
        name,
        str(len(outcomes)),
        ", ".join(sorted({str(128 - o.status if o.status < 0 else o.status) for o in outcomes})),
        f"{max(ended):.1f}",
        "yes" if all(outcome.reported for outcome in outcomes) else "NO",
        f"{max(lost)}" if lost else "",
        ("yes" if all(equal) else "NO") if equal else "",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Bring the faults about and print the table; the exit status is 1 where one of them was not survived."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", help="faults whose name contains this")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="of each fault (default: 2)")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="and kill one run so often, at random")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments (default: 1)")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave all runs there")
    args = parser.parse_args(argv)
    chosen = {name: case for name, case in FAULTS.items() if args.only is None or args.only in name}
    if not chosen and not args.kills:
        parser.error(f"no fault is called {args.only!r}; there are: {', '.join(FAULTS)}")
    console = Console(highlight=False)
    table = Table("fault", "runs", "exit status", "ended, s", "message", "updates lost", "weights equal")
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = args.keep or Path(temporary)
        digests: dict[tuple[int, bool], str] = {}

        def undisturbed(world_size: int, manual_launch: bool) -> str:
            how = world_size, manual_launch
            if how not in digests:
                digests[how] = _undisturbed(root / f"undisturbed-{world_size}-{manual_launch}", *how)
            return digests[how]

        try:
            for name, case in chosen.items() if args.repeats else ():
                reference = undisturbed(case.world_size, case.manual_launch)
                place = re.sub(r"\W+", "-", name)
                outcomes = [run_case(case, root / f"{place}-{n}", reference) for n in range(args.repeats)]
                table.add_row(*_row(name, outcomes))
                faults = sorted({fault for outcome in outcomes for fault in outcome.faults})
                failed += [f"{name}: {fault}" for fault in faults]
                console.print(f"{name}: {'; '.join(faults) or 'as it has to be'}")
            survived = not args.kills or kill_again_and_again(root / "kills", args.kills, args.seed, console)
        except KeyboardInterrupt:
            console.print(table)
            return 130
    if table.rows:
        console.print(table)
    for line in failed:
        console.print(f"[red]{line}")
    return 1 if failed or not survived else 0
