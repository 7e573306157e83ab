"""Flags of other programs lead to ours, as the page for those who come from them says."""

import re
from pathlib import Path

import pytest

from recipes import MNISTClassifier, Recipe, ResNetFineTuner, Seq2SeqTranslator
from recipes.runner.flags import RunClasses
from recipes.runner.hints import ALIASES, flag_meant, meant, unknown_flag, unsupported_settings

PAGE = Path(__file__).parents[3] / "docs/help/coming-from.md"


@pytest.fixture(scope="module")
def ours() -> set[str]:
    """The flags of all recipes."""
    return {
        name
        for recipe in (MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator)
        for name in RunClasses(recipe, recipe.data_class).parser().flags  # type: ignore[arg-type]
    }


def rows() -> list[tuple[str, str]]:
    """The first two cells of the rows in the tables of the page."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [(row[0], row[1]) for row in cells if len(row) >= 2]


def settings_in(cell: str) -> list[str]:
    """The settings in a cell: --flags, and the arguments of calls."""
    found = re.findall(r"--([a-z][a-z-]*)|`([a-z_0-9]+)(?:=|`)", cell)
    return [(flag or argument).replace("-", "_") for flag, argument in found]


def test_a_flag_of_another_program_leads_to_ours(ours: set[str]):
    tried = 0
    for theirs, right in rows():
        wanted = settings_in(right)
        for name in settings_in(theirs):
            if name in ours or not wanted or "(" in theirs:
                continue
            tried += 1
            found = meant(name, ours)
            assert found is None or found.partition(" ")[0] in wanted, f"{name} leads to {found}, and not to {wanted}"
    assert tried > 20


@pytest.mark.parametrize(
    ("name", "recipe", "hint"),
    [
        ("model", ResNetFineTuner, "arch"),
        ("model", MNISTClassifier, "network"),
        ("fp16", MNISTClassifier, "precision 16-mixed"),
        ("gradient_accumulation_steps", MNISTClassifier, "accumulate"),
        ("max-epoch", Seq2SeqTranslator, "max-epochs"),
        ("batchsize", MNISTClassifier, "batch-size"),
        ("num-classes", Seq2SeqTranslator, None),
        ("log-interval", ResNetFineTuner, "log-every-n-steps"),
        ("early-stopping", MNISTClassifier, "patience"),
        ("zzzzzz", MNISTClassifier, None),
        ("loss_scale", MNISTClassifier, None),
    ],
)
def test_a_name_leads_to_a_flag_that_is_near_or_to_none(name: str, recipe: type[Recipe], hint: str | None):
    expected = f"; did you mean --{hint}?" if hint else ""
    assert flag_meant(name.replace("-", "_"), RunClasses(recipe, recipe.data_class).parser().flags) == expected


def test_what_other_names_stand_for_are_flags(ours: set[str]):
    meanings = {text.partition(" ")[0] for texts in ALIASES.values() for text in texts}
    assert meanings - ours == set()
    assert ALIASES.keys() & ours == set(), "a flag of ours is no other name"
    assert unsupported_settings().keys() & (ours | ALIASES.keys()) == set()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("freeze_until", "there is no flag --freeze-until; it is a flag of resnet"),
        ("pin_memory", "there is no flag --pin-memory: loaders pin their batches where the run is on a GPU"),
        ("quiet", "there is no flag --quiet: --no-enable-progress-bar leaves out the progress"),
        ("cuda", "there is no flag --cuda; did you mean --accelerator cuda?"),
    ],
)
def test_a_flag_of_another_recipe_is_answered_with_the_reason(name: str, error: str):
    flags = RunClasses(MNISTClassifier, MNISTClassifier.data_class).parser().flags  # type: ignore[arg-type]
    assert unknown_flag(name.replace("_", "-"), name, flags, []) == error
    no_cuda = "there is no flag --no-cuda; did you mean --accelerator cpu?"
    assert unknown_flag("no-cuda", "cuda", flags, []) == no_cuda, "it is not the contrary of a switch"
