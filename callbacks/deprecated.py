"""Names that still work, with a warning, and go with the next minor version."""

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler
from typing_extensions import deprecated

__all__ = ["NoProfiler", "SkipUnusedHooks"]


@deprecated("SkipUnusedHooks does nothing: LeanLoop makes its calls cheaper, too; leave it out")
class SkipUnusedHooks(pl.Callback):
    """Does nothing; `LeanLoop` replaces it."""


@deprecated("NoProfiler() is Lightning's default profiler, which LeanLoop skips; leave it out")
class NoProfiler:
    """Lightning's default profiler; `LeanLoop` replaces it."""

    def __new__(cls) -> PassThroughProfiler:  # type: ignore[misc]
        return PassThroughProfiler()
