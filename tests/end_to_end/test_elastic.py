"""Runs under torchrun that lose a process, a node, or are told to end: they resume by themselves, bit for bit.

And a node whose network goes down in mid-run: both sides say so, and end in time.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_resume_command import live
from tests.support.agents import Agent, shell_environment, updates_done, wait_until, weights_of
from tests.support.namespaces import two_nodes
from tests.support.ranks import free_port, run_ranks

ARGS = ["--dataset", "digits", "--max-epochs", "12", "--accelerator", "cpu", "--precision", "32"]
ARGS += ["--batch-size", "32", "--global-batch-size", "64", "--no-enable-progress-bar", "--save-every", "5 steps"]
UPDATES = 12 * 21
RUN = Path("runs/plain/elastic-job")

pytestmark = pytest.mark.slow


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Job:
    """Agents of one rendezvous, in one folder."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.folder = folder
        self.agents: list[Agent] = []
        self.last = folder / RUN / "checkpoints" / "last.ckpt"
        self.port = free_port()
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "job"]
        # By default a lost node is missed after 15 s, and one that may come is waited for for 30 s.
        where += ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=3"]
        how = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3"]
        self.args = [*how, *where, "-m", "tests.support.plain_recipe", *ARGS]

    def start(self) -> Agent:
        agent = Agent(self.folder, f"agent{len(self.agents)}", self.args)
        self.agents.append(agent)
        return agent

    def reaches(self, updates: int) -> None:
        wait_until(lambda: updates_done(self.last) >= updates, f"{updates} updates in {self.last}")

    def output(self) -> str:
        return "".join(agent.output() for agent in self.agents)


@contextlib.contextmanager
def job(folder: Path, nodes: str) -> Iterator[Job]:
    """Two agents of a job, started; none is left behind."""
    made = Job(folder, nodes)
    try:
        # The first keeps the rendezvous: torchrun cannot resume without the node that its endpoint names.
        made.start()
        wait_until(lambda: listens(made.port), "the first agent")
        made.start()
        yield made
    finally:
        for agent in made.agents:
            if agent.process.poll() is None:
                agent.kill()


def test_a_killed_process_and_a_killed_node_that_comes_back_leave_no_trace_in_the_weights(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    run_ranks(live, 2, [*ARGS, "--name", "elastic-job", "--devices", "2", "--strategy", "ddp"], str(whole))
    with job(tmp_path, "2") as two:
        two.reaches(20)
        os.kill(two.agents[1].workers()[0], signal.SIGKILL)
        wait_until(lambda: "resuming from" in two.output(), "the restart")
        two.reaches(60)
        two.agents[1].kill()
        two.start()
        assert [two.agents[0].wait(), two.agents[2].wait()] == [0, 0], two.output()
        assert two.output().count("resuming from") == 2
    assert updates_done(two.last) == UPDATES
    assert weights_of(two.last) == weights_of(whole / RUN / "checkpoints" / "last.ckpt")


def test_a_lost_node_shrinks_the_world_and_sigterm_to_the_agent_saves_and_ends_without_a_restart(tmp_path):
    with job(tmp_path, "1:2") as shrinking:
        shrinking.reaches(20)
        shrinking.agents[1].kill()
        first = shrinking.agents[0]
        stays = "devices: 2 before, 1 now; the updates and their order stay"
        wait_until(lambda: stays in first.output(), "the smaller world")
        wait_until(lambda: "64 = 2 micro-batches of 32 on 1 device of 1 node" in first.output(), "the first line")
        before = updates_done(shrinking.last)
        shrinking.reaches(before + 5)
        first.process.send_signal(signal.SIGTERM)
        # Of torchrun itself, whatever its workers end with.
        assert first.wait() == 1
        assert first.output().count("started by torchrun") + first.output().count("plain: 1 x") == 2
        saved = updates_done(shrinking.last)
        assert f"SIGTERM after update {saved}: saved" in first.output()
        assert before + 5 <= saved < UPDATES


CUT_OFF = ["--accelerator", "cpu", "--precision", "32", "--dataset", "digits", "--max-epochs", "2000", "--name", "run"]
CUT_OFF += ["--devices", "1", "--num-nodes", "2", "--master-port", "29500", "--no-enable-progress-bar"]


def test_nodes_with_addresses_of_their_own_train_and_one_that_is_cut_off_is_named_on_both_sides(tmp_path):
    with two_nodes() as cable:
        nodes = []
        for node in (0, 1):
            program = [*cable.inside(node), sys.executable, "-m", "tests.support.plain_recipe"]
            where = ["--master-addr", cable.addresses[0], "--node-rank", str(node)]
            with (tmp_path / f"{node}.log").open("w") as log:
                command = [*program, *CUT_OFF, *where]
                nodes.append(subprocess.Popen(command, cwd=tmp_path, env=shell_environment(), stdout=log, stderr=log))
        try:
            last = tmp_path / "runs" / "plain" / "run" / "checkpoints" / "last.ckpt"
            wait_until(lambda: last.exists() or nodes[0].poll() is not None, "the first epoch")
            assert last.exists(), (tmp_path / "0.log").read_text()
            cable.pull()
            statuses = [process.wait(600) for process in nodes]
        finally:
            for process in nodes:
                process.kill()
        assert statuses == [1, 1]
        first, second = ((tmp_path / f"{node}.log").read_text() for node in (0, 1))
        assert f"2 nodes x 1 device, {cable.addresses[0]}:29500, gloo" in first
        end = "does not answer: its node or the network is down"
        assert first.splitlines()[-1].startswith("error: rank 1 (node 1, ")
        assert first.splitlines()[-1].endswith(end)
        assert second.splitlines()[-1] == f"error: rank 0 (node 0, the master's host) {end}"
