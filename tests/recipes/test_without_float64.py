"""Apple's GPUs have no float64: nothing that runs on the device asks for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from callbacks.lib.batch_norm import local_moments
from datamodules.images.augmentation import _beta
from datamodules.loading import randomness
from recipes.mistakes import MistakeImages


class NoFloat64(TorchDispatchMode):
    """Raises as MPS does, for the device "meta" in its place."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.device.type == "meta" and output.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return output


CALLS: dict[str, Callable[[], Any]] = {
    "mistakes": lambda: MistakeImages().add(torch.empty(4, 3, 8, 8, device="meta"), torch.empty(4, 3, device="meta")),
    "synchronized BatchNorm": lambda: local_moments(torch.empty(0, 3, 8, 8, device="meta"), torch.float32),
    "MixUp": lambda: _beta(0.2, torch.empty(4, device="meta")),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_on_the_device_is_float64(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(randomness, "WITHOUT_FLOAT64", ("mps", "meta"))
    with NoFloat64():
        CALLS[name]()
