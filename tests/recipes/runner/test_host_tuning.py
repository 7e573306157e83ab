"""What is tuned on the host saves work and changes no result; and how many threads compute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes.runner.machine import default_threads

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to look for")
def test_without_a_gpu_adam_no_longer_searches_for_one_in_each_step() -> None:
    code = (
        "import os, lightning.pytorch, torch\n"
        "from recipes.runner.machine import stop_gpu_search\n"
        "stop_gpu_search()\n"
        "opened = []\n"
        "import sys\n"
        "sys.addaudithook(lambda event, args: opened.append(args[0]) if event == 'ctypes.dlopen' else None)\n"
        "weight = torch.nn.Parameter(torch.zeros(2)); optimizer = torch.optim.AdamW([weight])\n"
        "weight.grad = torch.ones(2); optimizer.step()\n"
        "print(opened, os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
    assert found.stdout == "[] 0\n", found.stderr


def test_processes_share_the_cores_unless_the_user_or_slurm_has_said_how() -> None:
    before, cases = torch.get_num_threads(), [({}, 1), ({}, 3), ({}, 16), ({"OMP_NUM_THREADS": "8"}, 2)]
    torch.set_num_threads(8)
    found = [default_threads(*case) for case in (*cases, ({"SLURM_CPUS_PER_TASK": "3"}, 2))]
    torch.set_num_threads(before)
    assert found == [8, 2, 1, 8, 3]
