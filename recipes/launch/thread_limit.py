"""A limit on processes and threads that is too small, found before a library runs into it.

OpenBLAS and OpenMP start a thread for each core; where that fails, they print a page, or end the process.
"""

import os
import sys
import threading

from datamodules.errors import system_failure
from recipes.launch.streams import print_error

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["check_thread_limit"]

# Of the failure monitor, TensorBoard and others.
_OF_PYTHON = 4


def check_thread_limit(enough: int = 4096) -> None:
    """End the process with status 2 and one line where it cannot start as many threads as the libraries will.

    Args:
        enough: a limit (``ulimit -u``) from which nothing is tried.
    """
    if resource is None or not hasattr(resource, "RLIMIT_NPROC"):
        return
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or limit >= enough:
        return
    threads = os.environ.get("OMP_NUM_THREADS", "")
    wanted = (int(threads) if threads.isdigit() else os.cpu_count() or 1) + _OF_PYTHON
    end = threading.Event()
    try:
        for _ in range(wanted):
            threading.Thread(target=end.wait, daemon=True).start()
    except RuntimeError as error:
        print_error(f"error: {system_failure(error)}")
        sys.exit(2)
    finally:
        end.set()
