"""Lines on terminals of any width: no word is broken, and commands and paths can still be copied."""

import fcntl
import os
import pty
import shlex
import struct
import termios

import pytest

from callbacks.lib.terminal import fit_pairs, fit_rows, fitted, terminal_width, wrap

CHECKPOINT = "runs/mnist/2026-11-22_13-48-56/checkpoints/best.ckpt"
COMMAND = f'python -m recipes.mnist predict --ckpt {CHECKPOINT} --unfreeze \'{{"fc": 3, "layer4": 1}}\' IMAGE.png'
MESSAGE = f"there is no such device; type {COMMAND} or use torchrun: torchrun --standalone -m recipes.mnist"
ROWS = {"data": "MNIST: 55,200 train, 4,800 val, 10,000 test", "test calibration error": "0.32 %", "predict": COMMAND}


def _pasted(lines: list[str]) -> str:
    """What a shell reads of copied lines."""
    return "\n".join(lines).replace("\\\n", "")


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
def test_lines_fit_and_break_between_words_only(width):
    lines = wrap(MESSAGE, width)
    # A path is copied by a double click, so it stays whole.
    assert all(len(line) <= width or CHECKPOINT in line for line in lines)
    assert set(_pasted(lines).split()) == set(MESSAGE.split())


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
def test_a_command_that_is_longer_than_a_line_can_be_pasted(width):
    assert shlex.split(_pasted(wrap(COMMAND, width))) == shlex.split(COMMAND)


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
def test_the_pairs_of_a_table_fit(width):
    lines = "\n".join(name + "\n".join(lines) for name, lines in fit_pairs(ROWS, width)).splitlines()
    assert all(len(line) <= width or CHECKPOINT in line for line in lines)
    begin = next(i for i, line in enumerate(lines) if "python" in line)
    words = shlex.split(_pasted(lines[begin:]))
    assert words[words.index("python") :] == shlex.split(COMMAND)


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_the_rows_of_a_table_fit_and_lose_nothing(width):
    then = ", ".join(f"class{i} 0.0{i}" for i in range(9))
    rows = [{"file": f"scan_{i}.png", "class": "7", "probability": "0.9022", "then": then} for i in range(2)]
    lines = fit_rows(rows, width)
    assert all(len(line) <= width for line in lines)
    assert " ".join(lines).split().count("class8") == 2
    assert max(map(len, fit_rows(rows, None))) > 120


def test_what_goes_into_a_file_is_not_broken(tmp_path):
    with (tmp_path / "log").open("w") as file:
        assert terminal_width(file) is None
        assert fitted(MESSAGE, file) == MESSAGE
    assert [lines for _, lines in fit_pairs(ROWS, None)] == [[value] for value in ROWS.values()]


def test_the_width_is_that_of_the_stream_s_own_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 47, 0, 0))
    with os.fdopen(terminal, "w") as stream:
        assert terminal_width(stream) == 47
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        assert terminal_width(stream) == 80
    os.close(main)
