"""Errors by which the system refuses something, as one line."""

import errno
import os

import pytest
import torch

from datamodules.errors import system_failure


def _raised(function) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return caught.value


def _open_many() -> None:
    files = []
    try:
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for file in files:
            os.close(file)


def test_a_limit_is_named_with_its_number_and_what_raises_it():
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, limits[1]), limits[1]))
    try:
        line = system_failure(_raised(_open_many))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert line.startswith("too many files are open (ulimit -n: ")
    assert "ulimit -n 65536" in line


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u 4096"),
        (RuntimeError("can't start new thread"), "ulimit -u 4096"),
        (MemoryError(), "not enough memory; pass smaller sizes"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "Tried to allocate 2.00 GiB"),
        (OSError(errno.ENOSPC, "No space left on device", "lineage.json"), "lineage.json cannot be written: No space"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), "xxx... is too long for the file system; pass"),
        (
            RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "),
            "(pid 71) is killed by signal",
        ),
    ],
)
def test_each_error_of_the_system_says_what_to_do(error, part):
    assert part in system_failure(error)


@pytest.mark.parametrize("size", [2**45, 2**62])
def test_a_tensor_that_is_too_large_is_one(size):
    assert "not enough memory" in system_failure(_raised(lambda: torch.empty(size, dtype=torch.float64)))


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No file"), RuntimeError("mat1"), ValueError("out of memory")])
def test_other_errors_are_none(error):
    assert system_failure(error) is None
