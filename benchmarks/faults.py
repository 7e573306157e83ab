"""Injects faults into small runs and checks their recovery: ``python -m benchmarks.faults`` prints a table.

After a fault, the same command line is started again. It has to end with weights that are bit-identical to those of an
undisturbed run. With ``--random N``, runs of N random settings are ended at random moments instead.
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from typing_extensions import override

from benchmarks.harness.processes import ROOT, free_port
from benchmarks.harness.recovery_picture import picture
from benchmarks.harness.tiny_recipes import TINY_RECIPES
from recipes import run as run_recipe

__all__ = ["FAULTS", "FaultCase", "Faulty", "main"]

SAVE_EVERY, LIMIT = 5, 180.0
"""Updates between two saves, and the time limit of a run in seconds."""


@dataclass(frozen=True)
class Fault:
    """Fault that is injected into a process of a run.

    Args:
        folder: folder for the files ``updates``, the number of updates done, and ``injected``, the time of the fault.
        recipe: a key of `TINY_RECIPES`.
        kind: a key of `KINDS`, disk, nan, or nothing.
        moment: start, step, update, validation or save.
        at: number of updates after which the fault happens.
        rank: rank of the process; -1 is every process.
    """

    folder: str
    recipe: str
    kind: str = "nothing"
    moment: str = "update"
    at: int = 0
    rank: int = -1


KINDS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


def limit_files(size: int) -> None:
    """Limit the size of files in bytes, which acts like a full disk; -1 removes the limit."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size < 0 else size, hard))


class Faulty(pl.Callback):
    """Callback that injects a fault, and records the progress of the run in files."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.folder = fault, Path(fault.folder)
        self._started_again = (self.folder / "injected").exists()

    def _mark(self, name: str, text: str) -> None:
        beside = self.folder / f"{name}.{os.getpid()}"
        beside.write_text(text)
        beside.replace(self.folder / name)

    def _inject(self, trainer: pl.Trainer, module: pl.LightningModule, moment: str) -> None:
        fault = self.fault
        if fault.kind == "nothing" or fault.moment != moment or fault.rank not in (-1, trainer.global_rank):
            return
        if trainer.global_step < fault.at or (self.folder / "injected").exists():
            return
        self._mark("lost", str(trainer.global_step))
        self._mark("injected", str(time.time()))
        if fault.kind == "nan":
            next(module.parameters()).data.fill_(float("nan"))
        elif fault.kind == "raise":
            raise RuntimeError("this step is broken")
        elif fault.kind == "disk":
            limit_files(1000)
        elif moment == "save" and fault.kind == "kill":
            threading.Thread(target=self._kill_while_writing, daemon=True).start()
        else:
            os.kill(os.getpid(), KINDS[fault.kind])

    def _kill_while_writing(self) -> None:
        while not any(self.folder.glob("runs/*/*/checkpoints/.*.part")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._inject(trainer, pl_module, "start")

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._inject(trainer, pl_module, "step")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.is_global_zero:
            self._mark("updates", str(trainer.global_step))
            goes_on = self._started_again or (self.fault.kind == "disk" and trainer.global_step > self.fault.at)
            if goes_on and not (self.folder / "recovered").exists():
                self._mark("recovered", str(time.time()))
        if self.fault.kind == "disk" and trainer.global_step > self.fault.at:
            limit_files(-1)
        self._inject(trainer, pl_module, "update")

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._inject(trainer, pl_module, "validation")

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        self._inject(trainer, pl_module, "save")


@dataclass(frozen=True)
class FaultCase:
    """Fault and its expected outcome.

    Args:
        fault: fields of `Fault`.
        message: regular expression of the message that the run has to print.
        status: expected exit status; for a signal, 128 + its number, as in a shell.
        lost: greatest number of updates that may be lost; None for any number.
        world_size: number of processes.
        manual_launch: whether each process has a command of its own, as on several nodes.
        damage: function that damages last.ckpt after the fault.
        resumed: regular expression of what the resumed run has to print.
        more: further flags of the run with the fault.
        restarts: how often the run's agent may restart the processes; the command is not started again then.
    """

    fault: dict[str, Any]
    message: str = ""
    status: int = 1
    lost: int | None = SAVE_EVERY
    world_size: int = 1
    manual_launch: bool = False
    damage: Callable[[Path], None] | None = None
    resumed: str = ""
    more: tuple[str, ...] = ()
    restarts: int = 0


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


_KILL: dict[str, Any] = {"kind": "kill", "at": 17, "rank": 0}
_LATE: dict[str, Any] = {"kind": "kill", "at": 34}  # In the second epoch, when there is a checkpoint besides last.ckpt.
_TERM: dict[str, Any] = {"kind": "term", "at": 17}
_KILLED = r"error: rank \d \(node \d, .*\) was killed by SIGKILL"

FAULTS: dict[str, FaultCase] = {
    "kill -9 at the start": FaultCase({"kind": "kill", "moment": "start"}, status=137, lost=0),
    "kill -9 in training": FaultCase(_KILL, status=137),
    "kill -9 in validation": FaultCase(_KILL | {"moment": "validation"}, status=137, lost=2 * SAVE_EVERY),
    "kill -9 during a save": FaultCase(_KILL | {"moment": "save"}, status=137),
    "SIGTERM at the start": FaultCase({"kind": "term", "moment": "start"}, status=143, lost=0),
    "SIGTERM in training": FaultCase(_TERM, "resume with", 143, 0),
    "SIGTERM in validation": FaultCase(_TERM | {"moment": "validation"}, "resume with", 143, 0),
    "SIGTERM during a save": FaultCase(_TERM | {"moment": "save"}, "resume with", 143, 0),
    "SIGTERM to rank 1 of 2": FaultCase(_TERM | {"rank": 1}, "resume with", 143, 0, world_size=2),
    "kill -9 of rank 1 of 2": FaultCase(_KILL | {"rank": 1}, _KILLED, world_size=2),
    "kill -9 of rank 1's node": FaultCase(_KILL | {"rank": 1}, "lost its connection", world_size=2, manual_launch=True),
    "kill -9 in training, started again": FaultCase(_KILL, _KILLED, 0, restarts=1),
    "kill -9 in validation, started again": FaultCase(
        _KILL | {"moment": "validation"}, _KILLED, 0, 2 * SAVE_EVERY, restarts=1
    ),
    "kill -9 during a save, started again": FaultCase(_KILL | {"moment": "save"}, _KILLED, 0, restarts=1),
    "kill -9 of rank 1 of 2, started again": FaultCase(_KILL | {"rank": 1}, _KILLED, 0, world_size=2, restarts=1),
    "kill -9 of rank 1's node, started again": FaultCase(
        _KILL | {"rank": 1}, "resuming from", 0, world_size=2, manual_launch=True, restarts=1
    ),
    "node cut off": FaultCase(
        {"kind": "stop", "at": 17, "rank": 1},
        r"(?i)timed? ?out|does not answer",
        world_size=2,
        manual_launch=True,
        more=("--collective-timeout", "10"),
    ),
    "exception in rank 1's step": FaultCase(
        {"kind": "raise", "moment": "step", "at": 17, "rank": 1}, r"error: rank 1 .*this step is broken", world_size=2
    ),
    "last.ckpt cut off": FaultCase(_LATE, "", 137, None, damage=_truncate, resumed=r"last\.ckpt is skipped"),
    "last.ckpt with a flipped bit": FaultCase(_LATE, "", 137, None, damage=_flip, resumed="it is damaged"),
    "disk full at a save": FaultCase(
        {"kind": "disk", "moment": "save", "at": 10, "rank": 0}, r"was not saved \(.*\); .* training continues", 0, 0
    ),
    "NaN in the weights": FaultCase({"kind": "nan", "at": 12}, "the run has diverged: .* NaN"),
}
"""All faults, by name."""


SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "each": {
        "--check-val-every-n-epoch": ("2",),
        "--ema": ("0.9",),
        "--gradient-clip-val": ("0.1",),
        "--label-smoothing": ("0.1",),
        "--log-every-n-steps": ("0", "3"),
        "--max-steps": ("30",),
        "--optimizer": ("sgd", "adamw", "nadam", "rmsprop", "adagrad"),
        "--overfit-batches": ("3",),
        "--patience": ("1",),
        "--precision": ("64-true", "bf16-mixed"),
        "--reload-dataloaders-every-n-epochs": ("1",),
        "--save-every": ("1 steps", "4 steps", "1 epochs"),
        "--save-top-k": ("0", "2", "-1"),
        "--schedule": ("constant", "cosine", "multistep", "plateau"),
        "--val-check-interval": ("0.5", "5"),
        "--warmup": ("10%", "7 steps", "1 epochs"),
    },
    "mnist": {"--balance": ("loss", "sampler"), "--flip": ("true",), "--network": ("classic", "tutorial")},
    "resnet": {
        "--augment": ("none", "standard"),
        "--bn": ("eval",),
        "--cutmix": ("1",),
        "--freeze-until": ("layer3", "fc"),
        "--layer-lr-decay": ("0.8",),
        "--mixup": ("0.2",),
    },
    "seq2seq": {"--dropout": ("0", "0.3"), "--network": ("transformer",), "--subwords": ("none",)},
}
"""Flags and values that `--random` draws from, for all recipes ("each") and for one."""


class Ended(NamedTuple):
    """Exit status of a run, as in a shell, and the output of its first process."""

    status: int
    output: str

    @property
    def tail(self) -> str:
        """End of the output, in one line."""
        return " / ".join(self.output.strip().splitlines()[-3:])[-300:]


@dataclass(frozen=True)
class Run:
    """Run of a recipe in a folder, and how it is launched."""

    recipe: str
    folder: Path
    world_size: int = 1
    manual_launch: bool = False
    threads: int = 1

    def command(self, *more: str) -> list[str]:
        """Return the command line."""
        devices = 1 if self.manual_launch else self.world_size
        flags = "--limit-train-batches 21 --limit-test-batches 4 --max-epochs 2 --global-batch-size 64"
        flags += f" --batch-size {64 // self.world_size} --devices {devices} --name faulty --resume auto --logger csv"
        flags += f" --threads {self.threads} --accelerator cpu --precision 32-true --enable-progress-bar false"
        run_flags = ["--save-every", f"{SAVE_EVERY} steps", "--run-dir", str(self.folder / "runs")]
        program = [sys.executable, "-W", "ignore", "-m", "benchmarks.faults"]
        return [*program, *TINY_RECIPES[self.recipe].flags, *flags.split(), *run_flags, *more]

    def start(self, fault: dict[str, Any], more: Sequence[str] = ()) -> list["subprocess.Popen[str]"]:
        """Start the processes of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fault = {"folder": str(self.folder), "recipe": self.recipe, **fault}
        environment = os.environ | {"FAULT": json.dumps(fault), "PYTHONPATH": str(ROOT)}
        commands = [self.command(*more)]
        if self.manual_launch:
            nodes = ["--num-nodes", str(self.world_size), "--master-addr", "127.0.0.1"]
            nodes += ["--master-port", str(free_port())]
            commands = [self.command(*nodes, "--node-rank", str(n), *more) for n in range(self.world_size)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return [
            subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True, **pipes)
            for command in commands
        ]

    def finish(self, processes: Sequence["subprocess.Popen[str]"]) -> Ended:
        """Wait for the first process, and kill the others, such as those of a stopped node."""
        first, *other_processes = processes
        try:
            output = first.communicate(timeout=LIMIT)[0]
        except subprocess.TimeoutExpired:
            os.killpg(first.pid, signal.SIGKILL)
            output = f"{first.communicate()[0]}\nstill there after {LIMIT:.0f} s"
        for process in other_processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return Ended(128 - first.returncode if first.returncode < 0 else first.returncode, output)

    def complete(self, more: Sequence[str] = ()) -> Ended:
        """Run without a fault to the end."""
        return self.finish(self.start({}, more))

    @property
    def last(self) -> Path:
        """Checkpoint that each save replaces."""
        return self.folder / "runs" / self.recipe / "faulty" / "checkpoints" / "last.ckpt"

    def digest(self) -> str:
        """Return the SHA-256 of the weights in last.ckpt."""
        weights, digest = torch.load(self.last, weights_only=True)["state_dict"], hashlib.sha256()
        for name in sorted(weights):
            digest.update(name.encode() + weights[name].contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def scores(self) -> dict[str, float]:
        """Scores in results.json."""
        scores: dict[str, float] = json.loads((self.last.parents[1] / "results.json").read_text())["scores"]
        return scores


def undisturbed(run: Run) -> str:
    """Return the digest of a run without a fault."""
    if (ended := run.complete()).status:
        raise SystemExit(f"the undisturbed run failed: {ended.tail}")
    return run.digest()


class Outcome(NamedTuple):
    """Outcome of a fault."""

    wrong: list[str]
    """Differences from the expectation."""
    ended_after: float
    """Seconds from the fault to the end of the command."""
    updates_after: float
    """Seconds from the fault to the next update, if the command is started again as soon as it has ended."""
    repeated: int
    """Number of updates that are repeated."""


def run_case(case: FaultCase, run: Run, reference: str) -> Outcome:
    """Inject a fault, start the command again unless the run restarts by itself, and compare the weights."""
    more = (*case.more, *(("--max-restarts", str(case.restarts)) if case.restarts else ()))
    ended, wrong, at_end = run.finish(run.start(case.fault, more)), list[str](), time.time()
    if not (run.folder / "injected").exists():
        wrong.append("the fault did not happen")
    # With several processes, the agent exits with status 1 if a worker was killed.
    if ended.status != (1 if case.status == 137 and run.world_size > 1 else case.status):
        wrong.append(f"exit status {ended.status}")
    if not re.search(case.message, ended.output, re.DOTALL):
        wrong.append(f"no match for {case.message!r} in: {ended.tail}")
    done = int(marker.read_text()) if (marker := run.folder / "lost").exists() else 0
    if case.damage is not None:
        case.damage(run.last)
    if not case.restarts:
        ended = run.complete()
    resumed_after = re.search(r"resuming from .* after ([\d,]+) updates", ended.output)
    finished = re.search("the run in .* has finished", ended.output)
    repeated = 0 if finished else max(0, done - (int(resumed_after[1].replace(",", "")) if resumed_after else 0))
    if case.lost is not None and repeated > case.lost:
        wrong.append(f"{repeated} updates lost, at most {case.lost} may be")
    if not re.search(case.resumed, ended.output):
        wrong.append(f"no match for {case.resumed!r} in: {ended.tail}")
    if ended.status or run.digest() != reference:
        wrong.append(f"other weights than undisturbed, or none: {ended.tail}")
    times = [run.folder / name for name in ("injected", "recovered")]
    broken, recovered = (float(path.read_text()) if path.exists() else math.nan for path in times)
    return Outcome(wrong, at_end - broken, recovered - broken, repeated)


def run_random(draw: random.Random, recipe: str, folder: Path) -> tuple[str, bool, str]:
    """Run random settings on one device, on two devices, and ended at a random moment and resumed.

    Returns:
        The flags; whether all runs have bit-identical weights and scores, or the same error; and a description.
    """
    known = SETTINGS["each"] | SETTINGS[recipe]
    flags = ["--batch-size", draw.choice(("32", "23"))]
    for name in draw.sample(sorted(known), 6):
        flags += [name, draw.choice(known[name])]
    runs = [Run(recipe, folder / "one", 1), Run(recipe, folder / "two", 2)]
    ended = [run.complete(flags) for run in runs]
    moment, at = draw.choice(("step", "update", "validation", "save")), draw.randrange(42)
    fault = {"kind": draw.choice(("kill", "term")), "moment": moment, "at": at, "rank": draw.choice((0, -1))}
    ended.append((broken := Run(recipe, folder / "broken", draw.choice((1, 2)))).finish(broken.start(fault, flags)))
    resumed = replace(broken, world_size=draw.choice((1, 2)))
    ended[2:] = [resumed.complete(flags)]
    text, statuses = shlex.join(flags), [run_end.status for run_end in ended]
    if any(statuses):
        return text, statuses == [2, 2, 2], f"exit statuses {statuses}: {max(ended).tail}"
    results = [(run.digest(), run.scores) for run in (*runs, resumed)]
    if results[0] == results[1] == results[2]:
        return text, True, "equal to the bit"
    how = f"two devices, or {fault} on {broken.world_size} and a resume on {resumed.world_size}"
    return text, False, f"other weights or scores on {how}: {results}"


def main(argv: Sequence[str] | None = None) -> int:
    """Inject the faults and print a row for each. The exit status is 1 if a run has not recovered as expected."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[""], help="faults whose name contains one of these"
    )
    parser.add_argument("--recipes", nargs="+", choices=TINY_RECIPES, default=list(TINY_RECIPES), help="default: all")
    parser.add_argument("--processes", nargs="+", type=int, metavar="N", help="default: each fault's own number")
    parser.add_argument("--random", type=int, metavar="N", default=0, help="runs of N random settings in their place")
    parser.add_argument("--seed", type=int, metavar="N", default=1, help="of the random settings")
    parser.add_argument("--threads", type=int, metavar="N", default=1, help="of torch in each process")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the seconds, after each row")
    args = parser.parse_args(argv)
    cases = [(name, case) for name, case in FAULTS.items() if any(text in name for text in args.only)]
    if not cases:
        parser.error(f"no fault is called {args.only[0]!r}; there are: {', '.join(FAULTS)}")
    if args.processes:
        cases = [(name, replace(case, world_size=n)) for name, case in cases for n in args.processes]
        cases = [(name, case) for name, case in cases if case.fault.get("rank", 0) < case.world_size]
    if args.random:
        return run_randomly(args.random, args.seed, args.recipes)
    failed, references, outcomes = False, dict[tuple[str, int, bool], str](), dict[tuple[str, str, int], Outcome]()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as root:
        print("| recipe | fault | processes | seconds to its end | to the next update | updates made again | outcome |")
        print("|---|---|---|---|---|---|---|")
        for name, case in cases:
            for recipe in args.recipes:
                how = recipe, case.world_size, case.manual_launch
                if how not in references:
                    folder = Path(root, "-".join(map(str, how)))
                    references[how] = undisturbed(
                        Run(recipe, folder, case.world_size, case.manual_launch, args.threads)
                    )
                folder = Path(root, f"{recipe}-{case.world_size}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}")
                run = Run(recipe, folder, case.world_size, case.manual_launch, args.threads)
                outcome_of_case = run_case(case, run, references[how])
                failed = failed or bool(outcome_of_case.wrong)
                outcomes[name, recipe, case.world_size] = outcome_of_case
                if args.picture:
                    args.picture.write_text(picture(outcomes))
                outcome = "; ".join(outcome_of_case.wrong) or "as it has to be, weights equal"
                seconds = f"{outcome_of_case.ended_after:.1f}", f"{outcome_of_case.updates_after:.1f}"
                cells = recipe, name, case.world_size, *seconds, outcome_of_case.repeated, outcome
                print("|", " | ".join(map(str, cells)), "|", flush=True)
    return int(failed)


def run_randomly(number: int, seed: int, recipes: Sequence[str]) -> int:
    """Run random settings and print a row for each. The exit status is 1 if one of them made a difference."""
    all_alike = True
    print("| recipe | flags | outcome |\n|---|---|---|")
    for i in range(number):
        draw, recipe = random.Random(f"{seed} {i}"), recipes[i % len(recipes)]
        with tempfile.TemporaryDirectory(prefix="benchmarks-") as root:
            flags, alike, outcome = run_random(draw, recipe, Path(root))
        all_alike = all_alike and alike
        print(f"| {recipe} | {flags} | {outcome} |", flush=True)
    return int(not all_alike)


def run_faulty(fault: Fault) -> None:
    """Run the command line of the recipe with the fault in this process."""
    run_recipe(*TINY_RECIPES[fault.recipe].classes(), partial(_callbacks, fault))


def _callbacks(fault: Fault) -> list[pl.Callback]:
    return [Faulty(fault)]


if __name__ == "__main__":
    if "FAULT" in os.environ:
        run_faulty(Fault(**json.loads(os.environ["FAULT"])))
    else:
        sys.exit(main())
