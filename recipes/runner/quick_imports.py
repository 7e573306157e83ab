"""The first lines of a program: imports without garbage collection.

Importing torch, torchvision and Lightning takes seconds, a quarter of them for collections that free nothing.
"""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["program_name", "quick_imports"]


def program_name() -> str:
    """What the user typed to start the program: ``python -m recipes.mnist``."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if program := getattr(main, "PROGRAM", None):
        return str(program)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"


def _discard_last_warnings() -> None:
    """Close standard error: extensions print warnings about objects that are alive when the interpreter is not."""
    with suppress(OSError):
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection for the imports inside, and exclude their objects from it.

    For the first lines of a program, before it has created other objects. Ctrl-C exits with status 130 and no message.
    The interpreter exits without a collection of these objects, which would take over a second.

    Example:
        >>> with quick_imports():
        ...     import json
    """
    # Else a rank whose rank 0 was killed prints the stack of the store's C++ code.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Registered before others, and so called after them.
    atexit.register(_discard_last_warnings)
    gc.disable()
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    else:
        gc.freeze()
    finally:
        gc.enable()
