"""Known hashes of weights; ``lightning-recipes goldens`` trains each recipe in three ways and compares the weights.

On any machine, the three ways of a training must end with the same hash. If ``goldens.json`` has a row for the kind of
processor, this hash must equal the hash in the row.
"""

import argparse
import datetime
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from datamodules.errors import RunFailedError, UserError
from recipes.registry import recipe_class
from recipes.runner.errors import print_error, rank_zero_print
from recipes.runner.flags import RunClasses
from recipes.runner.machine import bf16_unit
from recipes.runner.report import print_pairs
from recipes.runner.run import fit
from recipes.runner.saved_run import processor, versions, write_text
from recipes.runner.verify import read_saves

GOLDENS = Path(__file__).with_name("goldens.json")
TRAININGS = (
    "mnist --dataset digits --max-steps 20 --batch-size 64 --global-batch-size 128 --precision 32-true",
    "mnist --dataset digits --max-steps 20 --batch-size 64 --global-batch-size 128 --precision bf16-mixed",
    "resnet --dataset digits --max-steps 6 --batch-size 16 --global-batch-size 32 --precision 32-true",
    "seq2seq --max-steps 10 --batch-size 16 --global-batch-size 32 --precision 32-true",
)
"""Trainings on the bundled data: a recipe with its flags."""
WAYS = {
    "one device": ("--devices 1",),
    "two devices": ("--devices 2",),
    "stopped on two, resumed on one": ("--devices 2 --max-steps 3", "--devices 1 --resume auto"),
}
"""The flags of the commands of each way."""
# The rate of a constant schedule does not depend on the length of the run, so the stopped run may be shorter.
_ALWAYS = "--name run --accelerator cpu --threads 1 --seed 1 --schedule constant --logger none --no-enable-progress-bar"


@dataclass(frozen=True)
class Golden:
    """Hashes on one kind of processor.

    Args:
        processor: the maker and the instruction sets, on which the bits depend.
        model: the name of the processor.
        versions: versions of the packages by name.
        date: the day of the measurement.
        hashes: the SHA-256 of the weights by training, its first 12 digits.
    """

    processor: str
    model: str
    versions: dict[str, str]
    date: str
    hashes: dict[str, str]


def processor_kind() -> tuple[str, str]:
    """Return the kind of this processor, on which the bits depend, and the name of its model."""
    maker, model = processor()
    parts = (maker, torch.backends.cpu.get_cpu_capability(), bf16_unit())
    return " ".join(part for part in parts if part), model


def read_goldens(path: Path = GOLDENS) -> list[Golden]:
    """Read the rows of a file; without a file, return an empty list.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return [Golden(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no file of known hashes: {error}") from error


def golden_of(kind: str, versions: dict[str, str], rows: list[Golden]) -> Golden | None:
    """Return the row of a kind of processor: with the same versions if there is one, else the newest; or None."""
    of_kind = [row for row in rows if row.processor == kind]
    return max(of_kind, key=lambda row: (row.versions == versions, row.date), default=None)


def train(training: str, way: str, folder: Path) -> str:
    """Train in a folder in one of `WAYS`, and return the first 12 digits of the hash of the weights.

    Raises:
        RunFailedError: a run failed.
    """
    name, *flags = training.split()
    recipe = recipe_class(name)
    assert recipe.data_class is not None
    parser = RunClasses(recipe, recipe.data_class).parser()
    for flags_of_way in WAYS[way]:
        settings = parser.parse([*_ALWAYS.split(), *flags, *flags_of_way.split()]).typed
        try:
            fit(name, run_dir=str(folder), verbose=False, **settings)
        except (RunFailedError, UserError) as error:
            raise RunFailedError(f"{training} {flags_of_way}: {error}") from error
    saves = read_saves(folder / name / "run")
    (sha256,) = saves[max(saves)].hashes
    return sha256[:12]


def measure() -> tuple[Golden, bool]:
    """Train everything and print a line for each run.

    Returns:
        The row of this machine, and whether the ways of each training end with one hash.
    """
    kind, model = processor_kind()
    packages = {name: version for name, version in versions().items() if name in ("torch", "lightning")}
    print_pairs({"processor": f"{kind} ({model})", **packages, "each run": "on one thread in each process"})
    hashes = {}
    is_one_hash = True
    for training in TRAININGS:
        rank_zero_print(f"\n{training}")
        of_ways: dict[str, str] = {}
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="lightning-recipes-") as folder:
                of_ways[way] = train(training, way, Path(folder))
            rank_zero_print(f"  {way:<{max(map(len, WAYS))}}  {of_ways[way]}")
        hashes[training] = of_ways["one device"]
        is_one_hash &= len(set(of_ways.values())) == 1
    return Golden(kind, model, packages, datetime.date.today().isoformat(), hashes), is_one_hash


def differences_from(own: Golden, row: Golden | None) -> dict[str, str]:
    """Return for each training of a row that this machine has trained the difference in words; "" if the hashes agree.

    The text names the differences between the two machines as the likely cause.
    """
    if row is None:
        return {}
    before = {"processor": row.model, **row.versions}
    now = {"processor": own.model, **own.versions}
    changed = [f"{name} is {now[name]}, and was {before.get(name)}" for name in now if now[name] != before.get(name)]
    cause = "; ".join(changed) or "the processor, the versions and the number of threads are the same"
    return {
        training: "" if own.hashes[training] == sha256 else f"expected {sha256}: {cause}"
        for training, sha256 in row.hashes.items()
        if training in own.hashes
    }


def write_golden(own: Golden, path: Path) -> None:
    """Add the row of this machine to a file; it replaces a row of the same processor and versions."""
    others = [row for row in read_goldens(path) if (row.processor, row.versions) != (own.processor, own.versions)]
    rows: list[Any] = [asdict(row) for row in sorted([*others, own], key=lambda row: (row.processor, row.date))]
    write_text(path, json.dumps(rows, indent=1) + "\n")


def main(args: list[str], program: str) -> int:
    """Run the command, and return its status: 1 if a hash differs from the expected hash."""
    parser = argparse.ArgumentParser(f"{program} goldens", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--write", type=Path, metavar="FILE", help="add this machine's row to a file of known hashes")
    options = parser.parse_args(args)
    try:
        rows = read_goldens()
        own, is_one_hash = measure()
        if options.write:
            write_golden(own, options.write)
    except (RunFailedError, UserError) as error:
        print_error(f"error: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    row = golden_of(own.processor, own.versions, rows)
    compared = differences_from(own, row)
    rank_zero_print("")
    for training, difference in compared.items():
        rank_zero_print(f"differs: {training}: {difference}" if difference else f"holds: {training}")
    if row is None:
        rank_zero_print(f"no hashes of {own.processor} are known: nothing to compare these with")
    if not is_one_hash:
        print_error("error: the ways of a training have ended with several hashes; expected one")
    return int(not is_one_hash or any(compared.values()))
