"""The devices of this machine."""

from dataclasses import dataclass
from typing import Any

import torch

from datamodules.errors import UserError

__all__ = ["Machine", "detect_machine", "devices_of", "number_of_devices"]


@dataclass(frozen=True)
class Machine:
    """The kind of device that a run uses here, and how many there are.

    Args:
        kind: as torch names it, or the name of another accelerator.
        count: devices of that kind; None where any number of processes is possible, as on CPUs.
    """

    kind: str
    count: int | None = None


def detect_machine(accelerator: Any = "auto") -> Machine:
    """The devices that ``--accelerator`` stands for on this machine."""
    name = accelerator if isinstance(accelerator, str) else type(accelerator).__name__.lower()
    name = name.removesuffix("accelerator")
    if name in ("gpu", "cuda", "auto") and torch.cuda.is_available():
        return Machine("cuda", torch.cuda.device_count())
    if name in ("gpu", "mps", "auto") and torch.backends.mps.is_available():
        return Machine("mps", 1)
    if name in ("gpu", "cuda", "mps"):
        return Machine("mps" if name == "mps" else "cuda", 0)
    return Machine("cpu" if name == "auto" else name)


def _named(devices: Any) -> list[int] | None:
    """The indices of the devices, where they are given as such; else None."""
    if isinstance(devices, str) and "," in devices:
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        return [int(part) for part in parts] if all(part.isdigit() for part in parts) else None
    return list(devices) if isinstance(devices, (list, tuple)) else None


def number_of_devices(devices: Any, here: Machine) -> int:
    """How many devices of this machine ``--devices`` means: a number, all of them, or a list of indices.

    Raises:
        UserError: none at all.

    Example:
        >>> gpus = Machine("cuda", 8)
        >>> [number_of_devices(d, gpus) for d in ("auto", -1, 2, "2", "0,3", [5])]
        [8, 8, 2, 2, 2, 1]
        >>> number_of_devices("auto", Machine("cpu"))
        1
    """
    text = str(devices).strip()
    if text in ("auto", "-1"):
        return max(1, here.count or 1)
    if (named := _named(devices)) is not None:
        text = str(len(named))
    # The Trainer refuses what is not a number.
    count = int(text) if text.lstrip("-").isdigit() else 1
    if count < 1:
        raise UserError(f"--devices {devices} requests none; pass 1 or more, auto, or indices such as 0,1")
    return count


def devices_of(count: int, asked: Any, here: Machine) -> int | list[int]:
    """The devices of processes that a launcher has started: those given by index, or the first ones.

    Args:
        count: of the processes.
        asked: ``--devices``.

    Example:
        >>> devices_of(2, "4,5", Machine("cuda", 8)), devices_of(2, "auto", Machine("cuda", 8))
        ([4, 5], 2)
    """
    named = _named(asked)
    return named if named and len(named) == count and here.kind != "cpu" else count
