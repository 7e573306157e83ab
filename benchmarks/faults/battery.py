"""What becomes of a run when something breaks: ``python -m benchmarks.faults`` prints a table of faults.

A fault is injected into a small run of each recipe; then the same command line is started again, and has to end with
the weights of an undisturbed run, to the bit. "Ended" counts from the fault to the end of the last process.
"""

import argparse
import functools
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.faults.cases import EVERY_RECIPE, FAULTS, FaultCase
from benchmarks.faults.kills import kill_again_and_again
from benchmarks.faults.runs import LIMIT, Run, tail, undisturbed_digest
from benchmarks.harness.processes import free_port

__all__ = ["Outcome", "main"]


@dataclass
class Outcome:
    """The outcome of one case; `faults` lists what differs from the expectation."""

    status: int = 0
    ended: float = 0.0
    lost: int | None = None
    equal: bool | None = None
    reported: bool = True
    faults: list[str] = field(default_factory=list)


def run_case(case: FaultCase, recipe: str, folder: Path, undisturbed: str) -> Outcome:
    """Bring a fault about in a folder of its own, type the command again, and compare."""
    files = folder / "files"
    files.mkdir(parents=True)
    if case.files is not None:
        case.files(files)
    run, outcome = Run(recipe, folder, case.world_size, case.manual_launch), Outcome()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        ports = {"TAKEN": str(holder.getsockname()[1]), "FREE": str(free_port())}
        more = [ports.get(flag, flag).replace("FOLDER", str(files)) for flag in case.more]
        began = time.time()
        processes = run.start(case.fault, more, case.shell.replace("FOLDER", str(files)))
        outcome.status, output, in_time = run.finish(processes, after_fault=True)
    mark = folder / "injected"
    outcome.ended = time.time() - (float(mark.read_text()) if mark.exists() else began)
    if case.fault and not mark.exists():
        outcome.faults.append("the fault did not happen")
    if not in_time:
        outcome.faults.append(f"still there after {LIMIT:.0f} s")
    if outcome.status not in case.statuses:
        outcome.faults.append(f"exit status {outcome.status}")
    outcome.reported = re.search(case.message, output, re.DOTALL) is not None
    if not outcome.reported:
        outcome.faults.append(f"no match for {case.message!r} in: {tail(output)}")
    if case.resumes:
        _resume(case, run, outcome, undisturbed)
    outcome.faults += [f"{name} is gone" for name in case.remains if not (files / name).exists()]
    return outcome


def _resume(case: FaultCase, run: Run, outcome: Outcome, undisturbed: str) -> None:
    done = int(marker.read_text()) if (marker := run.folder / "updates").exists() else 0
    if case.damage is not None:
        case.damage(run.checkpoints / "last.ckpt")
    status, output, _ = run.finish(run.start({}))
    if status:
        outcome.faults.append(f"the resumed run ended with {status}: {tail(output)}")
    found = re.search(r"resuming from .* after ([\d,]+) updates", output)
    finished = re.search("the run in .* has finished", output)
    outcome.lost = 0 if finished else done - (int(found[1].replace(",", "")) if found else 0)
    if case.lost is not None and outcome.lost > case.lost:
        outcome.faults.append(f"{outcome.lost} updates lost, at most {case.lost} may be")
    if not re.search(case.resumed, output):
        outcome.faults.append(f"no match for {case.resumed!r} in: {tail(output)}")
    outcome.equal = not status and run.digest() == undisturbed
    if not outcome.equal:
        outcome.faults.append("other weights than undisturbed")


def _row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    if not outcomes:
        return [name, "0", "not tried: needs root", "", "", "", ""]
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


class _Battery:
    """Brings faults about, and keeps the digest of an undisturbed run of each kind."""

    def __init__(self, root: Path, recipes: Sequence[str], repeats: int, console: Console) -> None:
        self.root, self.recipes, self.repeats, self.console = root, recipes, repeats, console
        self.table = Table(
            *("fault", "runs", "exit status", "ended, s", "message", "updates lost", "weights equal"), box=box.MARKDOWN
        )
        self.failed: list[str] = []
        self._digests: dict[tuple[str, int, bool], str] = {}

    def _undisturbed(self, recipe: str, case: FaultCase) -> str:
        how = recipe, case.world_size, case.manual_launch
        if how not in self._digests:
            folder = self.root / "undisturbed-{}-{}-{}".format(*how)
            self._digests[how] = undisturbed_digest(Run(recipe, folder, case.world_size, case.manual_launch))
        return self._digests[how]

    def bring_about(self, name: str, case: FaultCase) -> None:
        """One row of the table: a fault, in each recipe, so often."""
        outcomes = []
        recipes = [recipe for recipe in self.recipes if recipe in case.recipes]
        for recipe in recipes if may_mount() or not case.needs_root else ():
            reference = self._undisturbed(recipe, case) if case.resumes else ""
            place = self.root / f"{recipe}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}"
            tried = [run_case(case, recipe, place / str(n), reference) for n in range(self.repeats)]
            faults = sorted({fault for outcome in tried for fault in outcome.faults})
            self.failed += [f"{recipe}, {name}: {fault}" for fault in faults]
            self.console.print(f"{recipe}, {name}: {'; '.join(faults) or 'as it has to be'}", soft_wrap=True)
            outcomes += tried
        if recipes:
            self.table.add_row(*_row(name, outcomes))


@functools.cache
def may_mount() -> bool:
    """Whether this user may mount file systems in a namespace of his own."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", help="faults whose name contains this")
    parser.add_argument("--recipes", nargs="+", choices=EVERY_RECIPE, default=EVERY_RECIPE, help="default: all")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="of each fault (default: 2)")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="and kill one run so often, at random")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments (default: 1)")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave all runs there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Bring the faults about and print the table; the exit status is 1 where one of them was not survived."""
    parser = _parser()
    args = parser.parse_args(argv)
    chosen = {name: case for name, case in FAULTS.items() if args.only is None or args.only in name}
    if not chosen and not args.kills:
        parser.error(f"no fault is called {args.only!r}; there are: {', '.join(FAULTS)}")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 140)
    with tempfile.TemporaryDirectory() as temporary:
        root = args.keep or Path(temporary)
        battery = _Battery(root, args.recipes, args.repeats, console)
        try:
            for name, case in chosen.items() if args.repeats else ():
                battery.bring_about(name, case)
            for recipe in args.recipes if args.kills else ():
                battery.failed += kill_again_and_again(recipe, root / f"kills-{recipe}", args.kills, args.seed, console)
        except KeyboardInterrupt:
            console.print(battery.table)
            return 130
    if battery.table.rows:
        console.print(battery.table)
    for line in battery.failed:
        console.print(f"[red]{escape(line)}", soft_wrap=True)
    return 1 if battery.failed else 0
