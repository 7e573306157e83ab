"""How a recipe calls its network."""

from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn


def call_network(network: nn.Module, inputs: Any) -> Any:
    """The outputs of a network; no rows for an empty batch, which a device without samples gets in an evaluation.

    Many networks refuse one (``x.view(len(x), -1)`` does).
    """
    try:
        if inputs.shape[0]:
            return network(inputs)
    except RuntimeError as error:
        if "view size is not compatible" in str(error):
            error.add_note("convolutions are in channels_last: write flatten(1) for view, or pass channels_last=False")
        raise
    return apply_to_collection(network(inputs.new_zeros(2, *inputs.shape[1:])), Tensor, lambda rows: rows[:0])
