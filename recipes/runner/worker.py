"""Start a worker process: the agent has forked it, and hands it the record of its run."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from callbacks.lib.signals import SIGNALS
from recipes.runner.launch import Launch

_CAUSE_IS_SEEN = 2.0  # Seconds: an agent looks at its workers ten times a second.


@dataclass
class Handed:
    """What an agent hands to each of its workers.

    Args:
        launch: the launch of the agent.
        task: a pickled `recipes.runner.run.Task`.
        store_prefix: the prefix of this start's keys in the store of the agents.
        environ: the environment variables of a worker, without those of its rank.
    """

    launch: Launch
    task: bytes
    store_prefix: str = ""
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))


def work(handed: Handed) -> None:
    """Carry out a run as one of its ranks; torch's agent has set the variables of the rank.

    Raises:
        SystemExit: the run has ended with a status other than 0.
    """
    rank_environ = dict(os.environ)
    # The fork server has the environment of its own start; the program needs that of the agent's command.
    os.environ.clear()
    os.environ.update(handed.environ | {name: rank_environ[name] for name in rank_environ if _is_of_rank(name)})
    _end_with_agent()
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)  # The worker inherits from the fork server that they are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from datamodules.lightning import rank_zero_only
    from recipes.runner.join import RankZeroFailed

    rank_zero_only.rank = int(os.environ["RANK"])  # type: ignore[attr-defined]
    task = pickle.loads(handed.task)
    try:
        task.carry_out_as_worker(handed.launch, handed.store_prefix)
    except RankZeroFailed:
        time.sleep(_CAUSE_IS_SEEN)
        raise
    except SystemExit as end:
        # torch's agent takes every process that exits for a failed one, so status 0 has to become a return.
        if end.code not in (None, 0):
            raise


def _is_of_rank(name: str) -> bool:
    """Return whether torch's agent sets this variable for a worker."""
    prefixes = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
    return name.startswith(prefixes)


def _end_with_agent() -> None:
    """End this process when its agent has ended, whatever its main thread waits for."""
    agent = multiprocessing.parent_process()
    assert agent is not None

    def watch() -> None:
        agent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the agent").start()


def end_with_torchrun(env: Mapping[str, str]) -> None:
    """End this process when its torchrun has gone: the next torchrun's processes would train beside it."""
    if "TORCHELASTIC_RUN_ID" not in env or os.name == "nt":
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(3.0)  # At a regular end torchrun may exit before its processes.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch torchrun").start()
