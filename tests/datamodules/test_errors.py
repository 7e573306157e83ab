"""Errors by which the system refuses something, as one line."""

import errno

import pytest
import torch

from datamodules.errors import system_failure


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
