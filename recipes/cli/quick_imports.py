"""Imports are most of what a command waits for, and a quarter of that is garbage collection that finds nothing.

torch, torchvision and Lightning make some 740,000 objects, which are looked through again and again while they come.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quick_imports"]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports without garbage collection, which leaves out what they have made until the process ends.

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
    else:
        gc.freeze()
        # In the end they are let go of in order: extensions complain of what they find alive then.
        atexit.register(gc.unfreeze)
    finally:
        gc.enable()
