"""Measures the seconds to 99 % on MNIST's test set, of the recipe and of PyTorch's example.

Seconds count from the start of the process and from the first step. Each run is a process with its own seed. Both are
tested after every epoch, which does not count.
"""

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, alternate, available_cores
from benchmarks.harness.processes import answer_of
from benchmarks.sections.input_pipeline import write_files
from datamodules.images.builtin_datasets import find_files, load_digits, read_idx

__all__ = ["run"]

ACCURACY = 0.99
CLASSIC = "classic example"
RECIPE = "recipe"
EPOCHS = {CLASSIC: 14, RECIPE: 1}
FROM_STEP = 40
FROM_START = 10


def find_folder(data_dir: str, root: Path) -> tuple[Path, str]:
    """Write MNIST, or the bundled digits, in torchvision's layout, and return the folder and the name of the data."""
    for folder in (Path(data_dir).expanduser(), Path(data_dir).expanduser() / "mnist"):
        files = find_files("mnist", folder)
        if files:
            parts = {part: (read_idx(files[part][0], 3), read_idx(files[part][1], 1)) for part in ("train", "test")}
            source = "MNIST"
            break
    else:
        parts = load_digits()
        source = "the bundled digits, since no MNIST was found; pass --data-dir FOLDER"
    write_files(root, *parts["train"], test=parts["test"])
    return root, source


def seconds_to_accuracy(
    name: str, folder: Path, accuracy: float, batches: int, threads: int, answers: dict[str, list[dict[str, Any]]]
) -> float:
    """Return the seconds from the start of the process, and add its output to `answers`."""
    seed = len(answers[name]) + 1
    kind = {CLASSIC: "classic", RECIPE: "recipe"}[name]
    start = time.time()
    arguments = [kind, str(folder), seed, accuracy, EPOCHS[name], batches]
    answer = answer_of(
        "-m", "benchmarks.contenders.reach_accuracy", json.dumps(arguments), OMP_NUM_THREADS=str(threads)
    )
    answers[name].append(answer)
    return float(answer["began"] - start + answer["seconds"])


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure both with each seed."""
    threads = options.threads or available_cores()
    seeds = options.rounds(3)
    answers: dict[str, list[dict[str, Any]]] = {CLASSIC: [], RECIPE: []}
    # Quick runs train on a few batches, which reach a low accuracy only.
    accuracy, batches = (0.05, 3) if options.quick else (ACCURACY, -1)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as name:
        folder, source = find_folder(options.data_dir, Path(name))
        measure = partial(
            seconds_to_accuracy, folder=folder, accuracy=accuracy, batches=batches, threads=threads, answers=answers
        )
        timings = alternate({n: partial(measure, n) for n in answers}, seeds, warmup=0, progress=progress)
    steps = {
        name: Spread(tuple(a["seconds"] for a in seed_answers[: timings.rounds]))
        for name, seed_answers in answers.items()
    }
    ratios = {
        "the first step": Spread(tuple(a / b for a, b in zip(steps[CLASSIC].values, steps[RECIPE].values))),
        "the process' start": timings.ratio(CLASSIC, RECIPE),
    }
    rows: dict[str, list[Spread | None]] = {
        name: [steps[name], timings.spread(name), *(ratios.values() if name == RECIPE else (None, None))]
        for name in answers
    }
    reached = all(answer["reached"] for seed_answers in answers.values() for answer in seed_answers)
    goals = [
        Goal(
            f"at least {least} times less than the {CLASSIC} from {since}",
            f"{ratio.median:.1f} times ({ratio.low:.1f} to {ratio.high:.1f})" + ("" if reached else ", not reached"),
            reached and ratio.median >= least,
        )
        for (since, ratio), least in zip(ratios.items(), (FROM_STEP, FROM_START))
    ]
    return Section(
        title=f"time to {ACCURACY:.0%} on the test set",
        header={
            "data": source,
            "threads": f"{threads} of torch, on {available_cores()} cores",
            "precision": "float32 for the classic example, as the command line chooses it for the recipe",
            "repeats": f"{timings.rounds} seeds, a process each",
            "settings": f"recipe: --max-epochs {EPOCHS[RECIPE]}; classic: Adadelta, batch 64, at most {EPOCHS[CLASSIC]}"
            " epochs; both stop at the first epoch's end that has reached it",
        },
        columns=[
            Column("seconds from the first step", ".1f"),
            Column("from process start", ".1f"),
            Column("times less, first step", ".1f"),
            Column("times less, start", ".1f"),
        ],
        rows=rows,
        goals=goals,
        notes=_notes(answers, steps, options.quick),
        interrupted=timings.interrupted,
    )


def _notes(answers: dict[str, list[dict[str, Any]]], steps: dict[str, Spread], quick: bool) -> list[str]:
    notes = []
    for name, seed_answers in answers.items():
        shown = "; ".join(" ".join(f"{100 * a:.2f}" for a in answer["accuracies"]) for answer in seed_answers)
        values = steps[name].values
        spread = f" +- {stdev(values):.1f}" if len(values) > 1 else ""
        notes.append(f"{name}: {mean(values):.1f}{spread} s from the first step; % after each epoch: {shown}")
    missed = [name for name, seed_answers in answers.items() if not all(answer["reached"] for answer in seed_answers)]
    notes += [f"{name} has not reached it with every seed: its seconds are those of all its epochs" for name in missed]
    return [*notes, "quick: three batches to 5 %, of no meaning"] if quick else notes
