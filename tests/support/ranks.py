"""Real processes for tests: one per rank, over gloo on loopback.

The processes are forked from a server that has imported torch and Lightning once, so a test with two ranks starts in
a fraction of a second and still gets fresh processes.
"""

import faulthandler
import io
import itertools
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.support.imported"])


_ports = itertools.count()


def free_port() -> int:
    """A TCP port that nobody listens on, below those that the system gives to a socket that asks for any.

    So nobody is given it by chance before its user has bound it.
    """
    while True:
        port = 16000 + (61 * os.getpid() + next(_ports)) % 16000
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def _child(
    pipe: Connection,
    function: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    env: Mapping[str, str],
    sets_threads: bool,
) -> None:
    # Workers of loaders are started as in a process of a launcher, and not by another server.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(env)
    faulthandler.register(signal.SIGUSR1)
    if sets_threads:
        torch.set_num_threads(1)
    else:
        os.environ.pop("OMP_NUM_THREADS", None)
    try:
        answer: tuple[bool, Any] = (True, function(*args, **kwargs))
    except BaseException:
        answer = (False, traceback.format_exc())
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    pipe.send_bytes(buffer.getvalue())
    pipe.close()
    # Nothing after this may hang or print: a process group left behind by a failed rank would.
    os._exit(0)


def run_ranks(
    function: Callable,
    world_size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    sets_threads: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call a function of a test module in `world_size` fresh processes and return what each returned, by rank.

    The environment holds what torchrun sets, so ``Trainer(accelerator="cpu", strategy="ddp", devices=world_size)`` and
    ``torch.distributed.init_process_group("gloo")`` both join their processes. With one process no rendezvous is set.
    Each has one thread, unless `sets_threads` is false: then nobody has set a number, as in a user's shell.

    Raises:
        AssertionError: a rank raised (its traceback is the message) or died; the others are killed.
        TimeoutError: a rank did not answer within `timeout` seconds; where each one waits is on standard error.
    """
    port = free_port()
    processes, pipes = [], {}
    for rank in range(world_size):
        variables = {"PL_DISABLE_FORK": "1", "CUDA_VISIBLE_DEVICES": ""}
        if sets_threads:
            variables["OMP_NUM_THREADS"] = "1"
        if world_size > 1:
            variables |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
            }
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, function, args, kwargs, variables | dict(env or {}), sets_threads)
        process = context.Process(target=_child, args=arguments)
        process.start()
        sender.close()
        processes.append(process)
        pipes[receiver] = rank
    results: dict[int, Any] = {}
    try:
        while pipes:
            # A killed rank leaves its pipe open as long as workers that it started live, hence the sentinels.
            ready = wait([*pipes, *(processes[rank].sentinel for rank in pipes.values())], timeout)
            if not ready:
                for rank in pipes.values():
                    if (pid := processes[rank].pid) is not None:
                        os.kill(pid, signal.SIGUSR1)
                time.sleep(0.5)
                raise TimeoutError(f"ranks {sorted(pipes.values())} did not answer within {timeout} s")
            for pipe, rank in list(pipes.items()):
                if pipe not in ready and processes[rank].sentinel not in ready:
                    continue
                del pipes[pipe]
                try:
                    if not pipe.poll():
                        raise EOFError
                    good, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                except EOFError:
                    processes[rank].join(60)
                    raise AssertionError(f"rank {rank} died with exit status {processes[rank].exitcode}") from None
                assert good, f"rank {rank} raised:\n{value}"
                results[rank] = value
    finally:
        for process in processes:
            process.join(5 if not pipes else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return [results[rank] for rank in range(world_size)]
