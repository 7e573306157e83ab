"""Counts the instructions of a training step, which other programs do not change, by valgrind's callgrind.

    python -m benchmarks.instructions               # all contenders, a minute or two each
    python -m benchmarks.instructions "recipe" --json instructions.json

Each contender trains the tiny network of ``training_loop`` in a process of its own, on one thread. The instructions of
100 steps are counted after 20 that are not, with those of loading their batches. The progress line of the recipe is
left out: it is drawn ten times a second, which is nearly each step at the speed of callgrind.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from benchmarks.contenders.loops import Job, Laps, bare_loop, fabric_loop, plain_loop
from benchmarks.contenders.peers import peer_loops
from benchmarks.contenders.recipe_loops import recipe_loop
from benchmarks.harness.bare_trainer import suppress_output
from benchmarks.harness.processes import ROOT
from benchmarks.sections.input_pipeline import find_images, write_files
from benchmarks.sections.training_loop import BARE, BATCH_SIZE, FABRIC, PLAIN, Loop, tiny_network

__all__ = ["LOOPS", "count", "counted", "main"]

OURS = "recipe"
WIDTH = 32
SETTLING = 20
STEPS = 100
LOOPS: dict[str, Loop] = {
    PLAIN: plain_loop,
    OURS: partial(recipe_loop, augment=False, flags=("--no-enable-progress-bar",)),
    FABRIC: fabric_loop,
    BARE: bare_loop,
    **peer_loops(),
}
"""Contenders by name, with the peers that are installed."""


def _callgrind(switch: str) -> None:
    subprocess.run(["callgrind_control", "-i", switch, str(os.getpid())], check=True, capture_output=True)


class _CountedLaps(Laps):
    """Recorder of steps that counts the instructions of those that count."""

    def end_step(self) -> None:
        super().end_step()
        if len(self.ends) in (SETTLING, SETTLING + STEPS):
            _callgrind("on" if len(self.ends) == SETTLING else "off")


def train(name: str, data_dir: str) -> None:
    """Train a contender in this process, which callgrind runs."""
    torch.set_num_threads(1)
    images, labels, _ = find_images(data_dir, (SETTLING + STEPS + 1) * BATCH_SIZE)
    steps = SETTLING + STEPS
    network = partial(tiny_network, WIDTH)
    job = Job(network, images.unsqueeze(1), labels.long(), BATCH_SIZE, steps, SETTLING, "32-true", _CountedLaps)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder, suppress_output():
        if name == OURS:
            write_files(Path(folder), images, labels)
            LOOPS[name](job, root=Path(folder))  # type: ignore[call-arg]
        else:
            LOOPS[name](job)


def count(name: str, data_dir: str) -> float:
    """Return the instructions of a step of a contender.

    Raises:
        RuntimeError: the process has failed, or nothing was counted.
    """
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        output = Path(folder) / "callgrind.out"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={output}"]
        command += [sys.executable, "-m", "benchmarks.instructions", name, "--train", "--data-dir", data_dir]
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-2_000:]}")
        # The program is dumped in parts, one for each time that the counting was switched.
        total = counted(part.read_text(errors="replace") for part in Path(folder).glob("callgrind.out*"))
    if not total:
        raise RuntimeError(f"callgrind has counted nothing of {name}:\n{done.stderr[-2_000:]}")
    return total / STEPS


def counted(parts: Iterable[str]) -> int:
    """Return the instructions in the parts of a dump of callgrind."""
    totals = [re.search(r"^totals: (\d+)", part, re.MULTILINE) for part in parts]
    return sum(int(total[1]) for total in totals if total)


def main(args: list[str] | None = None) -> None:
    """Count each contender, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAMES", help=f"of {', '.join(LOOPS)}; all by default")
    parser.add_argument("--data-dir", default="data", help="where data sets are (default: data)")
    parser.add_argument("--json", type=Path, help="file for the counts")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    unknown = [name for name in options.names if name not in LOOPS]
    if unknown:
        parser.error(f"no contender {unknown[0]!r}: expected {', '.join(LOOPS)}")
    if options.train:
        train(options.names[0], options.data_dir)
        return
    if not shutil.which("callgrind_control"):
        parser.error("callgrind is not installed: install valgrind, as with apt-get install valgrind")
    found: dict[str, float] = {}
    for name in dict.fromkeys([PLAIN, *(options.names or LOOPS)]):
        found[name] = count(name, str(Path(options.data_dir).resolve()))
        ratio = found[name] / found[PLAIN]
        print(f"{name:24} {found[name] / 1e6:6.2f} million instructions a step  {ratio:.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
