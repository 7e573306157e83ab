"""The documented PyTorchJob has the fields of the operator, and its command trains with the operator's variables."""

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from docs.code_blocks import ROOT, blocks_of
from tests.support.agents import Agent, updates_done, wait_until, write_digits
from tests.support.ranks import free_port

(JOB,) = [
    yaml.safe_load(block.text)
    for block in blocks_of((ROOT / "docs/scaling/kubernetes.md").read_text())
    if block.title == "pytorchjob.yaml"
]
REPLICAS = JOB["spec"]["pytorchReplicaSpecs"]
NODES, DEVICES = sum(part["replicas"] for part in REPLICAS.values()), 1
"""Of the job, and of a pod here: each process takes seconds to start."""


def test_the_file_has_what_the_operator_looks_for() -> None:
    assert (JOB["apiVersion"], JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(JOB["spec"]) == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert isinstance(JOB["spec"]["nprocPerNode"], str)
    for part in REPLICAS.values():
        pod = part["template"]["spec"]
        assert part["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        assert [container["name"] for container in pod["containers"]] == ["pytorch"]
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def variables(pod: int, port: int) -> Mapping[str, str]:
    """What the operator sets in a pod: RANK is the pod's number, and WORLD_SIZE the number of all processes."""
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(port),
        "WORLD_SIZE": str(NODES * DEVICES),
        "RANK": str(pod),
        "PET_NODE_RANK": str(pod),
        "PET_NPROC_PER_NODE": str(DEVICES),
        "PET_NNODES": str(NODES),
    }


def pods(folder: Path) -> list[Agent]:
    """The pods' containers, started at once."""
    container = REPLICAS["Master"]["template"]["spec"]["containers"][0]
    assert container["command"][0] == "torchrun"
    command = [word.replace("/shared", str(folder)) for word in [*container["command"][1:], *container["args"]]]
    small = ["--accelerator=cpu", "--precision=32", "--max-epochs=10"]
    small += ["--batch-size=16", "--enable-progress-bar=false", "--save-every=5 steps"]
    port = free_port()
    return [Agent(folder, f"pod-{pod}", [*command, *small], variables(pod, port)) for pod in range(NODES)]


@pytest.mark.slow
def test_the_pods_of_a_job_train_together_and_save_when_one_is_preempted(tmp_path: Path) -> None:
    write_digits(tmp_path / "data")
    last = tmp_path / "runs/mnist/digits/checkpoints/last.ckpt"
    started = pods(tmp_path)
    wait_until(lambda: updates_done(last) >= 5, "the first save")
    started[1].process.send_signal(signal.SIGTERM)
    output = [(pod.wait(600), pod.output()) for pod in started]
    assert [status for status, _ in output] == [1, 1], output
    assert f"started by torchrun, {NODES} nodes x {DEVICES} device," in output[0][1]
    assert f"SIGTERM after update {updates_done(last)}: saved" in output[0][1]
