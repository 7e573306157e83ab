"""How much code there may be: growth is a decision. Whoever needs more lines or flags says in the change what goes."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

from recipes import MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator
from recipes.runner.experiment import Classes
from recipes.runner.run import build_parser

ROOT = Path(__file__).parents[2]
BUDGETS = {
    # Package: lines, and lines of code without blanks, comments and docstrings.
    "recipes": (10_553, 6_665),
    "callbacks": (6_369, 3_858),
    "datamodules": (7_031, 4_320),
    "tests": (22_000, 16_562),
    "benchmarks": (4_381, 3_208),
}
RECIPES = {"mnist": MNISTClassifier, "resnet": ResNetFineTuner, "seq2seq": Seq2SeqTranslator}
FLAGS = Path(__file__).with_name("flags.txt")
"""The flags of the recipes that are not the Trainer's, a line for each, with the recipes that have it."""

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def _lines_of_code(text: str) -> int:
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                held.difference_update(range(child.lineno, (child.end_lineno or 0) + 1))
    return len(held)


def test_lines_that_hold_no_code_are_not_counted_as_code() -> None:
    text = '"""A module\n\nof one function."""\n\n# why\ndef f():\n    """It."""\n    return """a\nb"""\n'
    assert _lines_of_code(text) == 3


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_keeps_to_its_budget_of_lines(package: str) -> None:
    texts = [path.read_text() for path in (ROOT / package).rglob("*.py")]
    lines, code = sum(len(text.splitlines()) for text in texts), sum(map(_lines_of_code, texts))
    most, most_code = BUDGETS[package]
    assert lines <= most, f"{package} has {lines} lines: {most} at most; which go?"
    assert code <= most_code, f"{package} has {code} lines of code: {most_code} at most; which go?"


def test_the_flags_are_those_that_were_decided_on() -> None:
    """A new flag edits `flags.txt`, and a change of that file is a decision."""
    having: dict[str, list[str]] = {}
    for recipe, cls in RECIPES.items():
        names = build_parser(Classes(cls, cls.data_class, tuple), recipe).names
        for flag in {name for title, group in names.items() if title != "Trainer" for name in group}:
            having.setdefault(flag, []).append(recipe)
    assert FLAGS.read_text().splitlines() == [f"{flag}: {', '.join(having[flag])}" for flag in sorted(having)]
