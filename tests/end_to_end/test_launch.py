"""Every way of starting a run, on loopback: processes that find each other, or say why they do not."""

import json
import re
import secrets
import signal
import socket
import sys
from pathlib import Path

import pytest

from callbacks.lib.threads import available_cores
from tests.support.agents import Agent, children_of, is_fork_server, wait_until, weights_of
from tests.support.nodes import Ended, Program, Shell, start
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


def on_two_ranks(folder: Path, args: str) -> Ended:
    """What becomes of the agent of two processes."""
    return start(folder, [(["--name", "run", "--devices", "2", *args.split()], {})])[0]


def on_two_nodes(folder: Path, *of_node: str) -> list[Ended]:
    """What becomes of the agents of nodes of one process each."""
    where = f"--name run --num-nodes {len(of_node)} --master-addr localhost --master-port {free_port()}".split()
    args = [[*where, "--node-rank", str(node), *more.split()] for node, more in enumerate(of_node)]
    return start(folder, [(each, {}) for each in args])


def last_line(ended: Ended) -> str:
    return ended.err.strip().splitlines()[-1]


def printed(ended: Ended) -> list[str]:
    """The lines of the run: gloo of torch 2.9 prints one before them, on each rank."""
    return [line for line in ended.out.splitlines() if not line.startswith("[Gloo]")]


def test_slurms_processes_find_each_other(tmp_path):
    job = free_job()
    all_ended = start(tmp_path, [(["--name", "run"], env) for env in by_slurm(job, nodes=2, devices=2)])
    assert [ended.status for ended in all_ended] == [0] * 4, all_ended
    first = printed(all_ended[0])[0]
    assert f"started by Slurm, 2 nodes x 2 devices, localhost:{15000 + 7 * job % 17000}, gloo" in first
    assert [printed(ended) for ended in all_ended[1:]] == [[]] * 3
    assert {path.name for path in tmp_path.glob("prepared*")} == {"prepared-on-0-0", "prepared-on-1-0"}
    results = json.loads((tmp_path / "runs/failing/run/results.json").read_text())
    assert results["hardware"].startswith("4 x")
    assert (results["devices"], results["num_nodes"]) == (2, 2)
    assert "curve: line" in (tmp_path / "runs/failing/run/config.yaml").read_text(), "rank 0 has decided"
    seconds = results["seconds"]
    assert seconds["start_up"] + seconds["train"] < seconds["total"]


@pytest.mark.parametrize(
    ("rank", "how", "status", "line"),
    [
        (1, "raise", 1, "error: rank 1 (node 0, {host}) failed: ValueError: a bad pixel"),
        (1, "kill", 1, "error: rank 1 (node 0, {host}) was killed by SIGKILL"),
        (0, "kill", 1, "error: rank 0 (node 0, {host}) was killed by SIGKILL"),
        (1, "interrupt", 130, ""),
        (1, "wait", 1, "error: rank 0 (node 0, {host}) failed: TimeoutError: another rank did not"),
    ],
)
def test_the_last_line_says_why_one_rank_ended_all(tmp_path, rank, how, status, line):
    limit = "--collective-timeout 4" if how == "wait" else ""
    ended = on_two_ranks(tmp_path, f"--fail-rank {rank} --fail-how {how} {limit}")
    assert ended.status == status, ended
    if line:
        assert last_line(ended).startswith(line.format(host=socket.gethostname()))
    assert ("in training_step" in ended.err) == (how == "raise")
    if how in ("raise", "kill"):
        assert ended.err.count("Traceback") == (how == "raise")


def test_a_run_with_a_restarted_process_ends_with_equal_weights(tmp_path):
    for name, fault in (("whole", ""), ("killed", "--fail-rank 1 --fail-how kill --fail-until 1 --max-restarts 1")):
        (tmp_path / name).mkdir()
        ended = on_two_ranks(tmp_path / name, f"--save-every 1 {fault}")
        assert ended.status == 0, ended
    assert "was killed by SIGKILL, perhaps because the machine ran out of memory; starting again, 0 res" in ended.err
    assert "resuming from" in ended.out
    whole, killed = (tmp_path / name / "runs/failing/run/checkpoints/last.ckpt" for name in ("whole", "killed"))
    assert weights_of(whole) == weights_of(killed)


def test_the_flag_for_threads_holds_for_every_way_to_start(tmp_path):
    """`python -m`, our agent, torchrun's variables, Slurm's, and variables that a script has set."""
    port = free_port()
    by_hand = [
        {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in "01"
    ]
    starts = {
        "alone": ("", [{}]),
        "agent": ("--devices 2", [{}]),
        "torchrun": ("", by_torchrun(free_port())),
        "slurm": ("", by_slurm(free_job())),
        "by-hand": ("", by_hand),
    }
    hashes = set()
    for name, (args, environments) in starts.items():
        line = f"--name run --threads 2 --global-batch-size 16 {args}".split()
        folder = tmp_path / name
        folder.mkdir()
        all_ended = start(folder, [(line, env | {"OMP_NUM_THREADS": ""}) for env in environments])
        assert [ended.status for ended in all_ended] == [0] * len(environments), all_ended
        assert "cpu with 2 threads" in all_ended[0].out
        record = (folder / "runs/failing/run/weights.jsonl").read_text().splitlines()
        assert json.loads(record[0])["start"]["environment"]["threads"] == 2, name
        hashes.add(json.loads(record[-1])["save"]["sha256"])
    assert len(hashes) == 1


def test_the_default_of_several_processes_says_what_to_type(tmp_path):
    (ended,) = start(tmp_path, [(["--name", "run", "--devices", "2"], {"OMP_NUM_THREADS": ""})])
    threads = max(1, available_cores() // 2)
    assert ended.status == 0, ended
    assert f"threads: {threads} in each process, the default, on which the bits depend; one device ends" in ended.out
    assert f"--threads {threads}\n" in ended.out
    assert "note:" not in ended.err, "the callbacks print no second line"


def test_a_signal_to_one_process_is_no_loss_that_restarts_answer(tmp_path):
    ended = on_two_ranks(tmp_path, "--fail-rank 1 --fail-how interrupt --max-restarts 1")
    assert ended.status == 130, ended
    assert re.match(r"Ctrl-C after update \d: saved .*\n$", ended.err)
    assert "ended by Ctrl-C; resume with\n" in ended.out


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def terminated(folder: Path, how: str, **variables: str) -> Ended:
    """What becomes of two processes that get SIGTERM by their agent while one of them does not answer."""
    args = ["--name", "run", "--devices", "2", "--save-every", "1", "--fail-rank", "1", "--fail-how", how]
    shell = Shell(folder, "shell", args, variables)
    wait_until((folder / "failing").exists, "the failure")
    if how == "stop":
        wait_until(lambda: any(map(is_stopped, children_of(shell.process.pid))), "the stop")
    shell.terminate()
    return shell.wait()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state of a process is read there")
def test_a_stopped_process_goes_on_after_sigterm_to_save(tmp_path):
    ended = terminated(tmp_path, "stop")
    assert ended.status == 143, ended
    assert "SIGTERM after update" in ended.err
    assert "ended by SIGTERM; resume with\n" in ended.out


def test_who_did_not_answer_sigterm_is_named_with_the_last_save(tmp_path):
    ended = terminated(tmp_path, "wait", SECONDS_TO_SAVE="3")
    last = "runs/failing/run/checkpoints/last.ckpt"
    assert ended.status == 143, ended
    line = (
        r"error: rank 0 \(process .*\), rank 1 \(process .*\) did not end on SIGTERM within 3 s, and had to be killed; "
    )
    line += rf"resume with\n  .*launch_recipe.py --resume {last} --devices 2\n"
    assert re.search(line, ended.err), ended


def test_an_error_for_the_user_to_correct_is_not_tried_again(tmp_path):
    ended = on_two_ranks(tmp_path, "--broken-rank 1 --max-restarts 3")
    assert ended.status == 2
    assert ended.err.splitlines() == [f"error: rank 1 (node 0, {socket.gethostname()}): rank 1 found nothing"]


def test_a_mistake_is_rejected_before_a_process_starts(tmp_path):
    ended = on_two_ranks(tmp_path, "--optimizer sdg")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith("error: no optimizer 'sdg'")


def test_all_ranks_end_where_rank_0_cannot_decide(tmp_path):
    (tmp_path / "no-curve").touch()
    ended = on_two_ranks(tmp_path, "")
    assert (ended.status, last_line(ended)) == (2, "error: there is no curve")
    assert not (tmp_path / "runs/failing/run").exists()


def test_the_settings_of_node_0_hold_on_all_nodes(tmp_path):
    both = on_two_nodes(tmp_path, "--lr 0.25", "--lr 0.5")
    assert [ended.status for ended in both] == [0, 0], both
    assert "\nlr: 0.25\n" in (tmp_path / "runs/failing/run/config.yaml").read_text()
    both = on_two_nodes(tmp_path, "--resume auto", "--resume auto --run-dir elsewhere")
    assert [ended.status for ended in both] == [0, 0], both
    assert "the run in runs/failing/run has finished, and nothing was done" in both[0].out
    both = on_two_nodes(tmp_path, *["--resume nothere.ckpt"] * 2)
    assert [last_line(ended) for ended in both] == ["error: there is no checkpoint nothere.ckpt"] * 2
    both = on_two_nodes(tmp_path, "", "--devices 2")
    assert [ended.status for ended in both] == [2, 2], both
    assert all("expected as many on each node: start all with the same --devices" in last_line(e) for e in both), both


PROGRAM = """
import sys

from recipes import fit
from tests.support.launch_recipe import FailingLine, Points


class Mine(FailingLine):
    title = "mine"


def train(devices, **settings):
    settings |= {"max_epochs": 2, "accelerator": "cpu", "verbose": False, "threads": 1, "global_batch_size": 16}
    return fit(Mine, Points, devices=devices, name=f"on-{devices}", **settings).weights_sha256


GUARD
    print(">", train(1))
    print(">", train(2))
    print(">", train(2))  # Another run, in another folder.
    try:
        train(2, fail_rank=1, fail_how="raise")
    except ValueError as error:
        print(">", error)
"""


def test_a_program_gets_the_result_of_its_processes(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.replace("GUARD", 'if __name__ == "__main__":'))
    ended = Program(tmp_path, "guarded", [str(file)]).wait()
    assert ended.status == 0, ended
    printed = [line for line in ended.out.splitlines() if line.startswith("> ")]
    one, two, again, error = [line.removeprefix("> ") for line in printed]
    assert one == two == again
    assert len(one) == 64
    assert error == f"rank 1 (node 0, {socket.gethostname()}) failed: ValueError: a bad pixel"
    folders = {path.name for path in (tmp_path / "runs/mine").iterdir()}
    assert folders == {"on-1", "on-2", "on-2-2"}, "the run that failed had logged and saved nothing"
    file.write_text(PROGRAM.replace("GUARD", "if True:").replace('print(">", train(1))', ""))
    ended = Program(tmp_path, "bare", [str(file)]).wait()
    assert ended.status != 0, ended
    assert f"several processes import {file} for its classes" in ended.err
    assert 'put the call under if __name__ == "__main__":' in ended.err


def test_an_error_on_one_node_is_printed_on_every_node(tmp_path):
    both = on_two_nodes(tmp_path, *["--fail-rank 1 --fail-how raise"] * 2)
    assert [ended.status for ended in both] == [1, 1]
    elsewhere = ("error: another node has ended; its own output says why", "error: rank 0 (node 0, ")
    assert last_line(both[0]).startswith(elsewhere), both[0]
    assert last_line(both[1]) == f"error: rank 1 (node 1, {socket.gethostname()}) failed: ValueError: a bad pixel"
    where = f"--num-nodes 2 --node-rank 0 --master-addr localhost --master-port {free_port()}"
    alone = start(tmp_path, [([*where.split(), "--rendezvous-timeout", "3"], {})])[0]
    assert alone.status == 2
    assert "error: fewer than 2 nodes joined within 3 s; type on each node that is missing" in last_line(alone)
    assert "--node-rank I --master-addr localhost" in last_line(alone)


def _lives(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_no_process_outlives_a_killed_agent(tmp_path):
    command = [sys.executable, "-m", "recipes.mnist", "--accelerator", "cpu", "--dataset", "digits"]
    agent = Agent(tmp_path, "agent", [*command, "--max-epochs", "2000", "--devices", "2", "--name", "run"])
    last = tmp_path / "runs/mnist/run/checkpoints/last.ckpt"
    wait_until(lambda: last.exists() or agent.process.poll() is not None, "the first epoch")
    (server,) = filter(is_fork_server, children_of(agent.process.pid))
    status = Path(f"/proc/{server}/status").read_text()
    assert "Threads:\t1\n" in status
    mapped = Path(f"/proc/{server}/maps").read_text()
    assert "/dev/nvidia" not in mapped
    processes = [server, *children_of(server)]
    assert len(processes) == 3
    agent.process.send_signal(signal.SIGKILL)
    agent.process.wait()
    wait_until(lambda: not any(map(_lives, processes)), "the end of the orphans")
