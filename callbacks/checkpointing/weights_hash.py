"""A hash of weights, by which two trainings are compared to the bit."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["weights_hash"]


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def weights_hash(state_dict: Mapping[str, Any]) -> str | None:
    """The SHA-256 of the names, types, shapes and bytes of a state dict.

    None where a rank holds a part of a tensor only, as in a checkpoint that is saved in parts: each rank would have
    another hash.

    Example:
        >>> one, other = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0 + 2**-23])}
        >>> weights_hash(one) == weights_hash({"w": torch.ones(1)}), weights_hash(one) == weights_hash(other)
        (True, False)
    """
    sha256 = hashlib.sha256()
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
                return None
            sha256.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            sha256.update(_bytes(value))
        else:  # What a module keeps by `get_extra_state`.
            sha256.update(f"{name} {value!r}\n".encode())
    return sha256.hexdigest()
