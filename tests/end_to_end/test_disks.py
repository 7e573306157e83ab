"""A full disk, from the real command line: a small tmpfs in a namespace of its own, which needs root and Linux."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMON = "--dataset digits --accelerator cpu --precision 32-true --no-enable-progress-bar"


def _own_mounts() -> bool:
    return (
        bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode
    )


@pytest.mark.slow
@pytest.mark.skipif(not _own_mounts(), reason="only root may mount a small disk (unshare -m)")
def test_a_run_trains_to_its_end_while_its_log_lies_on_the_disk_that_fills(tmp_path: Path) -> None:
    script = f"""
mount -t tmpfs -o size=40m tmpfs . && cd $PWD
while [ ! -e runs/mnist/f/checkpoints/last.ckpt ]; do sleep .1; done && head -c 100m /dev/zero > fill &
{sys.executable} -m recipes.mnist {COMMON} --max-epochs 8 --name f > log 2>&1
echo "status $?"; rm fill; sed s/^/log:/ log"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["unshare", "-m", "bash", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    # The weights of the last epochs are not saved, and nothing is left that could say so.
    assert "status 1" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
