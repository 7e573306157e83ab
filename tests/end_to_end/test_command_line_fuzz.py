"""Random command lines of the three recipes, always the same ones, end as `tests.support.fuzzing` says."""

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from benchmarks.harness.tiny_recipes import TINY_RECIPES
from tests.support.fuzzing import Grammar, faults_of, grammar_of, prepare_files, random_line, type_in_fork
from tests.support.minimal_recipe import Line
from tests.support.ranks import run_ranks

LINES = 300
TINY = ["--max-epochs", "1", "--limit-train-batches", "1", "--limit-val-batches", "1", "--limit-test-batches", "1"]
TINY += ["--limit-predict-batches", "1", "--accelerator", "cpu", "--precision", "32-true", "--rendezvous-timeout", "2"]
TINY += [
    "--enable-progress-bar",
    "false",
    "--logger",
    "csv",
]  # TensorBoard's images take most of a run's time.


class CrackedLine(Line):
    """A straight line with a flag that no value of which works.

    Args:
        crack: how deep.
    """

    def __init__(self, crack: int = 0, **kwargs: object) -> None:
        if crack:
            raise KeyError(crack)
        super().__init__(**kwargs)


def _faulty_lines(grammars: Sequence[tuple[str, str, Sequence[str]]], count: int, folder: str) -> list[str]:
    """Type random lines, or this rank's part of them, and return those that ended as they must not."""
    rank, ranks = int(os.environ.pop("RANK", "0")), int(os.environ.pop("WORLD_SIZE", "1"))
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        os.environ.pop(name, None)  # Each line is a run of its own.
    made, root = [], Path(folder) / f"rank{rank}"
    for number, (recipe, data, always) in enumerate(grammars):
        grammar, files = grammar_of(recipe, data, always), root / f"files{number}"
        prepare_files(grammar, files)
        made.append((grammar, files))
    faulty = []
    for number in range(rank, count, ranks):
        grammar, files = made[number % len(made)]
        line = random_line(Random(f"line {number}"), grammar)
        shutil.copytree(files, root / "here")
        ended = type_in_fork(grammar, line, root / "here")
        shutil.rmtree(root / "here")
        if faults := faults_of(ended):
            faulty.append(f"{'; '.join(faults)}: {_shown(grammar, line)}\n{ended.err[-2000:]}")
    return faulty


def _shown(grammar: Grammar, line: Sequence[str]) -> str:
    return f"{grammar.recipe} {shlex.join(line)[:2000]!r}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_command_lines_end_with_a_status_and_a_line(tmp_path):
    grammars = [(tiny.recipe, tiny.data, [*TINY, *tiny.flags]) for tiny in TINY_RECIPES.values()]
    faulty = sum(run_ranks(_faulty_lines, 2, grammars, LINES, str(tmp_path), timeout=850), [])
    assert not faulty, "\n\n".join(faulty)


@pytest.mark.slow
def test_a_flag_that_ends_in_a_traceback_is_found(tmp_path):
    recipe, data = "tests.end_to_end.test_command_line_fuzz:CrackedLine", "tests.support.minimal_recipe:Points"
    cracked = (recipe, data, [*TINY, "--no-enable-checkpointing"])
    found = run_ranks(_one_flag, 1, *cracked, "crack", ["0", "1", "x"], str(tmp_path))[0]
    assert found == [[], ["a traceback", "status 1 with 0 lines of error"], []]


def _one_flag(recipe: str, data: str, always: list[str], name: str, values: list[str], folder: str) -> list[list[str]]:
    grammar = grammar_of(recipe, data, always)
    assert name in grammar.types
    here = Path(folder)
    return [faults_of(type_in_fork(grammar, [*always, f"--{name}={value}"], here)) for value in values]
