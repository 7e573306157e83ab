"""Imports without garbage collection, and everything after them with it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.agents import wait_until
from tests.support.nodes import Program

SCRIPT = """
    import gc
    import weakref

    from recipes.runner.start import quick_imports

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


ANSWER = """
import sys
from recipes.__main__ import main

try:
    main()
finally:
    slow = {'torch', 'lightning', 'pytorch_lightning', 'torchvision', 'numpy', 'jsonargparse'} & sys.modules.keys()
    sys.stderr.write(''.join(f'{name} was imported' for name in slow))
"""
"""The console command; it says which of the packages were imported that take seconds."""

BLOCK = "from recipes.runner.start import quick_imports\nwith quick_imports():\n    "


def _python(*args: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=600, env=env)


def test_garbage_is_collected_only_after_the_imports() -> None:
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


def test_only_a_broken_import_prints_as_a_command_ends() -> None:
    done = _python("-c", BLOCK + "import no_such_module")
    assert (done.returncode, "No module named 'no_such_module'" in done.stderr) == (1, True)
    done = _python("-W", "ignore", "-m", "recipes.mnist", "--helo")
    assert (done.returncode, done.stderr) == (2, "error: there is no flag --helo; did you mean --help?\n")


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        ("mnist --help", 0, "usage: lightning-recipes mnist ["),
        ("resnet predict -h", 0, "usage: lightning-recipes resnet ["),
        ("seq2seq --help-all", 0, "usage: lightning-recipes seq2seq ["),
        ("mnist --version", 0, "lightning-recipes "),
        ("mnist --max-epoch 3", 2, "error: there is no flag --max-epoch; did you mean --max-epochs?\n"),
        ("mnist test --zzzzzz", 2, "error: there is no flag --zzzzzz; --help-all lists the flags\n"),
        ("resnet --benchmark", 2, "error: there is no flag --benchmark; did you mean --trainer.benchmark?\n"),
        ("seq2seq --no-num-classes", 2, "error: there is no flag --no-num-classes; it is a flag of mnist, resnet\n"),
        ("mnist --callbacks=1", 2, "error: there is no flag --callbacks: a program passes them to run() or fit()\n"),
    ],
)
def test_a_question_is_answered_before_torch_is_imported(args: str, status: int, says: str) -> None:
    done = _python("-c", ANSWER, *args.split())
    assert done.returncode == status, done.stderr
    if status:
        assert (done.stdout, done.stderr) == ("", says)
    else:
        assert (done.stdout[: len(says)], done.stderr) == (says, "")


@pytest.mark.parametrize("args", ["--trainer.benchmrk true", "tets --help", "--no-sync-bn", "--config a.yaml"])
def test_what_is_no_wrong_flag_is_left_to_the_parser(args: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = _python("-c", ANSWER, "mnist", *args.split(), env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stderr.startswith("torch was imported")


SLOW_IMPORTS = """
from recipes.runner.start import quick_imports

with quick_imports():
    import time
    from pathlib import Path

    Path("imports").touch()
    while not Path("signaled").exists():
        time.sleep(0.05)
    from datamodules import MNISTDataModule
    from recipes import MNISTClassifier, run

run(MNISTClassifier, MNISTDataModule)
"""


def test_a_signal_is_kept_while_the_program_imports(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SLOW_IMPORTS)
    program = Program(tmp_path, "run", ["program.py", "--dataset", "digits"])
    wait_until((tmp_path / "imports").exists, "the imports have begun")
    os.kill(program.process.pid, signal.SIGUSR1)
    (tmp_path / "signaled").touch()
    ended = program.wait()
    assert ended.status == 128 + signal.SIGUSR1, ended
    assert "ended by SIGUSR1" in ended.out + ended.err
    assert not (tmp_path / "runs").exists(), "nothing was trained"


def test_the_help_may_be_cut_off_by_its_reader() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        command = [sys.executable, "-m", "recipes.mnist", "--help-all"]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, ""), "as in --help-all | head"
