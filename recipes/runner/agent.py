"""Agent that starts, monitors and restarts the worker processes of this node, based on torch's elastic agent.

The agents of all nodes share the `TCPStore` of node 0's agent. Our agent differs from torchrun's in these points:

- Workers are forked from a server that has imported torch, so they start at once.
- On a single machine the store listens on the loopback interface only.
- Each start of the workers has its own prefix in the store, so no worker reads addresses of an earlier start.
- After all workers have ended, it reads their records, and reports the first cause of the failures.
- There is no restart after an error that the user has to correct, or after a signal, because the workers have saved.
- After a signal, stopped workers continue, so that they can save. It prints the workers that did not end, and how to
  resume.

Tested in `tests/end_to_end/test_launch.py`.
"""

import ast
import logging
import os
import signal
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from typing_extensions import override

from callbacks.lib.signals import SIGNALS, name_of, requeue_on
from datamodules.errors import RunFailedError, UserError, spelled
from recipes.runner.command import Command
from recipes.runner.errors import Failure, exit_now, first_cause, print_error, print_loss
from recipes.runner.flags import RunClasses
from recipes.runner.launch import LOOPBACK, Launch
from recipes.runner.saved_run import newest_valid_checkpoint
from recipes.runner.spec import RunSpec
from recipes.runner.start import start_fork_server, start_method
from recipes.runner.training import how_to_resume
from recipes.runner.worker import Handed, open_store, rendezvous_errors_reported, work

_PICKLED_MAIN = b"\x8c\x08__main__"  # The name of a module in a pickle: an opcode, its length, and its text.
_SECONDS_TO_END = 5.0  # For workers to end by themselves after another worker has failed with an error.
_SECONDS_TO_SAVE = 25.0  # For workers to end after a signal. Schedulers kill after 30 s; our report must come before.
_SECONDS_TO_ANSWER = 30.0  # For node 0's store.
_ELSEWHERE = Failure("failed", "another node has ended; its own output says why")


class NodeAgent(LocalElasticAgent):
    """torch's elastic agent with the changes in the docstring of this module.

    Args:
        launch: the nodes and devices of the run.
        spec: the function of each worker and its arguments.
        store: the store of node 0's agent.
        logs: the folder of the workers' records.
    """

    def __init__(self, launch: Launch, spec: WorkerSpec, store: TCPStore, logs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs, start_method())
        self.launch = launch
        self.store = store
        self.failure: Failure | None = None
        """The reason for the end of this node's workers."""
        self.killed: list[str] = []
        """The workers of this start that did not end in time and were killed, in words."""
        self._store_calls = ThreadPoolExecutor(1)

    @property
    def _processes(self) -> list[Any]:
        """The worker processes of this node, by local rank."""
        context: Any = self._pcontext
        return list(context._pc.processes) if context and context._pc else []

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        group: Any = worker_group
        self.killed = []
        # A new prefix: the addresses of an earlier start are still in the store, and no rank must read them.
        if group.group_rank == 0:
            group.store.set("prefix", uuid.uuid4().hex)
        prefix = group.store.get("prefix").decode()
        (handed,) = group.spec.args
        group.spec.args = (replace(handed, store_prefix=prefix, starts_again=bool(handed.store_prefix)),)
        group.master_addr = self.store.host
        group.master_port = self.store.port
        return dict(super()._start_workers(worker_group))

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = RunResult(WorkerState.FAILED)
        failed = [rank for rank, process in enumerate(self._processes) if process.exitcode]
        if not failed:
            result = super()._monitor_workers(worker_group)
            failed = [failure.local_rank for failure in result.failures.values()]
        if failed:
            self._record_failure(failed)
        elif result.state == WorkerState.HEALTHY and self._has_ended_elsewhere():
            self._remaining_restarts = 0  # The node that failed has closed the rendezvous: a restart cannot join it.
            return RunResult(WorkerState.FAILED)
        return result

    def _has_ended_elsewhere(self) -> bool:
        """Return whether another node has failed; if so, end the workers and record the failure of this node.

        Raises:
            RendezvousConnectionError: node 0 has ended, and this node's workers have no error for the user.
        """
        # Each node detects some mistakes by itself, such as another number of devices; another node may only be faster.
        try:
            if not self._is_closed():
                return False
            self._end_workers(_SECONDS_TO_END)
            mistakes = self._mistakes()
        except RendezvousConnectionError:
            self._join_workers(_SECONDS_TO_END)
            mistakes = self._mistakes()
            if not mistakes:
                raise
        self.failure = first_cause([*mistakes, _ELSEWHERE])
        return True

    def _mistakes(self) -> list[Failure]:
        """Return the recorded errors of this node's workers that the user has to correct."""
        return [failure for failure in self._read_failures({}) if failure.kind == "user"]

    def _is_closed(self) -> bool:
        """Return whether another node has closed the rendezvous after a failure."""
        if self._worker_group.group_world_size == 1:
            return False
        # In a thread: a call of the C++ store cannot be interrupted, and waits forever if node 0 is unreachable.
        call = self._store_calls.submit(self._worker_group.spec.rdzv_handler.is_closed)
        try:
            return bool(call.result(_SECONDS_TO_ANSWER))
        except TimeoutError as error:
            raise RendezvousConnectionError(f"no answer within {_SECONDS_TO_ANSWER:g} s") from error

    def _record_failure(self, failed: list[int]) -> None:
        """Determine why workers have failed, and whether to restart them.

        Args:
            failed: the local ranks of the workers that ended first.
        """
        statuses = {rank: self._processes[rank].exitcode for rank in failed}
        have_saved = any(status - 128 in SIGNALS for status in statuses.values())
        self._end_workers(_SECONDS_TO_SAVE if have_saved else _SECONDS_TO_END)
        self.failure = first_cause(self._read_failures(statuses))
        # After a signal, all workers have saved, and the run is over. In an elastic run, the signal may have been for
        # another node; the remaining nodes continue.
        nodes = self._worker_group.group_world_size or 1
        if self.failure.kind == "user" or (self.failure.kind == "signal" and nodes <= self.launch.min_nodes):
            self._remaining_restarts = 0
        if self._remaining_restarts:
            left = self._remaining_restarts - 1
            print_error(f"error: {self.failure.message}; starting again, {left} restart{'s' * (left != 1)} left")

    def _read_failures(self, statuses: Mapping[int, int]) -> list[Failure]:
        """Return the failures of the workers, from their records or their exit statuses by local rank."""
        assert self._pcontext is not None
        failures = []
        for rank, worker in enumerate(self._worker_group.workers):
            failure = Failure.read(self._pcontext.error_files[rank])
            if failure is None and rank in statuses:
                failure = Failure.of_exit(statuses[rank])
            if failure:
                failures.append(failure.of_rank(worker.global_rank, self.launch.where))
        return failures

    def _end_workers(self, seconds: float, signum: int | None = None) -> None:
        """Wait until the workers have ended, and kill the remaining workers after some seconds.

        Args:
            signum: a signal to the workers to save and end.
        """
        running = {rank: process for rank, process in enumerate(self._processes) if process.is_alive()}
        # A stopped process handles a signal only after it continues, so systemd and Slurm also send both signals.
        for sent in (signum, signal.SIGCONT) if signum else ():
            for process in running.values():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, sent)
        try:
            self._join_workers(seconds)
        finally:  # Also after a second signal, such as another Ctrl-C, while the workers are saving.
            for rank, process in running.items():
                if process.is_alive():
                    global_rank = self._worker_group.workers[rank].global_rank
                    self.killed.append(f"rank {global_rank} (process {process.pid})")
                    process.kill()

    def _join_workers(self, seconds: float) -> None:
        """Wait until the workers have ended, for some seconds at most."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        self._end_workers(_SECONDS_TO_SAVE, death_sig)
        super()._shutdown(death_sig, *args, **kwargs)


@contextmanager
def _main_module_hidden(task: bytes) -> Iterator[None]:
    """Keep multiprocessing from importing the program in each worker, unless the task uses names of the program."""
    main = sys.modules["__main__"]
    if _PICKLED_MAIN in task:
        _check_guard(main)
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _check_guard(main: types.ModuleType) -> None:
    """Reject a program that other processes cannot import, or that would start a run in each of them."""
    path = getattr(main, "__file__", None)
    if path is None:
        raise UserError(
            "several processes import the classes of a run, and yours are defined in a notebook or an interpreter: put"
            " them into a file, and import them from there"
        )
    statements = ast.parse(Path(path).read_text(encoding="utf-8")).body
    if not any(isinstance(each, ast.If) and "__name__" in ast.unparse(each.test) for each in statements):
        raise UserError(
            f"several processes import {path} for its classes, and would start the run again: put the call under"
            ' if __name__ == "__main__":'
        )


class Task(Protocol):
    """The members of `recipes.runner.run.Task` that an agent needs; importing it would be circular."""

    @property
    def classes(self) -> RunClasses: ...

    @property
    def typed(self) -> Command: ...

    @property
    def timeout(self) -> float: ...

    @property
    def spec(self) -> RunSpec | None: ...

    def pickled(self) -> bytes: ...


def run_agent(launch: Launch, task: Task, after_loss: Callable[[], str]) -> None:
    """Train in worker processes of this node, and return when they have ended without an error.

    Args:
        launch: the nodes and devices of the run.
        task: the task of the workers.
        after_loss: a function that is called if the run ends because a process was lost; its result is printed.

    Raises:
        UserError: the nodes do not find each other, or other processes cannot import the program.
        RunFailedError: a worker failed, and a program has called `recipes.fit`.
        KeyboardInterrupt: Ctrl-C has ended the workers of such a program.
        SystemExit: a worker of a command failed, or this process received a signal.
    """
    command = task.typed
    pickled = task.pickled()
    # First: the server imports torch while this process waits for the other nodes.
    start_fork_server(sorted({kind.__module__ for kind in task.classes.both} - {"__main__"}))
    with rendezvous_errors_reported(launch, task.timeout):
        serves = launch.node_rank == 0
        store = open_store(launch.address or LOOPBACK, launch.port or 0, task.timeout, serves, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=_SECONDS_TO_ANSWER))
    name = "lightning-recipes"
    # After the minimum of nodes has joined, torch waits for more nodes until the last call: only elastic runs need it.
    wait = RendezvousTimeout(
        join=timedelta(seconds=task.timeout), last_call=timedelta(seconds=3 if launch.is_elastic else 0.1)
    )
    handler = DynamicRendezvousHandler.from_backend(
        name,
        store,
        C10dRendezvousBackend(store, name),
        launch.min_nodes,
        launch.num_nodes,
        # torch sorts the nodes by this name to rank them, so the digits keep the order of the node ranks.
        local_addr=f"node-{launch.node_rank:05}",
        timeout=wait,
        # A node without a heartbeat for 2 x 5 seconds is left out of the next rendezvous.
        keep_alive_interval=2,
        keep_alive_max_attempt=5,
    )
    # Otherwise torch opens a second store, which listens on all interfaces.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # The signals that the agent passes on to its workers; SIGHUP stays ignored under nohup.
    handled = [signum.name for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(handled)
    # Our report is one line, in place of torch's log of each worker and signal.
    for logger in list(logging.root.manager.loggerDict):
        if logger.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(logger).setLevel(logging.CRITICAL)
    spec = WorkerSpec(
        role="rank",
        local_world_size=launch.devices,
        rdzv_handler=handler,
        entrypoint=work,
        args=(Handed(launch, pickled),),
        max_restarts=launch.max_restarts,
        monitor_interval=0.1,
    )
    with tempfile.TemporaryDirectory(prefix="lightning-recipes-") as logs, _main_module_hidden(pickled):
        agent = NodeAgent(launch, spec, store, DefaultLogsSpecs(log_dir=logs))
        try:
            failure = _outcome(agent, task)
        except SignalException as received:
            _report_signal(agent, task, received.sigval)
            # The rendezvous stays open: the other nodes of an elastic run continue.
            if command.in_program and received.sigval == signal.SIGINT:
                raise KeyboardInterrupt from received
            sys.exit(128 + int(received.sigval))
        # An immediate exit would leave the semaphores of the workers behind.
        del agent
    if failure is None:
        handler.shutdown()
        return
    is_loss = failure.kind in ("killed", "lost", "unreachable")
    if is_loss:
        print_loss(f"error: {failure.message}", after_loss)
    if failure.kind == "unreachable":
        exit_now(failure.status)  # A regular exit would wait for a thread that waits for node 0.
    # Before the error line, which comes last: torch may print that the store of node 0 has ended.
    handler.shutdown()
    if command.in_program and failure.kind != "signal":
        kind = UserError if failure.status == UserError.exit_status else RunFailedError
        raise kind(failure.message)
    if not is_loss and failure.kind != "signal":
        print_error(f"error: {failure.message}")
    sys.exit(failure.status)


def _outcome(agent: NodeAgent, task: Task) -> Failure | None:
    """Run the agent until the run has ended, and return its failure, or None."""
    launch = agent.launch
    try:
        result = agent.run()
    except RendezvousTimeoutError:
        flags = {"node_rank": "I", "master_addr": launch.address, "master_port": agent.store.port}
        return Failure(
            "user",
            f"fewer than {launch.min_nodes} nodes joined within {task.timeout:g} s; type on each node that is missing,"
            f" I being its number: {task.typed.using(**flags)}, or wait longer with {spelled('rendezvous_timeout')}",
            UserError.exit_status,
        )
    except RendezvousClosedError:
        return agent.failure or _ELSEWHERE
    except RendezvousConnectionError:
        return Failure("unreachable", f"node 0 at {launch.address}:{launch.port} has ended or cannot be reached")
    return agent.failure if result is not None and result.is_failed() else None


def _report_signal(agent: NodeAgent, task: Task, signum: int) -> None:
    """Print the workers that did not end on a signal and were killed, and how to resume."""
    if not agent.killed:
        return
    folder = Path(task.spec.point.folder) if task.spec and task.spec.point.folder else None
    checkpoint = newest_valid_checkpoint(folder / "checkpoints", logs=False) if folder else None
    advice = f"; {how_to_resume(task.typed, folder, checkpoint)}" if folder and checkpoint else ""
    print_error(
        f"error: {', '.join(agent.killed)} did not end on {name_of(signum)} within {_SECONDS_TO_SAVE:g} s, and had to"
        f" be killed{advice}"
    )
    note = requeue_on(signum)
    if note:
        print_error(note)
