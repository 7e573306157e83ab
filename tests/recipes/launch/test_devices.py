"""Which devices of the machine a launch takes."""

import os

import pytest

from recipes.launch.devices import Machine, shared_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_more_processes_than_cores_are_warned_of_on_cpus_only() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert shared_cores(1, Machine("cpu")) is None
        assert "3 processes share 1 core of this machine" in str(shared_cores(3, Machine("cpu")))
        assert shared_cores(64, Machine("cuda", 64)) is None
    finally:
        os.sched_setaffinity(0, cores)
