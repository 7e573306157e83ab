"""What is tuned on the host saves work and changes no result; and how many threads compute."""

import os
import sys

import pytest
import torch

from recipes.runner import machine
from recipes.runner.machine import shared_cores, stop_gpu_search
from tests.support.ranks import run_ranks


def _opened_by_a_step() -> tuple[list[str], str]:
    """The libraries that are opened in a step of AdamW."""
    stop_gpu_search()
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "ctypes.dlopen" else None)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()
    return opened, os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to look for")
def test_without_a_gpu_adam_does_not_search_for_one() -> None:
    env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert run_ranks(_opened_by_a_step, 1, env=env) == [([], "0")]


def test_processes_share_the_cores_unless_slurm_has_said_how() -> None:
    cases: list[tuple[dict[str, str], int]] = [({}, 1), ({}, 3), ({}, 16), ({"SLURM_CPUS_PER_TASK": "3"}, 2)]
    assert [shared_cores(*case, cores=8) for case in cases] == [8, 2, 1, 3]


@pytest.mark.parametrize(
    ("accelerator", "unit", "has_mps", "capability", "expected"),
    [
        ("cpu", "AMX", False, None, ("bf16-mixed", "this CPU has AMX")),
        ("cpu", "", False, None, ("32-true", "no fast bf16 here")),
        ("auto", "AMX", False, None, ("bf16-mixed", "this CPU has AMX")),
        ("auto", "AMX", True, None, ("32-true", "no fast bf16 here")),
        ("mps", "AMX", True, None, ("32-true", "no fast bf16 here")),
        ("tpu", "AMX", False, None, ("32-true", "no fast bf16 here")),
        ("auto", "AMX", False, (8, 0), ("bf16-mixed", "A100 has fast bf16")),
        ("gpu", "AMX", False, (7, 5), ("32-true", "A100 has no fast bf16")),
        ("cpu", "AMX", False, (8, 0), ("bf16-mixed", "this CPU has AMX")),
    ],
)
def test_the_default_precision_is_bf16_where_it_is_fast(
    accelerator: str,
    unit: str,
    has_mps: bool,
    capability: tuple[int, int] | None,
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No machine has all of these.
    monkeypatch.setattr(machine, "bf16_unit", lambda: unit)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert machine.resolve_precision("auto", accelerator) == expected
