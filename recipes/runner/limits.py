"""Convert limits that count updates, or the batches of all devices, to limits of one device.

`UpdateLoop` counts the limits of training in updates. In an evaluation Lightning counts the batches of each device, so
that the same number would mean twice as many samples on 2 devices.
"""

from collections.abc import Mapping
from typing import Any

from datamodules.errors import UserError, spelled

_EVALUATION_LIMITS = ("limit_val_batches", "limit_test_batches")


def micro_batches_of_update(accumulate: int, items: int | None, batch_size: Any, world_size: int) -> int | None:
    """Return the micro-batches of an update on all devices; None where the settings do not determine it.

    Args:
        accumulate: micro-batches of each device; used where `items` is None.
        items: samples of an update on all devices, or its batches where tokens limit a batch.
        batch_size: the size of a micro-batch, in the unit of `items`.
    """
    if items is None:
        return accumulate * world_size
    return -(-items // batch_size) if isinstance(batch_size, int) else None


def _counts(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """Return the limits that are numbers of batches; others are shares, times, 0 or not given."""
    values = {name: options.get(name) for name in names}
    return {name: n for name, n in values.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}


def limits_per_device(options: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return the Trainer's limits of an evaluation on one device, from numbers of batches of all devices.

    Args:
        options: arguments of the Trainer.

    Raises:
        UserError: a device would get no batch, or a share of its own.

    Example:
        >>> limits_per_device({"limit_train_batches": 40, "limit_val_batches": 5}, rank=1, world_size=2)
        {'limit_val_batches': 2}
    """
    limits = {}
    for name, count in _counts(options, _EVALUATION_LIMITS).items():
        if count < world_size:
            raise UserError(
                f"{spelled(name, count)} leaves {world_size - count} of {world_size} devices without a batch; pass"
                f" {spelled(name, world_size)} or more"
            )
        # This rank evaluates the batches rank, rank + world_size, rank + 2 * world_size and so on.
        limits[name] = -((rank - count) // world_size)
    for name in _EVALUATION_LIMITS:
        share = options.get(name)
        if world_size > 1 and isinstance(share, float) and 0 < share < 1:
            raise UserError(
                f"{spelled(name, share)} is a share of each device's batches, and not those of one device; pass a"
                f" number of batches of all devices, such as {spelled(name, world_size)}"
            )
    return limits
