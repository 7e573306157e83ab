"""Imports are most of what a command waits for, and a third of them is garbage collection that finds nothing.

torch, torchvision and Lightning make some 700,000 objects. Looking through them again and again takes a quarter of the
time of importing them, and once more a second as the process ends; by none of it a byte becomes free.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quick_imports"]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports without garbage collection, which also later leaves out what they have made.

    For the first lines of a program, where nothing but modules exists. Ctrl-C ends it with status 130, in silence.

    Example:
        >>> with quick_imports():
        ...     import json
    """
    gc.disable()
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    gc.freeze()
    gc.enable()
