"""The precision that "auto" stands for on this machine."""

from typing import Any, Literal

import torch

from datamodules.errors import UserError
from recipes.launch.devices import Machine
from recipes.launch.settings import Command

__all__ = ["Precision", "bf16_unit", "check_precision", "resolve_precision"]

Precision = Literal[
    "auto",
    "32",
    "64",
    "16-mixed",
    "bf16-mixed",
    "16-true",
    "bf16-true",
    "32-true",
    "64-true",
    32,
    64,
]


def bf16_unit() -> str:
    """The instruction set of this CPU for bf16; empty where it has none, and bf16 is slower than float32."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else ""


def resolve_precision(precision: str | int, accelerator: Any = "auto") -> tuple[str, str]:
    """The precision that "auto" stands for on this machine, and the reason.

    bf16-mixed where the hardware multiplies bf16 faster than float32: NVIDIA from Ampere on, and CPUs with AMX or
    AVX512-BF16. Other values are returned unchanged, without a reason.
    """
    if precision != "auto":
        return str(precision), ""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if torch.cuda.get_device_capability() >= (8, 0):
            return "bf16-mixed", f"{name} has fast bf16"
        return "32-true", f"{name} has no fast bf16"
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available())
    if on_cpu and (unit := bf16_unit()):
        return "bf16-mixed", f"this CPU has {unit}"
    return "32-true", "no fast bf16 here"


def check_precision(precision: str, here: Machine, command: Command) -> None:
    """Refuse a precision that the device does not have.

    Raises:
        UserError: 16-mixed on a CPU.
    """
    if precision == "16-mixed" and here.kind == "cpu":
        raise UserError(
            "16-mixed needs a GPU, and this run is on the CPU; pass --precision bf16-mixed:"
            f" {command.using(precision='bf16-mixed')}"
        )
