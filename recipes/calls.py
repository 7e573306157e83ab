"""How a recipe calls its network."""

from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn

from callbacks.lib.batch_norm import is_synchronised


def call_network(network: nn.Module, inputs: Any) -> Any:
    """The outputs of a network; no rows for an empty batch, as a device gets at an epoch's uneven end.

    Many networks refuse one (``x.view(len(x), -1)`` does). Synchronised BatchNorm counts its samples.
    """
    try:
        if len(inputs) or any(map(is_synchronised, network.modules())):
            return network(inputs)
    except RuntimeError as error:
        if "view size is not compatible" in str(error):
            error.add_note("convolutions are in channels_last: write flatten(1) for view, or pass channels_last=False")
        raise
    return apply_to_collection(network(inputs.new_zeros(2, *inputs.shape[1:])), Tensor, lambda rows: rows[:0])
