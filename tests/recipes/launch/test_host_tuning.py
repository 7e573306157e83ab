"""What is tuned on the host saves work and changes no result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to look for")
def test_without_a_gpu_adam_no_longer_searches_for_one_in_each_step() -> None:
    code = (
        "import os, lightning.pytorch, torch\n"
        "from recipes.launch.host_tuning import stop_gpu_search\n"
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
