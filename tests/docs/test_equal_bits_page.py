"""The loops of "Equal bits in your own loop" end with the same weights and buffers on any number of processes."""

import contextlib
import io
import sys

import pytest

from docs.code_blocks import ROOT, blocks_of
from tests.support.ranks import run_ranks

PAGE = (ROOT / "docs/scaling/equal-bits.md").read_text()
PROGRAMS = {block.title: block.text for block in blocks_of(PAGE) if block.title is not None}


def run(program: str, precision: str) -> str:
    """What a program of the page prints on this rank."""
    sys.argv = [program, precision]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(PROGRAMS[program], program, "exec"), {"__name__": "__main__"})
    return printed.getvalue().strip()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_loop_has_one_hash_on_any_number_of_processes(precision: str) -> None:
    alone, two, three = (run_ranks(run, n, "ddp_loop.py", precision)[0] for n in (1, 2, 3))
    assert len(alone) == 64
    assert alone == two == three


def test_a_loop_of_accelerate_has_the_hash_of_the_other_one() -> None:
    pytest.importorskip("accelerate")
    found = [run_ranks(run, n, "accelerate_loop.py", precision)[0] for precision in ("float32", "bf16") for n in (1, 2)]
    plain = [run_ranks(run, 1, "ddp_loop.py", precision)[0] for precision in ("float32", "bf16")]
    assert found == [plain[0], plain[0], plain[1], plain[1]]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_at_most_forty_lines(program: str) -> None:
    assert len(PROGRAMS[program].splitlines()) <= 40
