"""The peak of a process is its own, whatever the process that started it holds."""

import mmap
import subprocess
import sys
import textwrap

import torch

from recipes.results.stopwatch import peak_memory

HELD = 3 << 29


def test_the_peak_of_a_process_does_not_hold_that_of_the_process_that_started_it() -> None:
    code = """
        import torch
        from recipes.results.stopwatch import peak_memory
        before = peak_memory(torch.device("cpu"))
        taken = torch.ones(1 << 26)  # 256 MiB.
        del taken
        print(before, peak_memory(torch.device("cpu")))
    """
    with mmap.mmap(-1, HELD) as held:
        for page in range(0, HELD, mmap.PAGESIZE):
            held[page] = 1
        assert peak_memory(torch.device("cpu")) > HELD
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after - before > 200 << 20
    assert after < HELD
