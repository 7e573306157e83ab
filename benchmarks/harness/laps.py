"""Where the time of a step goes: laps of a plain PyTorch loop, and the shares of Lightning's actions."""

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

__all__ = ["PARTS", "Laps", "PartsProfiler", "part_of"]

PARTS = ("data", "transfer", "compute", "optimiser", "callbacks", "logging", "rest")
"""What a step is split into; the rest is what the framework does between them."""


class Laps:
    """When each step ended, and the seconds of each part since `begin`.

    Args:
        settling: steps before the clock starts: the first are slower.
        total: all steps; what comes after them is not counted.
    """

    def __init__(self, settling: int, total: int) -> None:
        self.settling, self.total = settling, total
        self.ends: list[float] = []
        self.parts: dict[str, float] = defaultdict(float)
        self._since = 0.0

    def add(self, part: str, seconds: float) -> None:
        """Count seconds for a part, after the settling and before the end."""
        if self.settling <= len(self.ends) < self.total:
            self.parts[part] += seconds

    def start(self) -> None:
        """A lap begins."""
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """What was done since the last lap was this part."""
        now = time.perf_counter()
        self.add(part, now - self._since)
        self._since = now

    def end_step(self) -> None:
        """A step is done."""
        self.ends.append(time.perf_counter())

    @property
    def steps(self) -> int:
        """Steps after the settling."""
        return len(self.ends) - self.settling

    @property
    def seconds(self) -> float:
        """Seconds of a step, the mean over all after the settling."""
        return (self.ends[-1] - self.ends[self.settling - 1]) / self.steps

    @property
    def lower_quartile(self) -> float:
        """Seconds that three quarters of the steps exceed, which other programs disturb less than the mean."""
        ends = self.ends[self.settling - 1 :]
        durations = sorted(b - a for a, b in pairwise(ends))
        return durations[len(durations) // 4]

    def split(self) -> dict[str, float]:
        """Microseconds of each part in a step."""
        found = {part: self.parts[part] / self.steps * 1e6 for part in PARTS[:-1]}
        return found | {"rest": self.seconds * 1e6 - sum(found.values())}


def part_of(action: str) -> str:
    """The part that one of Lightning's profiled actions belongs to.

    Example:
        >>> part_of("[Strategy]SingleDeviceStrategy.backward"), part_of("[Callback]Mine.on_train_batch_end")
        ('compute', 'callbacks')
    """
    if action == "logging":
        return action
    if action == "update":
        return "optimiser"
    if "train_dataloader_next" in action:
        return "data"
    if "batch_to_device" in action or "batch_transfer" in action:
        return "transfer"
    if action.startswith("[Callback]"):
        return "callbacks"
    if action.endswith((".training_step", ".backward")):
        return "compute"
    if action.endswith((".optimizer_zero_grad", ".lr_scheduler_step")):
        return "optimiser"
    return "rest"


class PartsProfiler(Profiler):
    """Seconds of each part in a Trainer: what an action takes, without the actions inside it.

    Example:
        >>> trainer = pl.Trainer(profiler=PartsProfiler(Laps(settling=1, total=9)), logger=False, accelerator="cpu")
    """

    def __init__(self, laps: Laps) -> None:
        super().__init__()
        self.laps = laps
        self._open: list[tuple[str, float]] = []

    @override
    def start(self, action_name: str) -> None:
        now = time.perf_counter()
        if self._open:
            name, since = self._open[-1]
            self.laps.add(part_of(name), now - since)
        self._open.append((action_name, now))

    @override
    def stop(self, action_name: str) -> None:
        now = time.perf_counter()
        if not self._open:
            return  # It began before this profiler was put in.
        name, since = self._open.pop()
        self.laps.add(part_of(name), now - since)
        if self._open:
            self._open[-1] = (self._open[-1][0], now)
        if action_name.endswith(".configure_gradient_clipping"):
            # The last that Lightning does before the optimiser's own work, in the closure that it hands to it.
            self.start("update")

    def watch(self, trainer: pl.Trainer) -> None:
        """Tell apart what the optimiser does itself, and count what the Trainer's loggers do, whoever calls them."""
        for logger in trainer.loggers:
            logger.log_metrics = self._timed(logger.log_metrics)  # type: ignore[method-assign]
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(lambda *_: self.stop("update"))

    def _timed(self, log_metrics: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> None:
            with self.profile("logging"):
                log_metrics(*args, **kwargs)

        return timed
