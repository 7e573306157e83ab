"""Imports without garbage collection, and everything after them with it."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

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


BLOCK = "from recipes.runner.quick_imports import quick_imports\nwith quick_imports():\n    "


def _python(*args: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=600, env=env)


def test_garbage_is_collected_after_the_imports_and_not_in_them() -> None:
    done = _python("-c", textwrap.dedent(SCRIPT))
    assert done.returncode == 0, done.stderr


def test_ctrl_c_in_the_imports_ends_in_silence() -> None:
    done = _python("-c", BLOCK + "raise KeyboardInterrupt")
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
    # Before the imports that take seconds.
    script = "import sys; assert not sys.modules.keys() & {'torch', 'lightning', 'numpy', 'rich'}"
    done = _python("-c", BLOCK + script, *args, env={**os.environ, "LOCAL_RANK": rank})
    assert (done.returncode, done.stdout, done.stderr) == (0, "loading PyTorch and Lightning ...\n" * says, "")


def test_nothing_is_said_as_a_command_ends_but_of_a_broken_import() -> None:
    done = _python("-c", BLOCK + "import no_such_module")
    assert (done.returncode, "No module named 'no_such_module'" in done.stderr) == (1, True)
    done = _python("-W", "ignore", "-m", "recipes.mnist", "--helo")
    assert (done.returncode, done.stderr) == (2, "error: there is no flag --helo; did you mean --help?\n")


def test_help_imports_no_tensorboard() -> None:
    done = _python("-X", "importtime", "-m", "recipes.mnist", "--help")
    assert "--max-epochs" in done.stdout
    assert "| torch\n" in done.stderr
    assert not re.search(r"\| +tensorboard$", done.stderr, re.MULTILINE)
