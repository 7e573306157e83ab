"""Start the server that worker processes are forked from: it has imported everything, so a worker starts at once.

One process imports torch, Lightning and the recipe, in place of each worker, which would take seconds. The server lives
until the run's last process has ended, so that it also starts the workers of a restart. Nothing in it may start a
thread or touch a device: a forked child would inherit a lock that nobody releases, or a device that it cannot use.
"""

import atexit
import gc
import multiprocessing
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver

from datamodules.lightning_package import VARIABLE, lightning_package

_MODULES = "LIGHTNING_RECIPES_PRELOAD"
_MODULES_OF_EVERY_RUN = (
    *("torch._dynamo", "torch.distributed", "torch.nn.parallel.distributed", "torch.utils.tensorboard"),
    *("torch.distributed.elastic.multiprocessing", "torchmetrics", "datamodules.lightning"),
    *("recipes.runner.run", "recipes.runner.worker"),
)


def start_method() -> str:
    """Return how worker processes are started: by forkserver, or by spawn on systems without it."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def start_fork_server(modules: Iterable[str]) -> None:
    """Start the fork server, unless it is running; it imports while this process continues.

    Args:
        modules: modules to import beside those that every run needs, such as the recipe's.
    """
    if start_method() != "forkserver":
        return
    multiprocessing.set_forkserver_preload([__name__])
    # NumPy's OpenBLAS starts threads on import unless it is limited to one. The limit does not reach the workers, which
    # get the environment of this process.
    modules_to_import = " ".join([*modules, *_MODULES_OF_EVERY_RUN])
    # The server imports nothing of the program, which may have imported the other package of Lightning.
    variables = {_MODULES: modules_to_import, VARIABLE: lightning_package(), "OPENBLAS_NUM_THREADS": "1"}
    previous = dict(os.environ)
    os.environ.update(variables)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(previous)


def _import_everything(modules: Iterable[str]) -> None:
    """Import the modules and prepare the fork server; called when the server imports this module."""
    # In a session of its own, the server's workers receive no Ctrl-C from the terminal: the agent passes it on, once.
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # The server ends with its last client.
    atexit.register(os._exit, 0)  # A regular exit would take a second for clean-up, and print warnings.
    # Collections during imports free nothing, and frozen objects stay on pages that parent and children share.
    gc.disable()
    for name in modules:
        with suppress(Exception):  # The worker imports the module again, and reports the error.
            import_module(name)
    gc.freeze()
    gc.enable()


if _MODULES in os.environ:
    _import_everything(os.environ.pop(_MODULES).split())
