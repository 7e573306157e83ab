"""Errors whose message tells the user what to do; the command line prints them without a traceback."""

from typing import ClassVar

__all__ = ["RunFailedError", "UserError"]


class UserError(ValueError):
    """The run could not start: parameters, data or the environment are wrong, and the user can correct them.

    The message says what was found, what was expected and what to pass instead. It names parameters as Python does,
    ``batch_size=256`` or `` `batch_size` `` in backticks, and the command line prints those that have a flag as
    ``--batch-size 256`` and ``--batch-size``.
    """

    exit_status: ClassVar[int] = 2


class RunFailedError(UserError):
    """The run started and failed on the way, such as by divergence or a full disk."""

    exit_status: ClassVar[int] = 1
