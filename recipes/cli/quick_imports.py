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

from callbacks.lib.shadowing import check_not_shadowed
from recipes.cli.help_cache import cached_help
from recipes.cli.program import program_name
from recipes.launch.streams import end_after_printing, print_error, secure_streams
from recipes.launch.thread_limit import check_thread_limit

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

    For the first lines of a program, before it has created other objects and opened files: standard streams that are
    closed are opened (`recipes.launch.streams`), and the limit on threads is tested (`recipes.launch.thread_limit`).
    Help that was printed before needs no imports, and ends the program. Commands that train or evaluate print that they
    have started. Ctrl-C exits with status 130 and no message. The interpreter exits without a collection of these
    objects, which would take over a second.

    Example:
        >>> with quick_imports():
        ...     import json
        loading PyTorch and Lightning ...
    """
    secure_streams()
    try:
        check_not_shadowed("recipes")
    except ImportError as error:
        print_error(f"error: {error}")
        sys.exit(2)
    check_thread_limit()
    if (text := cached_help(program_name(), sys.argv[1:])) is not None:
        print(text, end="")  # noqa: T201
        end_after_printing()
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
