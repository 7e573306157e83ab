"""Calls of a recipe's network, and the check of its outputs.

Tested in `tests/recipes/test_base.py`.
"""

from typing import Any

from torch import Tensor, nn

from datamodules.errors import UserError, spelled
from datamodules.lightning import apply_to_collection


def call_network(network: nn.Module, inputs: Any) -> Any:
    """Call a network. For an empty batch, return empty outputs of the right shape and dtype.

    In an evaluation, a device without samples gets an empty batch. Many networks reject it, for example by
    ``x.view(len(x), -1)``, so the network is called with two zero inputs, and the rows of the outputs are removed.
    """
    try:
        if inputs.shape[0]:
            return network(inputs)
    except RuntimeError as error:
        if "view size is not compatible" in str(error):
            setting = spelled("channels_last", False)
            error.add_note(f"convolutions are in channels_last: write flatten(1) for view, or pass {setting}")
        raise
    outputs = network(inputs.new_zeros(2, *inputs.shape[1:]))
    return apply_to_collection(outputs, Tensor, _without_rows)


def _without_rows(tensor: Tensor) -> Tensor:
    return tensor[:0]


def check_logits(logits: Any, num_classes: int) -> Tensor:
    """Return the outputs of a classifier after a check that they have a column for each class. No value is read.

    Args:
        logits: outputs of the network, of shape (batch, num_classes).

    Raises:
        UserError: the outputs are not a tensor, or have another shape.
    """
    if isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] == num_classes:
        return logits
    if not isinstance(logits, Tensor):
        raise UserError(
            f"the network of build_network returns a {type(logits).__name__}, expected a tensor of logits of shape"
            f" (batch, {num_classes}): return that tensor only"
        )
    raise UserError(
        f"the network of build_network returns a tensor of shape {tuple(logits.shape)} for a batch, expected (batch,"
        f" {num_classes}), a column for each class: end it with a layer of num_classes outputs, as in"
        " nn.Linear(..., self.hparams.num_classes)"
    )
