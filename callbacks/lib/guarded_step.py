"""An optimiser's step that runs out of memory is made again from a copy."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from callbacks.lib.undo import Undo, keep_optimizer
from datamodules.errors import RunFailedError, first_line, is_out_of_memory

__all__ = ["GuardedStep"]

_ATTEMPTS = 3


class GuardedStep:
    """Makes a step again where it runs out of memory: with gradients and state released and put back, then for one
    parameter after the other (``foreach=False``, which stays).

    That takes a copy of parameters, gradients and state on the host, which is made until a step has passed at once.

    Args:
        optimizer: one of torch's, which calls its closure once; its steps are guarded until `remove`.
        failed: is called after each failure, when all is as before the step.
    """

    def __init__(self, optimizer: Optimizer, failed: Callable[[], None]) -> None:
        self.fits = False
        """Whether steps are made without a copy."""
        self._attributes = vars(optimizer)
        self._patched = self._attributes.get("step")
        step: Any = optimizer.step

        @wraps(step)
        def guarded(closure: Any = None, **kwargs: Any) -> Any:
            undo: Undo | None = None
            loss = None

            def noted() -> Any:
                # Here gradients are complete, and it is known whether a size has changed on the way.
                nonlocal undo, loss
                loss = None if closure is None else closure()
                undo = None if self.fits else keep_optimizer(optimizer)
                return loss

            attempt: Any = noted
            if closure is None:  # GradScaler has called it.
                attempt = noted()
            for failures in range(_ATTEMPTS):
                try:
                    result = step(attempt, **kwargs)
                except Exception as error:
                    if undo is None or not is_out_of_memory(error):
                        raise
                    reason = first_line(error)
                else:
                    self.fits = failures == 0
                    return result
                undo()
                failed()
                if closure is not None:
                    attempt = lambda: loss  # noqa: E731
                for group in optimizer.param_groups:
                    if failures and "foreach" in group:
                        group["foreach"] = False
            raise RunFailedError(
                f"out of memory in the optimizer's step, {_ATTEMPTS} times ({reason}): pass a smaller network, an"
                " optimizer with less state, or a device with more memory"
            )

        self._attributes["step"] = guarded

    def remove(self) -> None:
        """Leave the optimiser as it was."""
        self._attributes.pop("step", None)
        if self._patched is not None:
            self._attributes["step"] = self._patched
