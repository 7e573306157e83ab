"""Imports without garbage collection, which takes a quarter of their time and frees nothing.

Importing torch, torchvision and Lightning creates some 740,000 objects, which each collection would traverse again.
"""

import atexit
import gc
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from recipes.cli.help_cache import cached_help
from recipes.cli.program import program_name

__all__ = ["quick_imports"]

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
_OTHER_NODE = re.compile(r"--node[-_]rank[= ](?!0\b)")
_WITHOUT_A_RUN = {"predict", "export"}
_WITHOUT_LOADING = {"-h", "--help", "--help-all", "--help_all", "--print-config", "--print_config"}


def _announce(args: Sequence[str]) -> None:
    """Say on rank 0 that the imports take seconds."""
    other = _OTHER_NODE.search(" ".join(args)) or any(os.environ.get(name, "0") != "0" for name in _RANKS)
    if other or _WITHOUT_LOADING.intersection(args):
        return
    # The output of some commands is for other programs.
    stream = sys.stderr if _WITHOUT_A_RUN.intersection(args) else sys.stdout
    if stream is sys.stdout or stream.isatty():
        print("loading PyTorch and Lightning ...", file=stream, flush=True)


def _discard_last_warnings() -> None:
    """Close standard error: extensions print warnings about objects that are alive when the interpreter is not."""
    with suppress(OSError):
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection for the imports inside, and exclude their objects from it.

    For the first lines of a program, before it has created other objects. Help that was printed before ends the
    program. Commands that train or evaluate print that they have started. Ctrl-C exits with status 130 and no message.
    The interpreter exits without a collection of these objects, which would take over a second.

    Example:
        >>> with quick_imports():
        ...     import json
        loading PyTorch and Lightning ...
    """
    if (text := cached_help(program_name(), sys.argv[1:])) is not None:
        print(text, end="")  # noqa: T201
        sys.exit()
    _announce(sys.argv[1:])
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
