"""Imports without garbage collection, and everything after them with it."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from recipes.runner import quick_imports

ROOT = Path(__file__).parents[3]
CALL = ("python -m recipes.mnist", ["--help"])

SCRIPT = """
    import gc
    import weakref

    from recipes.runner.quick_imports import quick_imports

    class Node:
        pass

    def ring():
        node = Node()
        node.itself = node
        return weakref.ref(node)

    with quick_imports():
        assert not gc.isenabled()
        import json
        module = json
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    after = ring()
    gc.collect()
    assert after() is None, "what comes later is collected"
"""


def _python(*args: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=600, env=env)


def test_garbage_is_collected_after_the_imports_and_not_in_them() -> None:
    done = _python("-c", textwrap.dedent(SCRIPT))
    assert done.returncode == 0, done.stderr


def test_ctrl_c_in_the_imports_ends_in_silence() -> None:
    script = (
        "from recipes.runner.quick_imports import quick_imports\nwith quick_imports():\n    raise KeyboardInterrupt\n"
    )
    done = _python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "loading PyTorch and Lightning ...\n", "")


@pytest.mark.parametrize(
    ("args", "rank", "says"),
    [
        ([], "0", True),
        (["test", "--ckpt", "best.ckpt"], "0", True),
        ([], "1", False),
        (["--node-rank", "0"], "0", True),
        (["--node-rank=1"], "0", False),
        (["predict", "--ckpt", "best.ckpt"], "0", False),
        (["--print-config"], "0", False),
        (["--help-all"], "0", False),
    ],
)
def test_a_run_says_at_once_that_it_has_started_on_rank_0(args: list[str], rank: str, says: bool) -> None:
    script = "from recipes.runner.quick_imports import quick_imports\nwith quick_imports():\n    "
    # Before the imports that take seconds.
    script += "import sys; assert not sys.modules.keys() & {'torch', 'lightning', 'numpy', 'rich'}"
    done = _python("-c", script, *args, env={**os.environ, "LOCAL_RANK": rank})
    assert (done.returncode, done.stdout, done.stderr) == (0, "loading PyTorch and Lightning ...\n" * says, "")


def test_nothing_is_said_as_a_command_ends_but_of_a_broken_import() -> None:
    script = "from recipes.runner.quick_imports import quick_imports\nwith quick_imports():\n    import no_such_module"
    done = _python("-c", script)
    assert (done.returncode, "No module named 'no_such_module'" in done.stderr) == (1, True)
    done = _python("-W", "ignore", "-m", "recipes.mnist", "--helo")
    assert (done.returncode, done.stderr) == (2, "error: there is no flag --helo; did you mean --help?\n")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a help text that is kept for a recipe's call."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", type("Spec", (), {"name": "recipes.mnist.__main__"}))
    quick_imports.keep_help(*CALL, "some help\n")
    return tmp_path / "lightning-recipes" / "help"


def test_a_text_is_printed_again_unless_call_width_version_or_source_are_others(kept, monkeypatch):
    (path,) = kept.iterdir()
    assert (quick_imports._kept_help(*CALL), path.read_text()) == (path, "some help\n")
    for program, args in (
        ("python mine.py", ["--help"]),
        (CALL[0], ["--help-all"]),
        (CALL[0], ["--help", "--lr", "1"]),
    ):
        assert quick_imports._kept_help(program, args) != path
    with monkeypatch.context() as changed:
        changed.setenv("COLUMNS", "61")
        assert quick_imports._kept_help(*CALL) != path
    main = sys.modules["__main__"]
    others = [(quick_imports, "version", str.upper), (quick_imports, "_PACKAGES", ()), (main, "__spec__", None)]
    for place, name, value in others:
        with monkeypatch.context() as changed:
            changed.setattr(place, name, value)
            assert quick_imports._kept_help(*CALL) != path


def test_help_is_the_same_twice_without_tensorboard_and_the_second_time_without_imports(tmp_path: Path) -> None:
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, "-m", "recipes.mnist", "--help"]
    first, second = (subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2))
    assert first.stdout == second.stdout
    assert "--max-epochs" in second.stdout
    assert "| torch\n" in first.stderr
    assert not re.search(r"\| +tensorboard$", first.stderr, re.MULTILINE)
    assert "torch" not in second.stderr


def test_a_folder_that_cannot_be_written_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", type("Spec", (), {"name": "recipes.mnist.__main__"}))
    quick_imports.keep_help(*CALL, "some help")
