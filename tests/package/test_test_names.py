"""Tests are found by the name of their module, and say in their own name which behavior they are about."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    path
    for package in ("callbacks", "datamodules", "recipes")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.name.startswith("__")
]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("module", MODULES, ids=_id)
def test_a_module_has_a_test_file_of_its_name_or_names_one(module: Path) -> None:
    own = ROOT / "tests" / module.relative_to(ROOT).with_name(f"test_{module.name}")
    if own.is_file():
        return
    named = re.findall(r"Tested in `(tests/[\w/.]+)`", ast.get_docstring(ast.parse(module.read_text())) or "")
    assert named, f"move its tests to {_id(own)}, or end its docstring with: Tested in `tests/...`."
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("file", FILES, ids=_id)
def test_the_name_of_a_test_is_short_enough_to_read(file: Path) -> None:
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    names = [function.name for function in functions if function.name.startswith("test_")]
    assert [name for name in names if len(name) > 60] == []
    assert [name for name in names if "_and_" in name] == [], "each of two behaviors has a test"
