"""Lightning's training step, with cheaper calls of hooks: it calls the same hooks in the same order."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from callbacks.lib.step_plan import plan_steps


class LeanLoop(pl.Callback):
    """Cheaper training steps, for any module, strategy and precision.

    Results, counters, logs and the order of hooks are those of Lightning, whose own step is taken where something is
    not ordinary: manual optimisation, a profiler, GradScaler, an overridden `optimizer_step` (see
    `callbacks.lib.step_plan`). Other Trainers of the process are left alone.

    Runs on: `on_fit_start`, where it replaces the step of this Trainer's loop, and `on_exception` and `teardown`, where
    it takes that back.

    Example:
        >>> trainer = pl.Trainer(callbacks=[LeanLoop()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        self._undo: Callable[[], None] = lambda: None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._undo = plan_steps(trainer)

    def _restore(self, *args: Any, **kwargs: Any) -> None:
        self._undo()

    on_exception = teardown = _restore
