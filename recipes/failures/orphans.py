"""Processes whose parent has ended end too.

Lightning's launcher has not registered a child yet when a signal ends it while starting one; the workers of a torchrun
that was killed go on training beside the workers that replace them.
"""

import contextlib
import os
import threading
import time
from collections.abc import Mapping, MutableMapping

__all__ = ["declare_parent", "drop_inherited_variables", "exit_with_parent", "parent_of_rank"]

_PARENT = "LIGHTNING_RECIPES_PARENT"
_OF_PARENT = "LIGHTNING_RECIPES_"
_OF_USER = {"LIGHTNING_RECIPES_DATA"}
_TICK = 0.5
# In a regular end of the run the parent may be the first process to exit.
_WAIT = 3.0


def declare_parent(env: MutableMapping[str, str]) -> None:
    """Record this process as the parent of the processes that it will start."""
    env[_PARENT] = str(os.getpid())


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def drop_inherited_variables(env: MutableMapping[str, str]) -> None:
    """Remove our variables if they were set by a process that is not the parent of this one.

    A program that calls `run` and starts other programs later passes its environment on to them.
    """
    told = env.get(_PARENT, "")
    if not told.isdigit() or int(told) in (os.getpid(), os.getppid()) or not _is_alive(int(told)):
        return
    for name in [name for name in env if name.startswith(_OF_PARENT) and name not in _OF_USER]:
        del env[name]


def parent_of_rank(env: Mapping[str, str]) -> int | None:
    """The process whose end has to end this one: the first rank of the node, or torchrun; None where there is none.

    Example:
        >>> parent_of_rank({"LIGHTNING_RECIPES_PARENT": "71", "LOCAL_RANK": "1"})
        71
        >>> parent_of_rank({"LOCAL_RANK": "1"}) is None
        True
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return os.getppid()
    # The variable is also set in the process that set it, the first rank of the node.
    told = env.get(_PARENT, "")
    given = told.isdigit() and told != str(os.getpid()) and env.get("LOCAL_RANK", "0") != "0"
    return int(told) if given else None


def exit_with_parent(env: Mapping[str, str]) -> None:
    """End this process a few seconds after its parent has."""
    parent = parent_of_rank(env)
    if parent is None or os.name == "nt":  # On Windows the parent of an orphan does not change.
        return
    threading.Thread(target=_guard, args=(parent,), daemon=True, name="parent").start()


def _guard(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_TICK)
    time.sleep(_WAIT)
    with contextlib.suppress(OSError):
        os.write(2, f"error: process {os.getpid()} ends, because process {parent} that started it has ended\n".encode())
    # The main thread may wait in a call that no exception interrupts.
    os._exit(1)
