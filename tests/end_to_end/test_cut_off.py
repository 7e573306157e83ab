"""A node whose network goes down in mid-run: both sides say so, and end in time."""

import subprocess
import sys
import time

import pytest

from tests.support.agents import shell_environment, wait_until
from tests.support.namespaces import two_nodes

ARGS = ["--accelerator", "cpu", "--precision", "32", "--dataset", "digits", "--max-epochs", "2000", "--name", "run"]
ARGS += ["--devices", "1", "--num-nodes", "2", "--master-port", "29500", "--no-enable-progress-bar"]


@pytest.mark.slow
def test_nodes_with_addresses_of_their_own_train_and_one_that_is_cut_off_is_named_on_both_sides(tmp_path):
    with two_nodes() as cable:
        nodes = []
        for node in (0, 1):
            program = [*cable.inside(node), sys.executable, "-m", "tests.support.plain_recipe"]
            where = ["--master-addr", cable.addresses[0], "--node-rank", str(node)]
            with (tmp_path / f"{node}.log").open("w") as log:
                command = [*program, *ARGS, *where]
                nodes.append(subprocess.Popen(command, cwd=tmp_path, env=shell_environment(), stdout=log, stderr=log))
        try:
            last = tmp_path / "runs" / "plain" / "run" / "checkpoints" / "last.ckpt"
            wait_until(lambda: last.exists() or nodes[0].poll() is not None, "the first epoch")
            assert last.exists(), (tmp_path / "0.log").read_text()
            cable.pull()
            began = time.monotonic()
            statuses = [process.wait(60) for process in nodes]
            seconds = time.monotonic() - began
        finally:
            for process in nodes:
                process.kill()
        assert statuses == [1, 1]
        assert seconds < 30
        first, second = ((tmp_path / f"{node}.log").read_text() for node in (0, 1))
        assert f"2 nodes x 1 device, {cable.addresses[0]}:29500, gloo" in first
        end = "does not answer: its node or the network is down"
        assert first.splitlines()[-1].startswith("error: rank 1 (node 1, ")
        assert first.splitlines()[-1].endswith(end)
        assert second.splitlines()[-1] == f"error: rank 0 (node 0, the master's host) {end}"
