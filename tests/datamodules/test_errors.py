"""Errors of users with the settings as they spell them, and errors of the system, as one line."""

import errno
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from datamodules.errors import MISSING, RunFailedError, UserError, spelled, spelling_as_flags, system_failure

FLAGS = {"weights", "max_epochs", "weights_skip", "flip"}


@pytest.mark.parametrize(
    ("setting", "in_python", "on_the_command_line"),
    [
        (("weights_skip",), "`weights_skip`", "--weights-skip"),
        (("max_epochs", 2), "max_epochs=2", "--max-epochs 2"),
        (("weights", "FILE"), "weights='FILE'", "--weights FILE"),
        (("weights", "a b"), "weights='a b'", "--weights 'a b'"),
        (("weights", None), "weights=None", "--weights None"),
        (("flip", True), "flip=True", "--flip"),
        (("flip", False), "flip=False", "--no-flip"),
        (("other",), "`other`", "`other`"),
        (("other", "x"), "other='x'", "other='x'"),
    ],
)
def test_a_setting_is_spelled_for_who_asks(setting, in_python, on_the_command_line):
    assert spelled(*setting) == in_python
    with spelling_as_flags(FLAGS):
        assert spelled(*setting) == on_the_command_line
        with ThreadPoolExecutor() as threads:
            assert threads.submit(spelled, *setting).result() == on_the_command_line
    assert spelled(*setting) == in_python


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "too large"),
        ({"setting": "weights"}, "--weights: too large"),
        ({"setting": "max_epochs", "value": 2, "to_type": "pass 1"}, "--max-epochs 2: too large; pass 1"),
    ],
)
@pytest.mark.parametrize("kind", [UserError, RunFailedError])
def test_an_error_keeps_its_text_in_another_process(kind, fields, text):
    with spelling_as_flags(FLAGS):
        error = kind("too large", **fields)
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is kind
    assert str(error) == str(received) == text
    assert received.problem == "too large"
    assert received.setting == fields.get("setting", "")
    assert received.value == fields.get("value", MISSING)
    assert received.to_type == fields.get("to_type", "")


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "too many files are open; allow more, as ulimit -n 65536 does"),
        (RuntimeError("can't start new thread"), "ulimit -u 4096"),
        (MemoryError(), "not enough memory; pass smaller sizes"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "Tried to allocate 2.00 GiB"),
        (OSError(errno.ENOSPC, "No space left on device", "lineage.json"), "lineage.json cannot be written: No space"),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), "(pid 71) is killed by signal"),
    ],
)
def test_each_error_of_the_system_says_what_to_do(error, part):
    assert part in system_failure(error)


@pytest.mark.parametrize("size", [2**45, 2**62])
def test_a_tensor_that_is_too_large_is_one(size):
    with pytest.raises((RuntimeError, TypeError)) as caught:
        torch.empty(size, dtype=torch.float64)
    assert "not enough memory" in system_failure(caught.value)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No file"), RuntimeError("mat1"), ValueError("out of memory")])
def test_other_errors_are_none(error):
    assert system_failure(error) is None


def test_a_user_error_shows_only_the_programs_own_lines(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # Of a module that imports no torch.
    source = "from datamodules.ranges import check_choice\ndef chosen():\n    check_choice('a', 1, ['b'])\nchosen()\n"
    program.write_text(source)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, lines[0]) == (1, "Traceback (most recent call last):")
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{program}", line 4, in <module>',
        f'  File "{program}", line 3, in chosen',
    ]
    assert lines[-1] == "UserError: a=1: expected one of b"
    program.write_text("import datamodules.errors\nraise ValueError('others stay')\n")
    assert subprocess.run([sys.executable, program], capture_output=True, text=True).stderr.endswith("others stay\n")
