"""Full disks, full shared memory and limits of the system, from the real command line.

Most need root and Linux: a namespace of their own, in which a small tmpfs stands for a disk.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMON = "--dataset digits --accelerator cpu --precision 32-true --no-enable-progress-bar"
FEW = "--limit-train-batches 2 --limit-val-batches 2 --limit-test-batches 2 --max-epochs 1"
# Random crops are made by workers; small images without them are held in memory.
WORKERS = "--augment standard --num-workers 2"


def _own_mounts() -> bool:
    return (
        bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode
    )


needs_mounts = pytest.mark.skipif(not _own_mounts(), reason="only root may mount a small disk (unshare -m)")
pytestmark = pytest.mark.slow


def _shell(script: str, cwd: Path, timeout: float = 120.0) -> "subprocess.CompletedProcess[str]":
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PY": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", "-c", script], cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=timeout
    )


def _in_namespace(script: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return _shell(f"exec unshare -m bash -c '{script}'", cwd)


@needs_mounts
def test_a_run_trains_to_its_end_while_its_log_lies_on_the_disk_that_fills(tmp_path: Path) -> None:
    script = f"""
mount -t tmpfs -o size=40m tmpfs . && cd $PWD
while [ ! -e runs/mnist/f/checkpoints/last.ckpt ]; do sleep .1; done && head -c 100m /dev/zero > fill &
$PY -m recipes.mnist {COMMON} --max-epochs 15 --name f > log 2>&1
echo "status $?"; rm fill; sed s/^/log:/ log; wc -l runs/mnist/f/metrics.csv"""
    done = _in_namespace(script, tmp_path)
    # The weights of the last epochs are not saved, and nothing is left that could say so.
    assert "status 1" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@needs_mounts
def test_shared_memory_that_is_too_small_is_refused_in_one_line(tmp_path: Path) -> None:
    command = f"$PY -m recipes.resnet {COMMON} {FEW} {WORKERS} --name f"
    done = _in_namespace(f"mount -t tmpfs -o size=64k tmpfs /dev/shm; exec {command}", tmp_path)
    *_, line = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr
    assert line.startswith("error: ")
    assert "no room for the batches of 2 workers" in line
    assert "num_workers=0" in line
    assert "--shm-size" in line
    assert done.returncode == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of Unix")
def test_a_limit_of_open_files_takes_one_line(tmp_path: Path) -> None:
    done = _shell(f"ulimit -n 20; exec $PY -m recipes.resnet {COMMON} {FEW} {WORKERS} --name f", tmp_path)
    *_, line = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr
    assert "too many files are open; allow more, as ulimit -n 65536 does" in line
    assert done.returncode in (1, 2)
