"""The command line of this project on several nodes at once, as far as this machine carries it."""

import json
import sys

import pytest

from benchmarks.many_nodes import start_nodes


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_four_nodes_of_two_devices_train_test_and_report_once(tmp_path):
    cost = start_nodes(4, 2, tmp_path, "--name", "many")
    assert cost.statuses == (0, 0, 0, 0), cost.output
    assert cost.processes == 8
    assert "started manually, 4 nodes x 2 devices" in cost.output
    assert [path.name for path in (tmp_path / "runs" / "mnist").iterdir()] == ["many"]
    results = json.loads((tmp_path / "runs" / "mnist" / "many" / "results.json").read_text())
    assert results["hardware"].startswith("8 x")
    assert all(not (tmp_path / f"node{node}.log").read_text() for node in (1, 2, 3))
