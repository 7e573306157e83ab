"""Standard streams that cannot be written, as a program of its own sees them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
START = "import sys; from recipes.launch.streams import *; secure_streams(); "

needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


def _run(code: str, redirections: str = "", env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run code in a shell's command with redirections."""
    command = f'exec "$0" -c "$1" {redirections}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, START + code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | (env or {}),
    )


@needs_full_device
def test_a_print_to_a_full_disk_is_dropped_and_remembered() -> None:
    code = "print('lost', flush=True); print(unwritten_streams(), output_failure(), file=sys.stderr)"
    done = _run(code, "> /dev/full")
    assert done.returncode == 0
    assert done.stderr == "{'standard output': 'No space left on device'} No space left on device\n"


@needs_full_device
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_still_in_a_buffer_when_the_program_ends_is_no_error(unbuffered: str) -> None:
    done = _run("print('lost'); sys.stdout.write('too')", "> /dev/full", {"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (0, "")


@needs_full_device
def test_a_program_that_only_prints_ends_with_status_1_and_the_reason() -> None:
    done = _run("print('lost'); end_after_printing()", "> /dev/full")
    assert done.returncode == 1
    assert done.stderr == "error: standard output could not be written: No space left on device\n"


@needs_full_device
def test_an_error_goes_to_the_stream_that_can_still_be_written() -> None:
    assert _run("print_error('why')", "2> /dev/full").stdout == "why\n"
    done = _run("print_error('why')", "> /dev/full")
    assert (done.stdout, done.stderr) == ("", "why\n")


def test_a_reader_that_has_seen_enough_is_no_failure_and_no_traceback() -> None:
    code = "[print('x' * 1000) for _ in range(1000)]; print(unwritten_streams(), file=sys.stderr); end_after_printing()"
    done = _run(code, "| head -c 1; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stdout) == (0, "x")
    assert done.stderr == "{'standard output': 'Broken pipe'}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_opened_so_that_no_file_gets_their_number(closed: str, tmp_path: Path) -> None:
    code = (
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print('out', flush=True); print('err', file=sys.stderr);"
        "import os; os.write(2, b'native'); sys.stderr.isatty(); file.write(f'{file.fileno()} {unwritten_streams()}')"
    )
    done = _run(code, closed)
    assert done.returncode == 0
    number, _, unwritten = (tmp_path / "file").read_text().partition(" ")
    assert int(number) > 2
    assert unwritten == "{}"
    assert done.stdout == ("" if ">&- " in closed or closed == ">&-" else "out\n")
    assert done.stderr == ("" if "2>&-" in closed else "err\nnative")


def test_what_the_encoding_does_not_have_is_escaped() -> None:
    done = _run(r"print('caf\u00e9 \udc80')", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "caf\\xe9 \\udc80\n")
    assert _run(r"print('caf\u00e9 \udc80')", env={"PYTHONIOENCODING": "utf-8"}).stdout == "café \\udc80\n"


def test_a_pipe_that_is_set_to_non_blocking_is_waited_for() -> None:
    code = (
        "import os; os.set_blocking(1, False); print('x' * 10**6, end=''); print(unwritten_streams(), file=sys.stderr)"
    )
    done = _run(code, "| (sleep 1; wc -c)")
    assert (done.stdout.strip(), done.stderr) == ("1000000", "{}\n")


def test_streams_that_somebody_has_replaced_stay() -> None:
    code = "import io; mine = sys.stdout = io.StringIO(); secure_streams(); sys.stderr.write(str(sys.stdout is mine))"
    assert _run(code).stderr == "True"
