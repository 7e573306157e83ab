"""Processes whose parent is gone end, instead of waiting for a run that is over.

Lightning's launcher does not know of a child yet when a signal ends it in the middle of starting one; the workers of a
torchrun that was killed go on training behind the back of those that replace them.
"""

import contextlib
import os
import threading
import time
from collections.abc import Mapping, MutableMapping

__all__ = ["declare_parent", "end_with_parent", "forget_strangers", "parent_of_rank"]

_PARENT = "LIGHTNING_RECIPES_PARENT"
_OF_PARENT = "LIGHTNING_RECIPES_"
_TICK = 0.5
# For the end of a run in order, in which the parent may be the first to have put its house in order.
_PATIENCE = 3.0


def declare_parent(env: MutableMapping[str, str]) -> None:
    """Tell the processes that this one will start who their parent is."""
    env[_PARENT] = str(os.getpid())


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def forget_strangers(env: MutableMapping[str, str]) -> None:
    """Drop what a process that has not started this one left in the environment for its children.

    A program that calls `run` and starts others later hands it on to them, too.
    """
    told = env.get(_PARENT, "")
    if not told.isdigit() or int(told) in (os.getpid(), os.getppid()) or not _is_alive(int(told)):
        return
    for name in [name for name in env if name.startswith(_OF_PARENT) and name != "LIGHTNING_RECIPES_DATA"]:
        del env[name]


def parent_of_rank(env: Mapping[str, str]) -> int | None:
    """The process without which this one has no business: rank 0 of the node, or torchrun; None where there is none.

    Example:
        >>> parent_of_rank({"LIGHTNING_RECIPES_PARENT": "71", "LOCAL_RANK": "1"})
        71
        >>> parent_of_rank({"LOCAL_RANK": "1"}) is None
        True
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return os.getppid()
    # The variable stays where it was set, too: in rank 0 of the node.
    told = env.get(_PARENT, "")
    given = told.isdigit() and told != str(os.getpid()) and env.get("LOCAL_RANK", "0") != "0"
    return int(told) if given else None


def end_with_parent(env: Mapping[str, str]) -> None:
    """End this process a few seconds after its parent has."""
    parent = parent_of_rank(env)
    if parent is None or os.name == "nt":  # Windows knows no new parent of an orphan.
        return
    threading.Thread(target=_guard, args=(parent,), daemon=True, name="parent").start()


def _guard(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_TICK)
    time.sleep(_PATIENCE)
    with contextlib.suppress(OSError):
        os.write(2, f"error: process {os.getpid()} ends, as process {parent} that started it is gone\n".encode())
    # The main thread may wait in a call that no exception ends.
    os._exit(1)
