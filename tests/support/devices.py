"""Ranks and Trainers on a device: on the CPU, or all of them on one GPU, over gloo."""

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from tests.support.ranks import run_ranks
from tests.support.tables import QUIET

__all__ = ["on_device", "precision_on", "run_on"]


def on_device(device: str, world_size: int = 1) -> dict[str, Any]:
    """The Trainer's arguments, in place of `QUIET`, for processes of `run_on`: each is a node of one device."""
    accelerator = {"cpu": "cpu", "cuda": "gpu"}[device]
    ranks = {"num_nodes": world_size, "strategy": DDPStrategy(process_group_backend="gloo")} if world_size > 1 else {}
    return QUIET | {"accelerator": accelerator, "devices": 1, "enable_progress_bar": False} | ranks


def precision_on(device: str, precision: str) -> dict[str, Any]:
    """The Trainer's arguments for a precision; ``16-mixed`` on a CPU, too, where Lightning takes bf16 instead."""
    if precision == "16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=2.0**10))]}
    return {"precision": precision}


def _on_a_card(function: Callable, *args: Any, **kwargs: Any) -> Any:
    # Lightning rejects a device twice on one node, but not the same one on two nodes.
    os.environ |= {"NODE_RANK": os.environ.get("RANK", "0"), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if "RANK" not in os.environ:
        del os.environ["LOCAL_RANK"]
    return function(*args, **kwargs)


def run_on(device: str, function: Callable, world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """`run_ranks` on a device; with "cuda" all processes share the first GPU.

    They compute without TF32, and repeat their bits where they ask for deterministic algorithms.
    """
    env = {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return run_ranks(_on_a_card, world_size, function, *args, env=env, **kwargs)
