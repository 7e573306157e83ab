"""The global batch of a resumed run: a function of the checkpoint, the flags and the number of devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datamodules.errors import UserError
from recipes.launch.settings import flag_of
from recipes.resume.saved_run import SavedRun

__all__ = ["Rebatch", "ResumedBatch", "rebatch_samples", "rebatch_tokens", "resumed_batch"]


# The number of token batches in an update, among the saved settings of a run that was rebatched. Its --accumulate stays
# as it was typed, because a restart types it again.
_BATCHES = "batches_per_update"


@dataclass(frozen=True)
class Rebatch:
    """How an update is divided: samples (or tokens) on a device in one forward pass, and micro-batches."""

    batch_size: int
    accumulate: int


def rebatch_samples(saved: SavedRun, config: Mapping[str, Any], devices: int) -> Rebatch | None:
    """Divide the checkpoint's global batch among devices; None where it is unknown or divided as before.

    Settings that differ from the saved ones are kept; the others follow from the global batch.

    Raises:
        UserError: the settings make another global batch, or the devices cannot share it equally.

    Example:
        >>> saved = SavedRun({"batch_size": 64, "accumulate": 1}, 0, 0, devices=1, global_batch_size=64)
        >>> rebatch_samples(saved, saved.config, devices=4)
        Rebatch(batch_size=16, accumulate=1)
    """
    total, old = saved.global_batch_size, saved.config
    batch_size, accumulate, asked = (config.get(name) for name in ("batch_size", "accumulate", "global_batch_size"))
    if total is None or not isinstance(batch_size, int):
        return None
    if isinstance(accumulate, Mapping):
        if batch_size * devices == old["batch_size"] * (saved.devices or devices):
            return None
        raise UserError(
            f"the accumulation of this run changes during the run, for {old['batch_size']} samples on"
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
    batch_size_given = batch_size != old.get("batch_size")
    if accumulate != old.get("accumulate") and isinstance(accumulate, int):
        wanted = batch_size if batch_size_given else share // accumulate
        if not wanted or wanted * accumulate != share:
            raise UserError(
                f"{devices} devices x {accumulate} micro-batches of {batch_size} samples are not the global batch of"
                f" {total} of the checkpoint"
            )
        return Rebatch(wanted, accumulate)
    if share % batch_size:
        if batch_size_given:
            raise UserError(
                f"--batch-size {batch_size} on {devices} devices does not divide the global batch of {total} of the"
                " checkpoint"
            )
        batch_size = max(size for size in range(1, min(batch_size, share) + 1) if share % size == 0)
    return Rebatch(batch_size, share // batch_size)


def rebatch_tokens(
    saved: SavedRun, config: Mapping[str, Any], devices: int, parameter: str = "max_tokens"
) -> Rebatch | None:
    """Divide the updates of a run whose batches are limited by tokens; None where they are divided as before.

    The same number of batches of the same size makes the same updates in the same order on any number of devices.

    Args:
        parameter: the setting that limits a batch.

    Raises:
        UserError: the settings make another global batch, or the devices cannot share the batches equally.

    Example:
        >>> saved = SavedRun({"max_tokens": 4096, "accumulate": 2}, 0, 0, devices=1, global_batch_size=68)
        >>> rebatch_tokens(saved, saved.config, devices=2)
        Rebatch(batch_size=4096, accumulate=1)
    """
    old, tokens, accumulate = saved.config, config[parameter], config.get("accumulate", 1)
    before, old_tokens, old_accumulate = saved.devices or devices, old.get(parameter), old.get("accumulate", 1)
    asked, old_asked = config.get("global_batch_size"), old.get("global_batch_size")
    flag = flag_of(parameter)
    if old_tokens is None:
        batch = old.get("batch_size")
        raise UserError(f"{flag} is {tokens}, and the checkpoint's batches have {batch} samples; leave it out")
    if asked != old_asked:
        raise UserError(f"--global-batch-size is {asked}, and {old_asked} in the checkpoint")
    same = (tokens, accumulate) == (old_tokens, old_accumulate)
    if same and devices == before and _BATCHES not in old:
        return None
    if isinstance(accumulate, Mapping) or isinstance(old_accumulate, Mapping):
        raise UserError(
            f"the accumulation of this run changes during the run, for {old_tokens} tokens on {before} devices: pass"
            f" --devices {before} {flag} {old_tokens}, and its --accumulate"
        )
    if asked is not None and tokens == old_tokens:
        return None  # The accumulation follows from it.
    batches = old.get(_BATCHES) or before * old_accumulate
    if same and not batches % devices:
        return Rebatch(tokens, batches // devices)
    fitting = old_tokens * batches // (devices * accumulate)
    if tokens != fitting:
        raise UserError(
            f"{devices} devices x {accumulate} micro-batches of {tokens} tokens are another global batch than the"
            f" checkpoint's {batches} of {old_tokens}: pass {flag} {fitting}"
        )
    return Rebatch(tokens, accumulate)


@dataclass(frozen=True)
class ResumedBatch:
    """What a resume changes so that an update sees the same samples as before.

    Args:
        settings: values to build with in place of those of the command.
        config: values to add to the saved settings.
        line: what to print, where the number of devices has changed.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    line: str = ""


def _resumed_tokens(saved: SavedRun, config: Mapping[str, Any], devices: int, parameter: str) -> ResumedBatch:
    divided = rebatch_tokens(saved, config, devices, parameter)
    settings: dict[str, Any] = {}
    added: dict[str, Any] = {}
    if divided is not None:
        settings = {"accumulate": divided.accumulate, "global_batch_size": None}
        added = {_BATCHES: devices * divided.accumulate}
    if saved.devices in (None, devices):
        return ResumedBatch(settings, added)
    line = f"devices: {saved.devices} before, {devices} now; the global batch stays"
    if divided is None:
        return ResumedBatch(settings, added, f"{line} {config['global_batch_size']}, and the order too")
    order = "and the order too" if divided.batch_size == saved.config[parameter] else "and the batches are made again"
    parts = f"({devices} x {divided.batch_size} tokens x {divided.accumulate} micro-batches)"
    return ResumedBatch(settings, added, f"{line} {parts}, {order}")


def resumed_batch(
    saved: SavedRun, config: Mapping[str, Any], devices: int, tokens_parameter: str | None = None
) -> ResumedBatch:
    """Keep the global batch of a resumed run, whatever its devices.

    Args:
        config: the settings of this command.
        devices: of all nodes.
        tokens_parameter: the setting that, where it is given, limits a batch by tokens.

    Raises:
        UserError: see `rebatch_samples` and `rebatch_tokens`.
    """
    if tokens_parameter is not None and config.get(tokens_parameter):
        return _resumed_tokens(saved, config, devices, tokens_parameter)
    divided = rebatch_samples(saved, config, devices)
    if divided is None:
        return ResumedBatch()
    settings = {"batch_size": divided.batch_size, "global_batch_size": saved.global_batch_size, "accumulate": 1}
    if saved.devices in (None, devices):
        return ResumedBatch(settings)
    parts = f"({devices} x {divided.batch_size} samples x {divided.accumulate} micro-batches)"
    line = f"devices: {saved.devices} before, {devices} now; the global batch stays {saved.global_batch_size} {parts}"
    return ResumedBatch(settings, line=f"{line}, and the order too")
