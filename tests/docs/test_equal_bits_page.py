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
def test_both_loops_have_one_hash_on_any_number_of_processes(precision: str) -> None:
    found = [run_ranks(run, n, "ddp_loop.py", precision)[0] for n in (1, 3)]
    found.append(run_ranks(run, 2, "accelerate_loop.py", precision)[0])
    assert len(found[0]) == 64
    assert len(set(found)) == 1
