"""Help that was printed before is printed without importing torch, and only where nothing has changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.cli import help_cache

ROOT = Path(__file__).parents[3]
CALL = ("python -m recipes.mnist", ["--help"])


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a help text that is kept for a recipe's call."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", type("Spec", (), {"name": "recipes.mnist.__main__"}))
    help_cache.keep_help(*CALL, "some help\n")
    return tmp_path / "lightning-recipes" / "help"


def test_a_text_is_printed_again_unless_call_width_version_or_source_are_others(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert help_cache.cached_help(*CALL) == "some help\n"
    assert len(list(kept.iterdir())) == 1
    for program, args in (
        ("python mine.py", ["--help"]),
        (CALL[0], ["--help-all"]),
        (CALL[0], ["--help", "--lr", "1"]),
    ):
        assert help_cache.cached_help(program, args) is None
    with monkeypatch.context() as changed:
        changed.setenv("COLUMNS", "61")
        assert help_cache.cached_help(*CALL) is None
    main = sys.modules["__main__"]
    others = [(help_cache, "version", str.upper), (help_cache, "_states", list), (main, "__spec__", None)]
    for place, name, value in others:
        with monkeypatch.context() as changed:
            changed.setattr(place, name, value)
            assert help_cache.cached_help(*CALL) is None


def test_a_command_prints_the_same_help_twice_and_imports_nothing_the_second_time(tmp_path: Path) -> None:
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, "-m", "recipes.mnist", "--help"]
    first, second = (subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2))
    assert first.stdout == second.stdout
    assert "--max-epochs" in second.stdout
    assert "| torch\n" in first.stderr
    assert "torch" not in second.stderr


def test_a_folder_that_cannot_be_written_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", type("Spec", (), {"name": "recipes.mnist.__main__"}))
    help_cache.keep_help(*CALL, "some help")
    assert help_cache.cached_help(*CALL) is None
