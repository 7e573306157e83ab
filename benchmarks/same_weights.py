"""The drift table: one training in many layouts, by our recipes, with our callbacks, and in four other programs.

    python -m benchmarks.same_weights               # trains everything and prints a line for each run; writes nothing
    python -m benchmarks.same_weights --only mnist "HF Trainer"  # some recipes and programs
    python -m benchmarks.same_weights --threads 2   # the same on two threads in each process
    python -m benchmarks.same_weights --write       # also keeps each run in results/same-weights.json, and draws
    python -m benchmarks.same_weights --draw        # draws and writes the tables of the measured figures again

A layout is a number of processes, a number of loader workers, whole or stopped after 45 of 100 updates and resumed, and
for the recipes folder or archive. Each run ends with a loss on held-out data and the SHA-256 of weights and buffers.
A measurement with ``--write`` that was interrupted goes on where it was: runs are kept as they end. What is drawn are
the recipes and programs that have been measured.

The programs train a small convolutional network with BatchNorm and dropout on the bundled digits; what they have in
common, and the settings of each, stand in ``benchmarks/contenders/same_training.py``. The recipes run through their
command lines. Lightning and Fabric start their processes, OMP_NUM_THREADS is not set, and all programs call
`torch.set_num_threads`; Lightning's launcher then sets cores // processes in each process.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.drift_page import drift_picture, with_tables
from benchmarks.harness.loss_picture import picture
from benchmarks.harness.processes import ROOT, answer_of, run_module

RESULTS = ROOT / "benchmarks" / "results" / "same-weights.json"
PICTURE = ROOT / "docs" / "same-weights.svg"
DRIFT_PICTURE = ROOT / "docs" / "scaling" / "drift.svg"
PAGE = ROOT / "docs" / "scaling" / "drift.md"
DRAWN_PROGRAMS = ("stock Lightning", "lightning-recipes")
DRAWN_RUNS = ("1 process", "2 processes", "4 processes", "2, stopped, then 4")
"""Runs whose losses after each update are drawn on the first page."""


@dataclass(frozen=True)
class Layout:
    """How one training is run.

    Args:
        processes: number of processes.
        then: number of processes that resume the run after its stop; None: it is not stopped.
        workers: number of worker processes of each loader.
        zipped: whether a recipe reads its data from an archive.
    """

    processes: int
    then: int | None = None
    workers: int = 0
    zipped: bool = False

    @property
    def name(self) -> str:
        """Name in tables, as in "2, 2 workers, stopped, then 4"."""
        parts = [str(self.processes)]
        if self.zipped:
            parts.append("zip")
        if self.workers:
            parts.append(f"{self.workers} workers")
        if self.then is not None:
            parts.append("stopped")
        if self.then not in (None, self.processes):
            parts.append(f"then {self.then}")
        if len(parts) == 1:
            parts[0] += " process" if self.processes == 1 else " processes"
        return ", ".join(parts)


def _by_name(*layouts: Layout) -> dict[str, Layout]:
    return {layout.name: layout for layout in layouts}


PROCESSES = (1, 2, 4)
RUNS = _by_name(
    *(Layout(processes) for processes in PROCESSES),
    Layout(2, then=4),
    *(Layout(processes, workers=2) for processes in PROCESSES),
    *(Layout(processes, then=processes) for processes in PROCESSES),
    *(Layout(processes, then=processes, workers=2) for processes in PROCESSES),
)
"""The layouts of each program, by their names."""

RECIPE_RUNS = _by_name(
    *(
        Layout(processes, then, workers, zipped)
        for zipped in (False, True)
        for workers in (0, 2)
        for processes, then in ((1, None), (2, None), (4, None), (1, 2), (2, 4), (4, 1))
    )
)
"""The layouts of a recipe: a stopped run is resumed on another number of processes."""

RECIPES = {
    "mnist": "--data-dir digits --batch-size 32 --global-batch-size 128",
    "resnet": "--data-dir digits --arch resnet20 --weights none --image-size 32 --batch-size 8 --global-batch-size 32",
    "seq2seq": "--data-file pairs.tsv --hidden-size 64 --batch-size 16 --global-batch-size 64 --beam 1",
}
"""The flags of each recipe, which reads the bundled digits as images or the bundled sentences as a file of pairs."""
NAMES = (*RECIPES, "lightning-recipes", "stock Lightning", "Fabric", "Accelerate", "HF Trainer")
"""What is measured: the recipes by their commands, and the programs."""

# Without a validation before the end, the scores are those of the last update.
ALWAYS = (
    "--name run --accelerator cpu --seed 1 --precision 32-true --schedule constant --check-val-every-n-epoch 1000"
    " --logger none --no-enable-progress-bar"
)


def runs_of(name: str) -> dict[str, Layout]:
    """Return the layouts of a program or a recipe.

    Only the recipe of photographs has loader workers. Its stopped runs read the folder without workers or the archive
    with two.
    """
    if name not in RECIPES:
        return RUNS
    if name != "resnet":
        return {run: layout for run, layout in RECIPE_RUNS.items() if not layout.workers}
    return {
        run: layout
        for run, layout in RECIPE_RUNS.items()
        if layout.then is None or layout.zipped == bool(layout.workers)
    }


def train_program(program: str, layout: Layout, threads: int) -> dict[str, Any]:
    """Train in a program, and return the losses after each update and the hash of the weights."""
    from benchmarks.contenders.same_training import LAUNCHED_BY_TORCHRUN, STOP

    def launched(processes: int, *options: str) -> dict[str, Any]:
        command = ["-m", "benchmarks.same_weights", "--train", program, "--processes", str(processes)]
        if program in LAUNCHED_BY_TORCHRUN and processes > 1:
            command[:0] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        settings = ["--workers", str(layout.workers), "--threads", str(threads), "--folder", folder]
        result: dict[str, Any] = answer_of(*command, *settings, *options)
        return result

    with tempfile.TemporaryDirectory() as folder:
        if layout.then is None:
            return launched(layout.processes)
        stopped = launched(layout.processes, "--stop")
        resumed = launched(layout.then, "--resume")
    return {"losses": stopped["losses"][:STOP] + resumed["losses"], "sha256": resumed["sha256"]}


def write_data(folder: Path) -> None:
    """Write the bundled digits as PNG files in class folders, the bundled sentences as a file, and archives of both."""
    import numpy as np
    from PIL import Image

    from datamodules import bundled_digits
    from datamodules.translation.parallel_corpus import bundled_pairs

    for number, (image, label) in enumerate(zip(*bundled_digits(), strict=True)):
        path = folder / "digits" / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).astype(np.uint8)).save(path)
    (folder / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in bundled_pairs()))
    with zipfile.ZipFile(folder / "digits.zip", "w") as archive:
        for path in sorted((folder / "digits").rglob("*.png")):
            archive.write(path, path.relative_to(folder / "digits"))
    with zipfile.ZipFile(folder / "pairs.tsv.zip", "w") as archive:
        archive.write(folder / "pairs.tsv", "pairs.tsv")


def train_recipe(recipe: str, layout: Layout, threads: int, data: Path) -> dict[str, Any]:
    """Train a recipe by its command line, and return the loss after the last update and the hash of the weights."""
    from benchmarks.contenders.same_training import STOP, UPDATES

    flags = f"{ALWAYS} {RECIPES[recipe]} --threads {threads}"
    if recipe == "resnet":
        flags += f" --num-workers {layout.workers}"
    for name in ("digits", "pairs.tsv"):
        flags = flags.replace(f" {name}", f" {data / name}{'.zip' * layout.zipped}")
    with tempfile.TemporaryDirectory() as folder:
        command = [f"recipes.{recipe}", *flags.split(), "--run-dir", folder]
        if layout.then is None:
            run_module(*command, "--devices", str(layout.processes), "--max-steps", str(UPDATES))
        else:
            run_module(*command, "--devices", str(layout.processes), "--max-steps", str(STOP))
            resume = ("--resume", "auto", "--max-steps", str(UPDATES))
            run_module(*command, "--devices", str(layout.then), *resume)
        results = json.loads((Path(folder) / recipe / "run" / "results.json").read_text())
    return {"losses": [results["scores"]["val/loss"]], "sha256": results["weights_sha256"]}


def conditions(threads: int) -> dict[str, Any]:
    """Return what the bits of a measurement depend on: the processor, versions and threads."""
    from benchmarks.contenders.same_training import STOP, UPDATES
    from recipes.goldens import processor_kind

    kind, model = processor_kind()
    return {
        "processor": f"{model} ({kind})",
        "cores": os.cpu_count(),
        "versions": {
            name: version(name).partition("+")[0]
            for name in ("torch", "lightning", "accelerate", "transformers")
            if find_spec(name)
        },
        "threads": threads,
        "updates": UPDATES,
        "stop": STOP,
        "recipes": RECIPES,
        "flags": ALWAYS,
    }


def absent(names: Iterable[str]) -> list[str]:
    """Return the programs among these whose package is not installed."""
    packages = {"Accelerate": "accelerate", "HF Trainer": "transformers"}
    return [name for name in names if name in packages and not find_spec(packages[name])]


def hexadecimal(loss: float) -> str:
    """Return a float32 in hexadecimal, to the bit.

    Example:
        >>> hexadecimal(0.25), hexadecimal(0.25 + 2**-25)
        ('0x1.000000p-2', '0x1.000002p-2')
    """
    return loss.hex().replace("0000000p", "p")


def kept_results(current: dict[str, Any]) -> dict[str, Any]:
    """Return the kept runs, or none where they were measured under other conditions."""
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if kept.get("conditions") == current:
        return kept
    return {"date": datetime.date.today().isoformat(), "conditions": current, "runs": {}}


def runs_left(names: Iterable[str], kept: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the runs of programs and recipes that are not kept, as (name, layout)."""
    return [(name, run) for name in names for run in runs_of(name) if run not in kept.get(name, {})]


def keep_run(name: str, run: str, row: dict[str, Any], current: dict[str, Any]) -> None:
    """Add a run to the kept ones, in the order of the layouts."""
    from recipes.runner.saved_run import write_text

    kept = kept_results(current)
    rows = kept["runs"].setdefault(name, {})
    rows[run] = row
    kept["runs"][name] = {layout: rows[layout] for layout in runs_of(name) if layout in rows}
    kept["runs"] = {each: kept["runs"][each] for each in NAMES if each in kept["runs"]}
    write_text(RESULTS, json.dumps(kept, indent=1) + "\n")


def measure(names: Iterable[str], threads: int, keep: bool) -> None:
    """Train all layouts of programs and recipes, and print the loss and the hash of each.

    Args:
        names: programs and recipes.
        threads: number of threads in each process.
        keep: whether to keep each run in the results. Runs that an unfinished measurement has kept are left out.
    """
    current = conditions(threads)
    kept = kept_results(current)["runs"] if keep else {}
    left = runs_left(names, kept) or runs_left(names, {})
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name, run in left:
            layout = runs_of(name)[run]
            if name in RECIPES:
                ended = train_recipe(name, layout, threads, Path(folder))
            else:
                ended = train_program(name, layout, threads)
            loss = ended["losses"][-1]
            print(f"{name:18}{run:36}{ended['sha256'][:12]}  loss {loss:.6f}", flush=True)
            row = {"loss": hexadecimal(loss), "sha256": ended["sha256"]}
            if name in DRAWN_PROGRAMS and run in DRAWN_RUNS:
                row["losses"] = [round(each, 5) for each in ended["losses"]]
            if keep:
                keep_run(name, run, row, current)


def first_page_of(results: dict[str, Any]) -> dict[str, Any]:
    """Return the runs that are drawn on the first page: those with a loss for each update."""
    runs = {
        name: {run: row for run, row in results["runs"][name].items() if "losses" in row} for name in DRAWN_PROGRAMS
    }
    return {"programs": runs}


def drawn(results: dict[str, Any], page: str) -> dict[Path, str]:
    """Return what is drawn and written from measured runs: the two pictures and the page, by their paths."""
    programs = {name: rows for name, rows in results["runs"].items() if name not in RECIPES}
    recipes = {name: rows for name, rows in results["runs"].items() if name in RECIPES}
    return {
        PICTURE: picture(first_page_of(results)),
        DRIFT_PICTURE: drift_picture(programs, recipes, results["conditions"]["updates"]),
        PAGE: with_tables(page, results, programs, recipes, [*RECIPE_RUNS, *RUNS]),
    }


def train(args: argparse.Namespace) -> None:
    """Train in this process, and print losses and hash on rank 0."""
    import torch

    from benchmarks.contenders.same_training import PROGRAMS, Job

    job = Job(args.processes, args.workers, args.threads, args.folder, args.stop, args.resume)
    torch.set_num_threads(args.threads)  # Before a program builds its callbacks, which take this number.
    outcome = PROGRAMS[args.train](job)
    if outcome.rank == 0:
        sys.stdout.write(json.dumps({"losses": outcome.losses, "sha256": outcome.sha256()}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch in each process")
    parser.add_argument("--write", action="store_true", help="keep the runs, and write the pictures and the tables")
    parser.add_argument("--draw", action="store_true", help="write the pictures and the tables of the kept runs again")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    for option in ("--processes", "--workers"):
        parser.add_argument(option, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    for flag in ("--stop", "--resume"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    if not args.draw:
        missing = absent(args.only)
        if missing:
            print(f"left out, as not installed: {', '.join(missing)}; pip install -e '.[peers]'")
        measure([name for name in args.only if name not in missing], args.threads, keep=args.write)
    if args.write or args.draw:
        results = json.loads(RESULTS.read_text())
        left = runs_left([*results["runs"], *DRAWN_PROGRAMS], results["runs"])
        if left:
            sys.exit(f"not drawn: {len(left)} runs are not measured yet, such as {': '.join(left[0])}; pass --write")
        for path, text in drawn(results, PAGE.read_text()).items():
            path.write_text(text)


if __name__ == "__main__":
    main()
