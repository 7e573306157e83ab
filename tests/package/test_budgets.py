"""How long a file and how many flags there may be: growth is a decision."""

from pathlib import Path

import pytest

from recipes import MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator
from recipes.runner.classes import Classes
from recipes.runner.flag_names import flag_names

ROOT = Path(__file__).parents[2]
PACKAGES = ("recipes", "callbacks", "datamodules", "benchmarks", "tests")
LIMIT = 600
"""Lines of a source file: what a reader takes in at one sitting."""

RECIPES = {"mnist": MNISTClassifier, "resnet": ResNetFineTuner, "seq2seq": Seq2SeqTranslator}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_source_file_keeps_to_the_limit_of_lines(package: str) -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    too_long = {path: lines for path, lines in lengths.items() if lines > LIMIT}
    assert not too_long, f"longer than {LIMIT} lines; split what does two things"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_flags_are_those_that_were_decided_on(recipe: str) -> None:
    """A new flag edits `recipes/runner/flag_names.py`, and a change of that file is a decision."""
    cls = RECIPES[recipe]
    assert cls.data_class is not None
    assert flag_names(recipe) == sorted(Classes(cls, cls.data_class).parser(recipe).flags)
