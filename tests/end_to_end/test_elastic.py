"""Runs that lose a process, a node, or are told to end: they go on by themselves, bit for bit.

And a node whose network goes down in mid-run: both sides say so, and end in time.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.test_resume_command import live
from tests.support.agents import Agent, shell_environment, updates_done, wait_until, weights_of
from tests.support.ranks import free_port, run_ranks

ARGS = ["--dataset", "digits", "--max-epochs", "12", "--accelerator", "cpu", "--precision", "32"]
ARGS += ["--batch-size", "32", "--global-batch-size", "64", "--no-enable-progress-bar", "--save-every", "5 steps"]
UPDATES = 12 * 21
RUN = Path("runs/plain/job")

pytestmark = pytest.mark.slow


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Cable:
    """The names of the two namespaces, of the interface at the end of each, and the addresses."""

    nodes: tuple[str, str]
    ends: tuple[str, str]
    addresses: tuple[str, str] = ("10.213.7.1", "10.213.7.2")

    def inside(self, node: int) -> list[str]:
        """The prefix of a command that runs on a node."""
        return ["ip", "netns", "exec", self.nodes[node]]

    def pull(self) -> None:
        """Cut the nodes off from each other: packets vanish, and nobody is told."""
        _ip("-n", self.nodes[1], "link", "set", self.ends[1], "down")


@contextlib.contextmanager
def two_nodes() -> Iterator[Cable]:
    """Two network namespaces as nodes, and the cable between them; the test is skipped where the system forbids it."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces: there is no program ip (iproute2)")
    mark = f"{os.getpid() % 100000:05d}"
    cable = Cable((f"lr{mark}a", f"lr{mark}b"), (f"lv{mark}a", f"lv{mark}b"))
    (one, two), (left, right) = cable.nodes, cable.ends
    try:
        try:
            _ip("netns", "add", one)
            _ip("netns", "add", two)
            _ip("link", "add", left, "netns", one, "type", "veth", "peer", "name", right, "netns", two)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr.strip()}")
        for node, end, address in zip(cable.nodes, cable.ends, cable.addresses, strict=True):
            _ip("-n", node, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", node, "link", "set", "lo", "up")
            _ip("-n", node, "link", "set", end, "up")
        yield cable
    finally:
        for node in cable.nodes:
            subprocess.run(["ip", "netns", "del", node], check=False, capture_output=True, timeout=300)


class Job:
    """The agents of a run, one on each node, in one folder."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.folder = folder
        self.agents: list[Agent] = []
        self.last = folder / RUN / "checkpoints" / "last.ckpt"
        where = ["--num-nodes", nodes, "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        program = [sys.executable, "-m", "tests.support.plain_recipe", *ARGS, "--name", "job", "--devices", "1"]
        self.args = [*program, *where, "--max-restarts", "3", "--node-rank"]

    def start(self, node: int) -> Agent:
        agent = Agent(self.folder, f"agent{len(self.agents)}", [*self.args, str(node)])
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
        for node in (0, 1):
            made.start(node)
        yield made
    finally:
        for agent in made.agents:
            if agent.process.poll() is None:
                agent.kill()


def undisturbed(folder: Path) -> str:
    """The weights of a run that nobody disturbs."""
    folder.mkdir()
    run_ranks(live, 2, [*ARGS, "--name", "job", "--devices", "2", "--strategy", "ddp"], str(folder))
    return weights_of(folder / RUN / "checkpoints" / "last.ckpt")


def test_killed_processes_or_nodes_leave_the_weights_unchanged(tmp_path):
    whole = undisturbed(tmp_path / "whole")
    with job(tmp_path, "2") as two:
        two.reaches(20)
        os.kill(two.agents[1].workers()[0], signal.SIGKILL)
        wait_until(lambda: "resuming from" in two.output(), "the restart")
        two.reaches(60)
        two.agents[1].kill()
        two.start(1)
        assert [two.agents[0].wait(), two.agents[2].wait()] == [0, 0], two.output()
        assert two.output().count("resuming from") == 2
    assert updates_done(two.last) == UPDATES
    assert weights_of(two.last) == whole


def test_a_changing_number_of_nodes_leaves_the_weights_unchanged(tmp_path):
    whole = undisturbed(tmp_path / "whole")
    slow = tmp_path / "slow"
    slow.touch()  # So that what happens finds it training.
    with job(tmp_path, "1:2") as elastic:
        first = elastic.agents[0]
        wait_until(lambda: "on 2 devices of 2 nodes" in first.output(), "both nodes")
        elastic.reaches(20)
        elastic.agents[1].kill()
        stays = "devices: 2 before, 1 now; the updates and their order stay"
        wait_until(lambda: stays in first.output() or first.process.poll() is not None, "the smaller world")
        assert stays in first.output()
        wait_until(lambda: "64 = 2 micro-batches of 32 on 1 device of 1 node" in first.output(), "the first line")
        elastic.reaches(updates_done(elastic.last) + 5)
        elastic.start(1)
        grows = "devices: 1 before, 2 now; the updates and their order stay"
        wait_until(lambda: grows in elastic.output() or first.process.poll() is not None, "the larger world")
        assert grows in elastic.output()
        slow.unlink()
        assert [first.wait(), elastic.agents[2].wait()] == [0, 0], elastic.output()
    assert weights_of(elastic.last) == whole


def test_an_elastic_run_goes_on_without_a_node_that_got_sigterm(tmp_path):
    whole = undisturbed(tmp_path / "whole")
    slow = tmp_path / "slow"
    slow.touch()  # So that what happens finds it training.
    with job(tmp_path, "1:2") as elastic:
        first, second = elastic.agents
        wait_until(lambda: "on 2 devices of 2 nodes" in first.output(), "both nodes")
        elastic.reaches(20)
        second.process.send_signal(signal.SIGTERM)
        assert second.wait() == 143, elastic.output()
        slow.unlink()
        assert first.wait() == 0, elastic.output()
    assert "ended by SIGTERM; the nodes that stay go on without it, and if none does, resume with" in first.output()
    assert "ended on SIGTERM; starting again" in first.output()
    assert weights_of(elastic.last) == whole


def test_sigterm_to_an_agent_saves_without_a_restart(tmp_path):
    with job(tmp_path, "2") as two:
        two.reaches(20)
        for agent in two.agents:
            agent.process.send_signal(signal.SIGTERM)
        assert [agent.wait() for agent in two.agents] == [143, 143]
        saved = updates_done(two.last)
        assert f"SIGTERM after update {saved}: saved" in two.output()
        assert 20 <= saved < UPDATES
        assert "starting again" not in two.output()


def test_torchrun_restarts_a_killed_process_without_a_trace(tmp_path):
    whole = undisturbed(tmp_path / "whole")
    how = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    agent = Agent(tmp_path, "agent", ["torchrun", *how, "-m", "tests.support.plain_recipe", *ARGS])
    runs = tmp_path / "runs" / "plain"
    try:
        wait_until(lambda: any(runs.glob("elastic-*/checkpoints/last.ckpt")), "a checkpoint")
        (last,) = runs.glob("elastic-*/checkpoints/last.ckpt")
        wait_until(lambda: updates_done(last) >= 20, "20 updates")
        os.kill(agent.workers()[1], signal.SIGKILL)
        assert agent.wait() == 0, agent.output()
    finally:
        if agent.process.poll() is None:
            agent.kill()
    assert "resuming from" in agent.output()
    assert weights_of(last) == whole


CUT_OFF = ["--accelerator", "cpu", "--precision", "32", "--dataset", "digits", "--max-epochs", "2000", "--name", "run"]
CUT_OFF += ["--devices", "1", "--num-nodes", "2", "--master-port", "29500", "--no-enable-progress-bar"]
CUT_OFF += ["--collective-timeout", "20"]


def test_both_sides_of_a_cut_cable_end_within_the_timeouts(tmp_path):
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
        assert first.splitlines()[-1].startswith("error: rank 0 (node 0, ")
        assert second.splitlines()[-1].startswith("error: "), second
