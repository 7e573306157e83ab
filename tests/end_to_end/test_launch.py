"""Every way of starting a run, on loopback: processes that find each other, or say why they do not."""

import json
import secrets
import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from datamodules.errors import UserError
from recipes.runner import join
from recipes.runner.join import Request, rendezvous
from recipes.runner.launch import Command, Launch
from tests.support.nodes import Ended, start
from tests.support.ranks import free_port

Environment = dict[str, str]


def by_torchrun(port: int, nodes: int = 1, devices: int = 2) -> list[Environment]:
    """The environment of each process, as torchrun's agents with a store of their own leave it."""
    return [
        {
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(nodes * devices),
            "LOCAL_WORLD_SIZE": str(devices),
            "GROUP_WORLD_SIZE": str(nodes),
            "RANK": str(node * devices + local),
            "GROUP_RANK": str(node),
            "LOCAL_RANK": str(local),
        }
        for node in range(nodes)
        for local in range(devices)
    ]


def by_slurm(job: int, nodes: int = 1, devices: int = 2) -> list[Environment]:
    """The environment of each process, as srun leaves it; the job's number decides the port."""
    return [
        {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NAME": "training",
            "ENVIRONMENT": "BATCH",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "localhost,other[1-9]",
            "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS": str(nodes * devices),
            "SLURM_PROCID": str(node * devices + local),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local),
        }
        for node in range(nodes)
        for local in range(devices)
    ]


def free_job() -> int:
    """The number of a Slurm job whose port nobody uses."""
    # Drawn, since the other process of the tests looks for one, too; not from a generator that tests seed.
    for job in secrets.SystemRandom().sample(range(1000, 2000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 15000 + 7 * job % 17000)):
                return job
    raise AssertionError("no free port")


def on_two_ranks(folder: Path, args: str) -> list[Ended]:
    return start(folder, [(["--name", "run", *args.split()], env) for env in by_torchrun(free_port())])


def last_line(ended: Ended) -> str:
    return ended.err.strip().splitlines()[-1]


def test_slurms_processes_find_each_other_and_take_nodes_and_devices_from_it(tmp_path):
    job = free_job()
    all_ended = start(tmp_path, [(["--name", "run"], env) for env in by_slurm(job, nodes=2, devices=2)])
    assert [ended.status for ended in all_ended] == [0] * 4, all_ended
    first = all_ended[0].out.splitlines()[0]
    assert f"started by Slurm, 2 nodes x 2 devices, localhost:{15000 + 7 * job % 17000}, gloo" in first
    assert all(not ended.out for ended in all_ended[1:])
    assert {path.name for path in tmp_path.glob("prepared*")} == {"prepared-on-0-0", "prepared-on-1-0"}
    results = json.loads((tmp_path / "runs/failing/run/results.json").read_text())
    assert results["hardware"].startswith("4 x")
    assert (results["devices"], results["num_nodes"]) == (2, 2)
    assert "curve: line" in (tmp_path / "runs/failing/run/config.yaml").read_text(), "rank 0 has decided"
    seconds = results["seconds"]
    assert seconds["start_up"] + seconds["train"] < seconds["total"]


@pytest.mark.parametrize(
    ("rank", "how", "statuses", "line"),
    [
        (1, "raise", [1, 1], "error: rank 1 (node 0, {host}) failed: ValueError: a bad pixel"),
        (1, "kill", [1, -9], "error: rank 1 (node 0, {host}) ended without a report"),
        (1, "interrupt", [130, 130], ""),
        (0, "kill", [-9, 1], "error: rank 0 (node 0,"),
        (1, "wait", [1, 1], "error: rank 0 (node 0, {host}) failed: ...Timed out"),
    ],
)
def test_when_one_rank_ends_all_end_and_one_says_why_in_its_last_line(tmp_path, rank, how, statuses, line):
    limit = "--collective-timeout 4" if how == "wait" else ""
    ended = on_two_ranks(tmp_path, f"--fail-rank {rank} --fail-how {how} {limit}")
    assert [each.status for each in ended] == statuses, ended
    if line:
        says, (begin, _, end) = ended[0 if rank else 1], line.partition("...")
        assert last_line(says).startswith(begin.format(host=socket.gethostname()))
        assert end in last_line(says)
    if rank == 1 and how in ("raise", "kill"):  # Else the other rank may fail in its step before it learns the cause.
        assert "Traceback" not in ended[0].err
        assert ("in training_step" in ended[1].err) == (how == "raise")


def test_a_missing_rank_is_refused_and_named(tmp_path):
    all_ended = start(tmp_path, [(["--rendezvous-timeout", "8"], env) for env in by_torchrun(free_port(), 2)[:3]])
    assert [ended.status for ended in all_ended] == [2, 2, 2]
    assert "3 of 4 processes joined within 8 s; missing: rank 3 on node 1" in all_ended[0].err


def test_nodes_with_unequal_numbers_of_devices_are_named_at_once_with_what_to_type_on_each(tmp_path):
    port = free_port()
    where = f"--num-nodes 2 --master-addr 127.0.0.1 --master-port {port} --rendezvous-timeout 3600".split()
    each = [["--devices", devices, *where, "--node-rank", node] for node, devices in (("0", "2"), ("1", "1"))]
    zero, one = start(tmp_path, [(args, {}) for args in each])
    assert (zero.status, one.status) == (2, 2), (zero, one)
    line = last_line(zero)
    assert f"node 1 ({socket.gethostname()}) was started as one of 2 nodes x 1 devices, node 0 as one of 2 x 2" in line
    on_zero, on_one = line.split(": on node 0 ")[1].split(" and on node 1 ")
    assert "--node-rank 0" in on_zero
    assert "--node-rank 1" in on_one
    assert f"--master-addr 127.0.0.1 --master-port {port}" in on_one
    assert on_zero.count("--devices 1") == on_one.count("--devices 1") == 1


def test_a_mistake_of_one_rank_alone_and_of_all_ranks_is_said_once(tmp_path):
    zero, one = on_two_ranks(tmp_path, "--broken-rank 1")
    assert (zero.status, one.status) == (2, 2)
    assert zero.err.splitlines()[-1] == f"error on rank 1 (node 0, {socket.gethostname()}): rank 1 found nothing"
    assert not one.err
    zero, one = on_two_ranks(tmp_path, "--optimizer sdg")
    assert (zero.status, one.status) == (2, 2)
    assert zero.err.startswith("error: no optimizer 'sdg'")
    assert zero.err.count("\n") == 1
    assert not one.err


def test_agents_that_have_counted_restarts_differently_are_no_hindrance_and_the_missing_variable_is_named(tmp_path):
    """Each agent counts for itself: one that was started again is at 0 where the others are at 1."""
    agents = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    restarted = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    one, two = (env | restarted for env in by_torchrun(agents.port, nodes=2, devices=1))
    args = ["--name", "run", "--rendezvous-timeout", "20"]
    both = start(tmp_path, [(args, one), (args, two | {"TORCHELASTIC_RESTART_COUNT": "1"})])
    assert [ended.status for ended in both] == [0, 0], both
    assert f"127.0.0.1:{agents.port}," not in both[0].out
    assert [ended.err.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") for ended in both] == [1, 0]


def test_where_rank_0_cannot_decide_what_was_left_open_all_ranks_end(tmp_path):
    (tmp_path / "no-curve").touch()
    zero, one = on_two_ranks(tmp_path, "--rendezvous-timeout 3600")
    assert (zero.status, one.status) == (2, 2), (zero, one)
    assert last_line(zero) == "error: there is no curve"
    assert not (tmp_path / "runs/failing/run").exists()


@pytest.mark.parametrize(
    ("launcher", "advice"),
    [
        ("manual", "on every node: python -m r --master-port {}"),
        ("slurm", "type srun --nodes=2 --ntasks-per-node=1 python -m r --master-port {}"),
        ("torchrun", "when it is started again, on every node: torchrun --nnodes 2 --rdzv-backend c10d"),
    ],
)
def test_a_taken_port_is_refused_with_the_command_of_the_launcher(launcher, advice):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        command = Command("python -m r").started_by(launcher, 2, 1)
        launch = Launch(launcher, 2, 1, address="127.0.0.1", port=port)
        with pytest.raises(UserError) as refused:
            rendezvous(Request(launch, {}, 5.0, command))
    assert advice.format(port + 1) in str(refused.value)


def test_a_service_that_never_answers_is_not_a_run_of_this_program(monkeypatch):
    monkeypatch.setattr(join, "_CONNECT_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        launch = Launch("manual", 2, 1, node_rank=1, address="127.0.0.1", port=silent.getsockname()[1])
        with pytest.raises(UserError, match="is not a run of this program"):
            rendezvous(Request(launch, {}, 5.0, Command("python -m r")))
