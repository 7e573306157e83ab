"""The global batch of a run that goes on, on any number of devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from callbacks.gradient_accumulation import GradientAccumulation
from datamodules.errors import UserError
from recipes.resume.saved_run import SavedRun

__all__ = ["Split", "fit_batch", "fit_tokens", "keep_global_batch"]


# Batches of words in an update, among the saved settings of a run that was cut anew. Its --accumulate stays as it was
# typed, because a restart types it again.
_BATCHES = "batches_per_update"


@dataclass(frozen=True)
class Split:
    """How an update is cut: samples (or words) on a device at once, and micro-batches."""

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


def fit_tokens(saved: SavedRun, config: Mapping[str, Any], devices: int) -> Split | None:
    """Cut the updates of a run whose batches are cut by words; None where they stay as they were cut.

    Equally many batches of as many words make the same updates in the same order on any number of devices.

    Raises:
        UserError: what is asked for is another global batch, or the devices cannot share the batches equally.

    Example:
        >>> saved = SavedRun({"max_tokens": 4096, "accumulate": 2}, 0, 0, devices=1, global_batch_size=68)
        >>> fit_tokens(saved, saved.config, devices=2)
        Split(batch_size=4096, accumulate=1)
    """
    old, tokens, accumulate = saved.config, config["max_tokens"], config.get("accumulate", 1)
    before, old_tokens, old_accumulate = saved.devices or devices, old.get("max_tokens"), old.get("accumulate", 1)
    asked, old_asked = config.get("global_batch_size"), old.get("global_batch_size")
    if old_tokens is None:
        batch = old.get("batch_size")
        raise UserError(
            f"--max-tokens is {tokens}, and the checkpoint's batches are of {batch} sentences; leave it out"
        )
    if asked != old_asked:
        raise UserError(f"--global-batch-size is {asked}, and {old_asked} in the checkpoint")
    same = (tokens, accumulate) == (old_tokens, old_accumulate)
    if same and devices == before and _BATCHES not in old:
        return None
    if isinstance(accumulate, Mapping) or isinstance(old_accumulate, Mapping):
        raise UserError(
            f"the accumulation of this run changes in its course, for {old_tokens} words on {before} devices: pass"
            f" --devices {before} --max-tokens {old_tokens}, and its --accumulate"
        )
    if asked is not None and tokens == old_tokens:
        return None  # The accumulation follows from it.
    batches = old.get(_BATCHES) or before * old_accumulate
    if same and not batches % devices:
        return Split(tokens, batches // devices)
    fitting = old_tokens * batches // (devices * accumulate)
    if tokens != fitting:
        raise UserError(
            f"{devices} devices x {accumulate} micro-batches of {tokens} words are another global batch than the"
            f" checkpoint's {batches} of {old_tokens}: pass --max-tokens {fitting}"
        )
    return Split(tokens, accumulate)


def _replace_accumulation(trainer: pl.Trainer, accumulation: GradientAccumulation) -> None:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for place, callback in enumerate(callbacks):
        if isinstance(callback, GradientAccumulation):
            callbacks[place] = accumulation


def _keep_tokens(trainer: pl.Trainer, saved: SavedRun, config: dict[str, Any]) -> str | None:
    """`keep_global_batch` where batches are cut by words."""
    devices = trainer.world_size
    split = fit_tokens(saved, config, devices)
    if split is not None:
        _replace_accumulation(trainer, GradientAccumulation(split.accumulate))
        config[_BATCHES] = devices * split.accumulate
    if saved.devices in (None, devices):
        return None
    line = f"devices: {saved.devices} before, {devices} now; the global batch stays"
    if split is None:
        return f"{line} {config['global_batch_size']}, and the order too"
    exact = split.batch_size == saved.config["max_tokens"]
    order = ", and the order too" if exact else ", and batches are cut anew"
    return f"{line} ({devices} x {split.batch_size} words x {split.accumulate} micro-batches){order}"


def keep_global_batch(trainer: pl.Trainer, data: Any, saved: SavedRun, config: dict[str, Any]) -> str | None:
    """Have a run that goes on make updates of the same samples as before.

    Args:
        config: the settings, which are saved; what they do not say of the split is added.

    Returns:
        A line that says so, where the number of devices is another.

    Raises:
        UserError: see `fit_batch` and `fit_tokens`.
    """
    if config.get("max_tokens"):
        return _keep_tokens(trainer, saved, config)
    split = fit_batch(saved, config, trainer.world_size)
    if split is None:
        return None
    if hasattr(data, "batch_size"):
        data.batch_size = split.batch_size
    _replace_accumulation(trainer, GradientAccumulation(global_batch_size=saved.global_batch_size))
    if saved.devices in (None, trainer.world_size):
        return None
    return (
        f"devices: {saved.devices} before, {trainer.world_size} now; the global batch stays {saved.global_batch_size}"
        f" ({trainer.world_size} x {split.batch_size} samples x {split.accumulate} micro-batches), and the order too"
    )
