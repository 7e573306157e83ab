"""The process that a run's workers are forked from: it has imported everything, so a worker starts at once.

Python's fork server starts one process in place of many that import torch, Lightning and the recipe for seconds each.
It stays until the run's last process has ended, and starts the workers of a restart, too. Nothing in it may start a
thread or touch a device: a child of it would find a lock that nobody releases, or a device that it cannot use.
"""

import atexit
import gc
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver

_MODULES = "LIGHTNING_RECIPES_PRELOAD"
_OF_EVERY_RUN = (
    *("torch._dynamo", "torch.distributed", "torch.nn.parallel.distributed", "torch.utils.tensorboard"),
    *("torch.distributed.elastic.multiprocessing", "torchmetrics", "lightning.pytorch.loggers"),
    *("recipes.runner.run", "recipes.runner.worker"),
)


def start_method() -> str:
    """How worker processes are started here: forkserver, or spawn on systems without it."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def start_fork_server(modules: Iterable[str]) -> None:
    """Start the fork server, unless it runs already; it imports while this process goes on.

    Args:
        modules: what it imports beside what every run needs, such as the recipe's module.
    """
    if start_method() != "forkserver":
        return
    multiprocessing.set_forkserver_preload([__name__])
    # NumPy's OpenBLAS starts threads when it is imported. The workers get the environment of this process.
    with _environment({_MODULES: " ".join([*modules, *_OF_EVERY_RUN]), "OPENBLAS_NUM_THREADS": "1"}):
        forkserver.ensure_running()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _import_everything(modules: Iterable[str]) -> None:
    """What the fork server does when it imports this module."""
    # In a session of its own no Ctrl-C reaches the workers: signals come to them from the agent, once.
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # It ends with its last client.
    atexit.register(os._exit, 0)  # The clean-up of what it has imported takes a second, and prints warnings.
    gc.disable()
    for name in modules:
        with suppress(Exception):  # The worker imports it again, and says what is wrong.
            import_module(name)
    gc.freeze()
    gc.enable()


if _MODULES in os.environ:
    _import_everything(os.environ.pop(_MODULES).split())
