"""What this machine has to train on."""

from dataclasses import dataclass
from typing import Any

import torch

from datamodules.errors import UserError

__all__ = ["Machine", "devices_of", "machine", "number_of_devices"]


@dataclass(frozen=True)
class Machine:
    """The kind of device that a run will use here, and how many there are.

    Args:
        kind: as torch names it, or what the user called an accelerator that we do not know.
        count: devices of that kind; None where any number of processes will do, as on CPUs.
    """

    kind: str
    count: int | None = None


def machine(accelerator: Any = "auto") -> Machine:
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
    """The devices that are called by their indices; None where none are."""
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
    # What is no number at all the Trainer refuses in its own words.
    count = int(text) if text.lstrip("-").isdigit() else 1
    if count < 1:
        raise UserError(f"--devices {devices} asks for none; pass 1 or more, auto, or indices such as 0,1")
    return count


def devices_of(count: int, asked: Any, here: Machine) -> int | list[int]:
    """What a node's processes train on whom another has started: the devices that were named, or the first ones.

    Args:
        count: of the processes.
        asked: ``--devices``.

    Example:
        >>> devices_of(2, "4,5", Machine("cuda", 8)), devices_of(2, "auto", Machine("cuda", 8))
        ([4, 5], 2)
    """
    named = _named(asked)
    return named if named and len(named) == count and here.kind != "cpu" else count
