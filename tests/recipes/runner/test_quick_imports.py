"""Imports without garbage collection, and everything after them with it."""

import subprocess
import sys
import textwrap

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


def _python(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=600)


def test_garbage_is_collected_after_the_imports_and_not_in_them() -> None:
    done = _python("-c", textwrap.dedent(SCRIPT))
    assert done.returncode == 0, done.stderr


def test_ctrl_c_in_the_imports_ends_in_silence() -> None:
    script = (
        "from recipes.runner.quick_imports import quick_imports\nwith quick_imports():\n    raise KeyboardInterrupt\n"
    )
    done = _python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_broken_import_is_shown() -> None:
    script = (
        "from recipes.runner.quick_imports import quick_imports\nwith quick_imports():\n    import no_such_module\n"
    )
    done = _python("-c", script)
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


def test_nothing_is_said_as_a_command_ends() -> None:
    done = _python("-W", "ignore", "-m", "recipes.mnist", "--helo")
    assert (done.returncode, done.stderr) == (2, "error: there is no flag --helo; did you mean --help?\n")


def test_help_does_not_import_tensorboard() -> None:
    script = (
        "import sys\nfrom datamodules import MNISTDataModule\nfrom recipes import MNISTClassifier, run\n"
        "run(MNISTClassifier, MNISTDataModule, args=['--help'])\nassert 'tensorboard' not in sys.modules\n"
    )
    done = _python("-W", "ignore", "-c", script)
    assert done.returncode == 0, done.stderr
