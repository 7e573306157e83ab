"""Data modules and loaders whose batches, shuffle order and random numbers do not depend on the number of processes.

Names are imported on first use. A callback that only needs random numbers therefore imports no data set.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
