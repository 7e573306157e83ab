"""Limits that do not depend on how a run is split: numbers of updates, and of the batches of all devices together.

`UpdateLoop` counts those of training in updates. Lightning counts the batches of each device in an evaluation; with 2
devices in place of 1 the same number is then another amount.
"""

from collections.abc import Mapping
from typing import Any

from datamodules.errors import UserError

_OF_EVALUATION = ("limit_val_batches", "limit_test_batches")


def micro_batches_of_update(accumulate: int, items: int | None, batch_size: Any, world_size: int) -> int | None:
    """Micro-batches of an update on all devices; None where the settings do not tell.

    Args:
        accumulate: the number of them on each device; it counts where `items` is None.
        items: of an update on all devices: samples, or batches limited by tokens.
        batch_size: of a micro-batch, counted as `items`.
    """
    if items is None:
        return accumulate * world_size
    return -(-items // batch_size) if isinstance(batch_size, int) else None


def _counts(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """Those limits that are numbers; the others are shares, times, 0 or not given."""
    given = {name: options.get(name) for name in names}
    return {name: n for name, n in given.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}


def limits_per_device(options: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """The Trainer's limits of evaluations on one device, for those that are numbers of the batches of all devices.

    Args:
        options: arguments of the Trainer.

    Raises:
        UserError: a device would get no batch, or a share of its own.

    Example:
        >>> limits_per_device({"limit_train_batches": 40, "limit_val_batches": 5}, rank=1, world_size=2)
        {'limit_val_batches': 2}
    """
    limits = {}
    for name, count in _counts(options, _OF_EVALUATION).items():
        if count < world_size:
            raise UserError(
                f"{name}={count} leaves {world_size - count} of {world_size} devices without a batch; pass"
                f" {name}={world_size} or more"
            )
        limits[name] = -((rank - count) // world_size)  # Those at rank, rank + world_size, ... below the count.
    for name in _OF_EVALUATION:
        if world_size > 1 and isinstance(share := options.get(name), float) and 0 < share < 1:
            raise UserError(
                f"{name}={share} is a share of each device's batches, and not those of one device; pass a number"
                f" of batches of all devices, such as {name}={world_size}"
            )
    return limits
