"""Metrics by which a run decides: the best checkpoint, an early stop, a plateau.

Ranks that decide by values of their own train or save different models, or wait for one another.
"""

from typing import Any

from callbacks.lib.exchange import gather
from callbacks.lib.lightning_internals import callbacks_of
from datamodules.errors import RunFailedError
from datamodules.lightning import pl


def deciders(trainer: pl.Trainer) -> dict[str, str]:
    """Return the names of the monitored metrics, each with the class that decides by it."""
    names: dict[str, str] = {}
    for callback in callbacks_of(trainer):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            names[monitor] = type(callback).__name__
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor is not None:
            names[config.monitor] = type(config.scheduler).__name__
    return names


def check_decision(name: str, value: Any, decider: str) -> None:
    """Check that a metric has one value on all ranks before something decides by it; a collective call.

    Args:
        value: a number or a tensor of one element; None if this rank has no such metric.
        decider: name of what decides.

    Raises:
        RunFailedError: on all ranks, if one of them has another value.
    """
    by_rank = gather(None if value is None else float(value))
    texts = ["none" if number is None else f"{number:.9g}" for number in by_rank]
    for rank, number in enumerate(by_rank):
        # Compared as texts of all digits, by which NaN equals itself.
        if repr(number) != repr(by_rank[0]):
            raise RunFailedError(
                f"{name} is {texts[0]} on rank 0 and {texts[rank]} on rank {rank}, and {decider} decides by it, so that"
                " the ranks would train or save different models: pass sync_dist=True to self.log, or set one value"
                " on all ranks"
            )
