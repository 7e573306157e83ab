"""A user's own folder or file beside a script has the name of one of our packages: one line says what to rename."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# As an editable install of setuptools: our packages are found after everything on the path.
EDITABLE = f"""
import sys
from importlib.machinery import PathFinder

class Editable:
    def find_spec(name, path=None, target=None):
        if name in ("recipes", "callbacks", "datamodules"):
            return PathFinder.find_spec(name, [{str(ROOT)!r}])

sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Editable)
"""


def _own(kind: str, name: str, folder: Path) -> Path:
    """What the user has: a package, a folder without ``__init__.py`` or a single module."""
    place = folder / (f"{name}.py" if kind == "module" else name)
    if kind == "module":
        place.write_text("")
        return place
    place.mkdir()
    (place / ("__init__.py" if kind == "package" else "mine.py")).write_text("")
    return place


def _python(folder: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(EDITABLE)
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["callbacks", "datamodules"])
@pytest.mark.parametrize("kind", ["package", "folder", "module"])
def test_a_command_ends_with_one_line_that_says_what_to_rename(tmp_path: Path, kind: str, name: str) -> None:
    place = _own(kind, name, tmp_path)
    done = _python(tmp_path, "-m", "recipes.mnist", "--help")
    what = "file" if kind == "module" else "folder"
    line = f"error: {place} shadows the package `{name}` of lightning-recipes; rename this {what}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_a_folder_named_recipes_is_named(tmp_path: Path) -> None:
    place = _own("folder", "recipes", tmp_path)
    done = _python(tmp_path, "-m", "recipes.mnist", "--help")
    line = f"error: {place} shadows the package `recipes` of lightning-recipes; rename this folder\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.parametrize("kind", ["package", "folder", "module"])
@pytest.mark.parametrize("statement", ["from recipes import Recipe", "from callbacks import SeedControl"])
def test_a_script_gets_an_import_error_with_that_line(tmp_path: Path, kind: str, statement: str) -> None:
    place = _own(kind, "datamodules", tmp_path)
    (tmp_path / "train.py").write_text(statement)
    done = _python(tmp_path, "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {place} shadows the package `datamodules`")


def test_names_that_are_not_ours_and_our_own_packages_shadow_nothing(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "train.py").write_text("import datamodules, callbacks, recipes\nfrom callbacks import SeedControl")
    assert _python(tmp_path, "train.py").returncode == 0


def test_callbacks_can_be_used_beside_a_folder_of_recipes(tmp_path: Path) -> None:
    _own("package", "recipes", tmp_path)
    (tmp_path / "train.py").write_text("import recipes\nfrom callbacks import SeedControl")
    assert _python(tmp_path, "train.py").returncode == 0
