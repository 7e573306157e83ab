"""The documented PyTorchJob has the fields of the operator; `tests/end_to_end/test_elastic.py` has torchrun's nodes."""

import yaml

from docs.code_blocks import ROOT, blocks_of

(JOB,) = [
    yaml.safe_load(block.text)
    for block in blocks_of((ROOT / "docs/scaling/kubernetes.md").read_text())
    if block.title == "pytorchjob.yaml"
]
REPLICAS = JOB["spec"]["pytorchReplicaSpecs"]


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
