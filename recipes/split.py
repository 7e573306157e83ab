"""The global batch of a run that goes on, on any number of devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from callbacks.gradient_accumulation import GradientAccumulation
from datamodules.errors import UserError
from recipes.saved import SavedRun

__all__ = ["Split", "fit_batch", "keep_global_batch"]


@dataclass(frozen=True)
class Split:
    """How an update is cut: samples on a device at once, and micro-batches."""

    batch_size: int
    accumulate: int


def fit_batch(saved: SavedRun, config: Mapping[str, Any], devices: int) -> Split | None:
    """Cut the checkpoint's global batch for a number of devices; None where it is unknown or stays as it was cut.

    Settings that differ from the saved ones are the user's wish, and are kept: the rest follows from the global batch.

    Raises:
        UserError: what is asked for is another global batch, or the devices cannot share it equally.

    Example:
        >>> saved = SavedRun({"batch_size": 64, "accumulate": 1}, 0, 0, devices=1, global_batch_size=64)
        >>> fit_batch(saved, saved.config, devices=4)
        Split(batch_size=16, accumulate=1)
    """
    total, old = saved.global_batch_size, saved.config
    batch_size, accumulate, asked = (config.get(name) for name in ("batch_size", "accumulate", "global_batch_size"))
    if total is None or not isinstance(batch_size, int):
        return None
    if isinstance(accumulate, Mapping):
        if batch_size * devices == old["batch_size"] * (saved.devices or devices):
            return None
        raise UserError(
            f"the accumulation of this run changes in its course, for {old['batch_size']} samples on"
            f" {saved.devices} devices: pass --devices {saved.devices} --batch-size {old['batch_size']}"
        )
    if asked is not None and asked not in (total, old.get("global_batch_size")):
        raise UserError(f"--global-batch-size is {asked}, and {total} in the checkpoint")
    share, uneven = divmod(total, devices)
    if uneven:
        fitting = [n for n in range(1, total + 1) if total % n == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - devices))[:2])
        raise UserError(
            f"{devices} devices cannot share the checkpoint's global batch of {total} equally: pass"
            f" {' or '.join(map(str, near))} devices"
        )
    batch_is_wish = batch_size != old.get("batch_size")
    if accumulate != old.get("accumulate") and isinstance(accumulate, int):
        wanted = batch_size if batch_is_wish else share // accumulate
        if not wanted or wanted * accumulate != share:
            raise UserError(
                f"{devices} devices x {accumulate} micro-batches of {batch_size} samples are no global batch of"
                f" {total}, as in the checkpoint"
            )
        return Split(wanted, accumulate)
    if share % batch_size:
        if batch_is_wish:
            raise UserError(
                f"--batch-size {batch_size} on {devices} devices makes no global batch of {total}, as in the checkpoint"
            )
        batch_size = max(size for size in range(1, min(batch_size, share) + 1) if share % size == 0)
    return Split(batch_size, share // batch_size)


def keep_global_batch(trainer: pl.Trainer, data: Any, saved: SavedRun, config: Mapping[str, Any]) -> str | None:
    """Have a run that goes on make updates of the same samples as before.

    Returns:
        A line that says so, where the number of devices is another.

    Raises:
        UserError: see `fit_batch`.
    """
    split = fit_batch(saved, config, trainer.world_size)
    if split is None:
        return None
    if hasattr(data, "batch_size"):
        data.batch_size = split.batch_size
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for place, callback in enumerate(callbacks):
        if isinstance(callback, GradientAccumulation):
            callbacks[place] = GradientAccumulation(global_batch_size=saved.global_batch_size)
    if saved.devices in (None, trainer.world_size):
        return None
    return (
        f"devices: {saved.devices} before, {trainer.world_size} now; the global batch stays {saved.global_batch_size}"
        f" ({trainer.world_size} x {split.batch_size} samples x {split.accumulate} micro-batches), and the order too"
    )
