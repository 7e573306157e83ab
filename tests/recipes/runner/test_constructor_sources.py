"""The flags in the sources of constructors are those of the imported classes."""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from datamodules.lightning import pl
from recipes import MNISTClassifier, Recipe, ResNetFineTuner, Seq2SeqTranslator
from recipes.runner.command import help_text
from recipes.runner.flags import RunClasses, read_request
from recipes.runner.hints import read_help, read_trainer_parameters

RECIPES = [MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator]

MAIN = """
from typing import Any, Literal

from datamodules import MNISTDataModule
from datamodules.contract import Advanced
from recipes.mnist.recipe import MNISTClassifier

Ink = Literal["black", "blue"]


class Mixin:
    title = "mine"


class Mine(Mixin, MNISTClassifier):
    {docstring}

    trainer_defaults = dict(max_epochs=3)

    def __init__(self, ink: Ink = "blue", *, pages: Advanced[list[int] | None] = None, {own}**kwargs: Any) -> None:
        super().__init__({passed}**kwargs)


if __name__ == "__main__":
    run(Mine, MNISTDataModule)
"""


def printed_by_the_parser(recipe: type[Recipe], flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert recipe.data_class is not None
    assert read_request(RunClasses(recipe, recipe.data_class).parser("program"), recipe, [flag]) is None
    return capsys.readouterr().out


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write the package of a recipe."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, main: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text(main)
        return name

    return write


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_help_is_that_of_the_parser(recipe: type[Recipe], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = read_help(recipe.__module__.removesuffix(".recipe"))
    assert page is not None
    expected = printed_by_the_parser(recipe, flag, capsys)
    assert help_text("program", page, flag == "--help-all") + "\n" == expected


@pytest.mark.parametrize(
    ("name", "docstring", "own", "passed"),
    [
        ("plain", "'''Mine.'''", "", ""),
        ("documented", "'''Learns `ink`.\n\n    Args:\n        ink: of\n            the pen.\n    '''", "", ""),
        ("fixed", "'''Mine.'''", "", "label_smoothing=0.1, num_classes=26, "),
        ("overridden", "'''Mine.'''", "top_k: int = 1, lr: float = 0.3, ", "top_k=top_k, lr=lr, "),
    ],
)
def test_parameters_are_inherited_as_the_parser_inherits_them(
    package: Callable[..., str],
    name: str,
    docstring: str,
    own: str,
    passed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = package(name, MAIN.format(docstring=docstring, own=own, passed=passed))
    page = read_help(written)
    assert page is not None
    expected = printed_by_the_parser(import_module(f"{written}.__main__").Mine, "--help-all", capsys)
    assert help_text("program", page, everything=True) + "\n" == expected


@pytest.mark.parametrize(
    ("name", "own", "passed"),
    [
        ("foreign", "size: np.int64 = 1, ", ""),
        ("computed", "size: int = max(sizes()), ", ""),
        ("untyped", "size=1, ", ""),
        ("popped", "", "lr=kwargs.pop('rate', 0.1), "),
        ("passed_elsewhere", "", "lr=rate_of(**kwargs), "),
    ],
)
def test_a_parameter_hidden_in_the_source_is_left_to_the_parser(
    package: Callable[..., str], name: str, own: str, passed: str
) -> None:
    assert read_help(package(name, MAIN.format(docstring="'''Mine.'''", own=own, passed=passed))) is None


def test_the_parameters_of_the_trainer_are_in_its_source() -> None:
    assert read_trainer_parameters() == [*signature(pl.Trainer).parameters]
