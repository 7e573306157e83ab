"""Start, monitor and restart the worker processes of this node with torch's elastic agent, as torchrun does.

The agents of all nodes share the `TCPStore` of node 0's agent. Our agent differs from torchrun's in these points:

- Workers are forked from a server that has imported torch, so they start at once.
- On a single machine the store listens on the loopback interface only.
- Each start of the workers has its own prefix in the store, so no worker reads addresses of an earlier start.
- An error that the user has to correct causes no restart, nor does a signal, after which the workers have saved.
- After a signal, stopped workers continue, so that they can save. It says which workers did not end, and how to resume.
"""

import ast
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from typing_extensions import override

from callbacks.lib.signals import SIGNALS, name_of
from callbacks.lib.slurm_job import requeue_on
from datamodules.errors import RunFailedError, UserError
from recipes.runner.command import Command
from recipes.runner.failures import describe_failure, exit_now, is_users, print_loss, was_lost
from recipes.runner.fork_server import start_fork_server, start_method
from recipes.runner.guards import how_to_resume
from recipes.runner.launch import Launch
from recipes.runner.printing import print_error
from recipes.runner.rendezvous import make_rendezvous, open_store
from recipes.runner.saved_run import newest_valid_checkpoint, read_run
from recipes.runner.worker import Handed, work

_PICKLED_MAIN = b"\x8c\x08__main__"  # The name of a module in a pickle: an opcode, its length, and its text.
_FAILURE = "lightning_recipes/failure"
_SECONDS_TO_END = 5.0  # For workers to end by themselves once another one has failed with an error.
_SECONDS_TO_SAVE = 25.0  # For workers to end after a signal. Schedulers kill after 30, and a line has to come before.
_SECONDS_TO_READ = 1.0  # For the other agents to read node 0's store, which ends with node 0's process.


@dataclass(frozen=True)
class Failure:
    """The reason why a run has ended on this node.

    Args:
        message: the reason in words; empty where it is printed already.
        status: the exit status of the agent.
        lost: a worker or a node was lost; it did not end by its own error.
        unreachable: node 0's agent does not answer.
        worker: the worker that has failed, in words, where the message does not name it.
    """

    message: str
    status: int
    lost: bool = False
    unreachable: bool = False
    worker: str = ""

    @property
    def line(self) -> str:
        """The line to print."""
        return f"error on {self.worker}: {self.message}" if self.worker else f"error: {self.message}"


class NodeAgent(LocalElasticAgent):
    """torch's elastic agent with the differences that the module's docstring lists.

    Args:
        launch: the nodes and devices of the run.
        spec: what each worker runs.
        store: the store of node 0's agent.
        logs: where torch writes the error files of the workers.
        settle_again: returns the pickled task of workers that start again.
    """

    def __init__(
        self,
        launch: Launch,
        spec: WorkerSpec,
        store: TCPStore,
        logs: DefaultLogsSpecs,
        settle_again: Callable[[], bytes],
    ) -> None:
        super().__init__(spec, logs, start_method())
        self._settle_again = settle_again
        self.launch = launch
        self.store = store
        self.failure: Failure | None = None
        self.killed = ""
        """The workers that did not end after a signal, and were killed, in words."""

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        restart_store: Any = worker_group.store
        group: Any = worker_group
        # A new prefix, so that no rank reads the addresses of an earlier start, which are still in the store.
        if worker_group.group_rank == 0:
            restart_store.set("prefix", uuid.uuid4().hex)
        (handed,) = worker_group.spec.args
        if handed.store_prefix:  # The processes start again.
            handed.task = self._settle_again()
        handed.store_prefix = restart_store.get("prefix").decode()
        group.master_addr = self.store.host
        group.master_port = self.store.port
        return dict(super()._start_workers(worker_group))

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._end_waiting_workers()
        result: RunResult = super()._monitor_workers(worker_group)
        has_other_nodes = (worker_group.group_world_size or 1) > 1
        if result.state == WorkerState.HEALTHY and has_other_nodes and worker_group.spec.rdzv_handler.is_closed():
            self.failure = self.failure_elsewhere()
            self._remaining_restarts = 0  # The node that failed has closed the rendezvous: a restart cannot join it.
            self._end_waiting_workers(failed_elsewhere=True)
            return RunResult(WorkerState.FAILED)
        if result.state == WorkerState.FAILED:
            self._record_failure(result, has_other_nodes)
        return result

    def _end_waiting_workers(self, *, failed_elsewhere: bool = False) -> None:
        """Kill, after a delay, the workers that wait for a failed one: torch's SIGTERM only tells them to save."""
        context = self._pcontext
        assert context is not None
        running = {rank: pid for rank, pid in context.pids().items() if _runs(pid)}
        failed = [rank for rank in context.pids() if rank not in running and Path(context.error_files[rank]).is_file()]
        if failed or failed_elsewhere:
            timer = threading.Timer(_SECONDS_TO_END, _kill, list(running.values()))
            timer.daemon = True
            timer.start()

    def _record_failure(self, result: RunResult, has_other_nodes: bool) -> None:
        """Find out why a worker failed, and whether it is to be started again."""
        rank, failure = next(iter(result.failures.items()))
        node = f"node {self.launch.node_rank}, {socket.gethostname()}"
        status = failure.exitcode if failure.exitcode > 0 else 1
        worker, message = describe_failure(failure, rank, node)
        self.failure = Failure(message, status, was_lost(failure), worker=worker)
        # After a signal all workers have saved, and the run is over. In an elastic run the signal may have been for
        # another node, and the nodes that stay go on.
        is_over = status - 128 in SIGNALS and self.launch.min_nodes >= (self._worker_group.group_world_size or 1)
        if is_users(failure) or is_over:
            self._remaining_restarts = 0
        if self._remaining_restarts:
            restarts_left = f"{self._remaining_restarts - 1} restart{'s' if self._remaining_restarts != 2 else ''} left"
            reason = self.failure.line if message else f"rank {rank} ({node}) ended on {name_of(status - 128)}"
            print_error(f"{reason}; starting again, {restarts_left}")
        elif has_other_nodes and self.failure.lost:
            # Another node may have the cause, and report it within a moment.
            deadline = time.monotonic() + _SECONDS_TO_READ
            while not self.store.check([_FAILURE]) and time.monotonic() < deadline:
                time.sleep(0.1)
            if self.store.check([_FAILURE]):
                self.failure = self.failure_elsewhere()
        if has_other_nodes and not self._remaining_restarts and not self.store.check([_FAILURE]):
            self.store.set(_FAILURE, json.dumps(vars(self.failure)))

    def failure_elsewhere(self) -> Failure:
        """Return the failure that another node has written before it ended."""
        if self.store.check([_FAILURE]):
            return Failure(**json.loads(self.store.get(_FAILURE)))
        return Failure("another node has ended; its own output says why", 1, lost=True)

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        ranks = {worker.id: worker.global_rank for worker in self._worker_group.workers if worker.id is not None}
        pids = list(self._pcontext.pids().values()) if self._pcontext is not None else []
        for pid in pids:
            if _runs(pid) and state_of(pid) == _STOPPED:
                print_error(f"rank {ranks.get(pid)} (process {pid}) was stopped, and continues, so that it can save")
        try:
            end_processes(pids, death_sig, _SECONDS_TO_SAVE)
        finally:  # Also after a second signal, such as another Ctrl-C, while the workers are saving.
            left = [pid for pid in pids if _runs(pid)]
            self.killed = ", ".join(f"rank {ranks.get(pid)} (process {pid}, {state_of(pid)})" for pid in left)
            super()._shutdown(signal.SIGKILL if left else death_sig, *args, **kwargs)


_STOPPED = "stopped"
_STATES = {"T": _STOPPED, "t": _STOPPED, "R": "computing", "D": "waiting for a disk or a device"}


def state_of(pid: int) -> str:
    """Return what a process does, in words; "waiting" where the system does not tell."""
    with suppress(OSError, IndexError):
        return _STATES.get(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0], "waiting")
    return "waiting"


def end_processes(pids: Iterable[int], signum: int, seconds: float) -> None:
    """Send a signal to processes, let stopped ones continue, and wait until all have ended or the time is over."""
    running = [pid for pid in pids if _runs(pid)]
    # A stopped process gets a signal only once it continues, so systemd and Slurm send both as well.
    for sent in (signum, signal.SIGCONT):
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, sent)
    deadline = time.monotonic() + seconds
    while any(map(_runs, running)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except (OSError, AttributeError):  # The worker is a child of the fork server, and not of this process.
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            return True
    return False


def _kill(*pids: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _silence(*packages: str) -> None:
    """Suppress what torch logs of each worker and signal: one line says what has happened."""
    for name in [*packages, *logging.root.manager.loggerDict]:
        if name.startswith(packages):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _main_module_hidden(task: bytes) -> Iterator[None]:
    """Keep multiprocessing from importing the program in each worker, unless the program defines what they need."""
    main = sys.modules["__main__"]
    if _PICKLED_MAIN in task:
        _check_guard(main)
        yield
        return
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _check_guard(main: types.ModuleType) -> None:
    """Refuse a program that other processes cannot import, or that would start again in each of them."""
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


def _handled_signals() -> str:
    """Return the signals that the agent passes on to its workers; SIGHUP stays ignored under nohup."""
    ignored = signal.SIGHUP if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else None
    return ",".join(signum.name for signum in SIGNALS if signum != ignored)


def run_agent(
    launch: Launch,
    task: bytes,
    settle_again: Callable[[], bytes],
    *,
    timeout: float,
    command: Command,
    modules: Iterable[str],
    folder: Path | None,
    after_loss: Callable[[], str],
) -> None:
    """Train in worker processes of this node, and return when they have ended without an error.

    Args:
        launch: the nodes and devices of the run.
        task: the pickled `recipes.runner.run.Task` of the workers.
        settle_again: returns the task of workers that start again, from the newest checkpoint.
        timeout: seconds to wait for the other nodes, at the start and in a restart.
        command: what was typed.
        modules: the modules of recipe and data, for the fork server.
        folder: the run's folder; None on another node than that of rank 0.
        after_loss: called where the run ends because a process was lost; what it returns is printed.

    Raises:
        UserError: the nodes do not find each other, or other processes cannot import the program.
        RunFailedError: a worker failed, and a program has called `recipes.fit`.
        KeyboardInterrupt: Ctrl-C has ended the workers of such a program.
        SystemExit: a worker of a command failed, or this process received a signal.
    """
    # First, since it imports while this process waits for the other nodes.
    start_fork_server(modules)
    store = open_store(launch, timeout, command)
    handler = make_rendezvous(launch, store, timeout)
    # Otherwise torch opens a second store, which listens on all interfaces.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _handled_signals()
    _silence("torch.distributed.elastic", "torch.multiprocessing")
    spec = WorkerSpec(
        role="rank",
        local_world_size=launch.devices,
        rdzv_handler=handler,
        entrypoint=work,
        args=(Handed(launch, task),),
        max_restarts=launch.max_restarts,
        monitor_interval=0.1,
    )
    with tempfile.TemporaryDirectory(prefix="lightning-recipes-") as logs, _main_module_hidden(task):
        agent = NodeAgent(launch, spec, store, DefaultLogsSpecs(log_dir=logs), settle_again)
        failure = _run(agent, launch, timeout, command, folder)
        # An immediate exit would leave the semaphores of the workers behind.
        del agent
    if failure is None:
        handler.shutdown()
        return
    if failure.lost:
        print_loss(failure.line, after_loss)
    elif failure.message and not command.in_program:
        print_error(failure.line)
    if failure.unreachable:
        exit_now(failure.status)  # A regular exit would wait for a thread that waits for node 0.
    _close(handler, launch)
    if command.in_program and failure.message:
        kind = UserError if failure.status == UserError.exit_status else RunFailedError
        raise kind(f"{failure.worker}: {failure.message}" if failure.worker else failure.message)
    sys.exit(failure.status)


def _close(handler: DynamicRendezvousHandler, launch: Launch) -> None:
    """Tell the other agents that the run is over."""
    try:
        handler.shutdown()
    except RendezvousConnectionError:
        return
    if launch.node_rank == 0 and launch.num_nodes > 1:
        time.sleep(_SECONDS_TO_READ)


def _last_save(folder: Path | None, command: Command) -> str:
    """Return which checkpoint the run has, and the command that resumes it."""
    if folder is None:
        return "node 0 says which save is the last"
    checkpoint = newest_valid_checkpoint(folder / "checkpoints", logs=False)
    if checkpoint is None:
        return "nothing was saved"
    advice = how_to_resume(command, folder, checkpoint)
    return f"the last save is that of update {read_run(checkpoint).updates}; {advice}"


def _run(agent: NodeAgent, launch: Launch, timeout: float, command: Command, folder: Path | None) -> Failure | None:
    """Run the agent until the run has ended, and return its failure, or None."""
    try:
        result = agent.run()
    except SignalException as received:
        if agent.killed:
            name = name_of(received.sigval)
            print_error(
                f"error: {agent.killed} did not end on {name} within {_SECONDS_TO_SAVE:g} s, and had to be killed;"
                f" {_last_save(folder, command)}"
            )
            note = requeue_on(received.sigval)
            if note:
                print_error(note)
        # The rendezvous stays open: the other nodes of an elastic run go on.
        if command.in_program and received.sigval == signal.SIGINT:
            raise KeyboardInterrupt from received
        sys.exit(128 + int(received.sigval))
    except RendezvousTimeoutError:
        missing_node: dict[str, Any] = {
            "node_rank": "I",
            "master_addr": launch.address,
            "master_port": agent.store.port,
        }
        return Failure(
            f"fewer than {launch.min_nodes} nodes joined within {timeout:g} s; type on each node that is"
            f" missing, I being its number: {command.using(**missing_node)}, or wait longer with --rendezvous-timeout",
            2,
        )
    except RendezvousClosedError:
        return agent.failure or agent.failure_elsewhere()
    except RendezvousConnectionError:
        return Failure(f"node 0 at {launch.address}:{launch.port} has ended or cannot be reached", 1, True, True)
    return agent.failure if result is not None and result.is_failed() else None
