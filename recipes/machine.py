"""What this machine has to train on."""

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Machine", "machine", "number_of_devices"]


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


def number_of_devices(devices: Any, here: Machine) -> int:
    """How many devices of this machine ``--devices`` means: a number, all of them, or a list of indices.

    Example:
        >>> gpus = Machine("cuda", 8)
        >>> [number_of_devices(d, gpus) for d in ("auto", -1, 2, "2", "0,3", [5])]
        [8, 8, 2, 2, 2, 1]
        >>> number_of_devices("auto", Machine("cpu"))
        1
    """
    if isinstance(devices, (list, tuple)):
        return len(devices)
    text = str(devices).strip()
    if text in ("auto", "-1"):
        return max(1, here.count or 1)
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    # What is no number at all the Trainer refuses in its own words.
    return int(text) if text.lstrip("-").isdigit() else 1
