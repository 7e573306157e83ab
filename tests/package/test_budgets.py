"""How long a file and how many flags there may be: growth is a decision."""

from pathlib import Path

import pytest

from recipes import MNISTClassifier, Recipe, ResNetFineTuner, Seq2SeqTranslator
from recipes.runner.flags import RunClasses

ROOT = Path(__file__).parents[2]
PACKAGES = ("recipes", "callbacks", "datamodules", "benchmarks", "tests")
LIMIT = 600
"""Lines of a source file: what a reader takes in at one sitting."""

RECIPES = {MNISTClassifier: 84, ResNetFineTuner: 96, Seq2SeqTranslator: 101}
"""Flags of each recipe."""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_source_file_keeps_to_the_limit_of_lines(package: str) -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    too_long = {path: lines for path, lines in lengths.items() if lines > LIMIT}
    assert not too_long, f"longer than {LIMIT} lines; split what does two things"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_keeps_to_the_limit_of_flags(recipe: type[Recipe]) -> None:
    """A flag more edits this table: before that, which two could be removed?"""
    assert recipe.data_class is not None
    assert len(RunClasses(recipe, recipe.data_class).parser().flags) == RECIPES[recipe]
