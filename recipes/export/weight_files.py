"""Files of weights alone: safetensors, and what `torch.save` writes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from datamodules.errors import UserError
from recipes.recipe import Recipe
from recipes.weights import read_weights

__all__ = ["as_text", "check_weights", "write_weights"]


def as_text(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata for formats that hold texts: strings as they are, all else as JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}


def write_weights(network: nn.Module, path: Path, kind: str, metadata: Mapping[str, Any]) -> None:
    """Write the state dict of a network, under its names, with the metadata beside it."""
    # Tied weights are one tensor under two names; safetensors needs a tensor for each.
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}
    if kind == "safetensors":
        from safetensors.torch import save

        path.write_bytes(save(weights, as_text(metadata)))  # `save_file` lets nobody else read its file.
    else:
        torch.save({"state_dict": weights, **metadata}, path)


def check_weights(recipe: Recipe, path: Path) -> nn.Module:
    """A new network with the weights of a file.

    Raises:
        UserError: they are not those of the recipe, to the bit.
    """
    network = recipe.build_network()
    network.to(next(p.dtype for p in recipe.network.parameters()))
    network.load_state_dict(read_weights(path))
    for name, tensor in recipe.network.state_dict().items():
        if not torch.equal(network.state_dict()[name], tensor):
            raise UserError(f"{path} does not hold {name} as the checkpoint does; the disk may be damaged")
    network.to(memory_format=torch.channels_last if recipe.hparams.channels_last else torch.preserve_format)
    return network.eval()
