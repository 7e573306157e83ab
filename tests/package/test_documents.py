"""What the documents name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path for folder in ("", "recipes/**/", "benchmarks/**/", "docs/**/") for path in ROOT.glob(f"{folder}*.md")
)
_TOP = r"recipes|callbacks|datamodules|benchmarks|tests|\.ci"
_PATH = re.compile(rf"(?<![\w/.-])(?:{_TOP})/[\w./*-]*[\w/]")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")
_ANY = {"NAME", "RECIPE", "letters"}
"""These stand for any name; letters is the recipe that a reader makes of a copy."""


def _paths(document: Path) -> set[tuple[Path, str]]:
    """Where each path starts, and the path: in text from the root, in links from the document."""
    text = document.read_text()
    # `mkdocs build --strict` checks the site's.
    links = [] if ROOT / "docs" in document.parents else _LINK.findall(text)
    return {(ROOT, path) for path in _PATH.findall(_LINK.sub("](", text))} | {(document.parent, path) for path in links}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    missing = [path for start, path in _paths(document) if not _ANY & {*path.split("/")} and not [*start.glob(path)]]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_a_document_runs_exists(document: Path) -> None:
    missing = []
    for module in re.findall(rf"python -m ((?:{_TOP})[\w.]*\w)", document.read_text()):
        file = ROOT.joinpath(*module.split("."))
        exists = file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()
        if not exists and not _ANY & {*module.split(".")}:
            missing.append(module)
    assert missing == []


def _first_column(text: str) -> set[str]:
    """The names in code with which rows of a text's tables begin, without their arguments."""
    return set(re.findall(r"^\| \[?`([\w.]+)", text, re.MULTILINE))


def test_the_hardware_page_names_each_recipe_or_callback() -> None:
    recipes = (ROOT / "README.md").read_text().partition("## Recipes")[2]
    callbacks = (ROOT / "docs" / "callbacks" / "index.md").read_text().partition("## A complete program")[0]
    named = _first_column(recipes) | _first_column(callbacks)
    assert {"recipes.mnist", "recipes.seq2seq", "SeedControl", "TrainingMonitor"} <= named
    assert not named - _first_column((ROOT / "benchmarks" / "HARDWARE.md").read_text())
