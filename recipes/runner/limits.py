"""Limits that do not depend on how a run is split: numbers of updates, and of the batches of all devices together.

Lightning counts the batches of each device. With 2 devices in place of 1, or with accumulation, the same number is then
another amount of training.
"""

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from datamodules.errors import UserError

_OF_TRAINING = ("limit_train_batches", "overfit_batches")
_OF_EVALUATION = ("limit_val_batches", "limit_test_batches")

_OF_ALL_DEVICES = "a number of batches, counted over all devices; on one device also on a share"
LIMIT_TEXTS = {
    "limit_train_batches": "train on a number of updates in each epoch, or on a share of it, as in 0.1",
    "limit_val_batches": f"validate on {_OF_ALL_DEVICES}",
    "limit_test_batches": f"test on {_OF_ALL_DEVICES}",
    "overfit_batches": "train and validate on the same number of updates, or the same share of an epoch, not shuffled",
    "val_check_interval": "validate after a number of updates, a share of an epoch or a time, as in 00:00:30:00",
    "log_every_n_steps": "updates between two entries of the log",
}
"""What the flags do on the command line, in place of the Trainer's texts."""


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


def limits_per_device(
    options: Mapping[str, Any], micro_batches: int | None, rank: int, world_size: int
) -> dict[str, Any]:
    """The Trainer's limits on one device, for those that are numbers of updates or of the batches of all devices.

    Args:
        options: arguments of the Trainer.
        micro_batches: as `micro_batches_of_update` returns them.

    Raises:
        UserError: the size of an update is not known, or a device would get no batch, or a share of its own.

    Example:
        >>> options = {"limit_train_batches": 40, "limit_val_batches": 5}
        >>> limits_per_device(options, micro_batches=8, rank=1, world_size=2)
        {'limit_train_batches': 160, 'limit_val_batches': 2}
    """
    limits = {}
    for name, count in _counts(options, _OF_TRAINING).items():
        if micro_batches is None:
            raise UserError(
                f"{name}={count} counts updates, and their micro-batches change during this run or are not known"
                f" before it; pass a share of the epoch, such as {name}=0.5"
            )
        limits[name] = count * -(-micro_batches // world_size)
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


def _interval(trainer: pl.Trainer) -> int | float | None:
    """The Trainer's ``val_check_interval``; None of a time, where Lightning does not set the attribute."""
    return getattr(trainer, "val_check_interval", None)


class WholeUpdates(pl.Callback):
    """Counts the Trainer's limits in updates where several micro-batches make one, as if one forward pass made each.

    Runs on: `on_train_start`, `on_train_epoch_start` and `on_validation_end`, after the callback that accumulates.
    ``val_check_interval`` is a number of updates, or a share of an epoch's updates; a time is left to `ExactCheckpoint`
    and `Preemption`, which follow rank 0's clock.

    Raises:
        UserError: ``limit_train_batches`` is a share that ends within an update, so that the epoch's last update would
            see other samples on another number of devices; ``val_check_interval`` is longer than an epoch, or a time
            where ReduceLROnPlateau would step by a score that is not new.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check_share(trainer)
        if _interval(trainer) is None and any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            raise UserError(
                "schedule='plateau' follows the score of each epoch, and `val_check_interval` is a time; pass a number"
                " of updates or a share of an epoch"
            )
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        self._set_next_validation(trainer, progress.processed)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._set_next_validation(trainer, 0)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._set_next_validation(trainer, trainer.fit_loop.batch_idx + 1)

    def _check_share(self, trainer: pl.Trainer) -> None:
        share, batches = trainer.limit_train_batches, trainer.num_training_batches
        factor = trainer.accumulate_grad_batches
        if not isinstance(share, float) or share >= 1 or batches % factor == 0:
            return
        loader: Any = trainer.train_dataloader
        updates = max(1, int(share * math.ceil(len(loader) / factor)))
        raise UserError(
            f"limit_train_batches={share} is {batches:,} of {len(loader):,} batches, and an update takes {factor}: pass"
            f" a number of updates, limit_train_batches={updates}"
        )

    def _set_next_validation(self, trainer: pl.Trainer, batch: int) -> None:
        """Choose the interval until the next validation; the last update of an epoch may have fewer micro-batches.

        Args:
            batch: micro-batches that were trained in this epoch.
        """
        interval, batches = _interval(trainer), trainer.num_training_batches
        factor = trainer.accumulate_grad_batches
        if interval is None:
            return
        updates = math.inf if math.isinf(batches) else math.ceil(batches / factor)
        if isinstance(interval, float) and (interval == 1 or math.isinf(updates)):
            return
        every = interval if isinstance(interval, int) else max(1, int(updates * interval))
        if trainer.check_val_every_n_epoch is not None and every > updates:
            raise UserError(
                f"val_check_interval={interval} is more than the {updates} updates of an epoch; pass"
                f" val_check_interval={updates} or less"
            )
        trainer.val_check_batch = every * factor
        ends_epoch = trainer.check_val_every_n_epoch is not None and not math.isinf(updates) and updates % every == 0
        if ends_epoch and batch >= (updates - every) * factor:
            trainer.val_check_batch = batches
