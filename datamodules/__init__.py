"""Data modules, shuffle order, random numbers and loaders that do not depend on how a run is split over processes.

Names are imported when they are used, so that a callback that needs a random number loads no data set.
"""

from lazy_loader import attach_stub

import datamodules.lightning_package  # noqa: F401 - before any module that imports Lightning

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
