"""What many processes cost on one machine: ``python -m benchmarks.many_nodes --nodes 4 --devices 8``.

Launches the MNIST recipe manually, as the shells of so many nodes would, on loopback and CPUs, for an epoch of the
bundled digits with a thread each. Prints the seconds and the memory of all processes: the sum of their proportional
set sizes, in which a page that several share counts once.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.harness.processes import free_port

__all__ = ["Cost", "main", "start_nodes"]

_ROOT = Path(__file__).parents[1]
_LIMIT = 900.0


@dataclass(frozen=True)
class Cost:
    """What a run has taken.

    Args:
        statuses: the exit status of each node's first process.
        started: seconds until rank 0 describes the run, when all imports are done and all ranks have joined.
        seconds: of the whole run.
        memory: the most of all processes together, in bytes.
        processes: how many there were then.
        output: of rank 0.
    """

    statuses: tuple[int, ...]
    started: float
    seconds: float
    memory: int
    processes: int
    output: str


def _family(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            listed = children.read_text().split()
        except OSError:  # It has ended.
            continue
        for child in listed:
            yield from _family(int(child))


def _memory(pid: int) -> int:
    """A process's proportional set size in bytes; 0 where it has ended."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def start_nodes(nodes: int, devices: int, folder: Path, *more: str) -> Cost:
    """Type the command line of each node at once, and wait for the end of all.

    Args:
        more: flags in addition.
    """
    run = ["--devices", str(devices), "--num-nodes", str(nodes), "--accelerator", "cpu", "--dataset", "digits"]
    run += ["--max-epochs", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), *more]
    # Importing takes each of many processes on few cores minutes.
    run += ["--rendezvous-timeout", "300"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    files = [(folder / f"node{node}.log").open("w+") for node in range(nodes)]
    began, started, memory, number = time.monotonic(), 0.0, 0, 0
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "recipes.mnist", *run, "--node-rank", str(node)],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        for node, file in enumerate(files)
    ]
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() - began < _LIMIT:
            alive = [pid for process in processes for pid in _family(process.pid)]
            memory, number = max((memory, number), (sum(map(_memory, alive)), len(alive)))
            if not started and "global batch" in Path(files[0].name).read_text():
                started = time.monotonic() - began
            time.sleep(0.5)
        seconds = time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
    output = Path(files[0].name).read_text()
    for file in files:
        file.close()
    return Cost(tuple(process.wait() for process in processes), started, seconds, memory, number, output)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once, and print; returns 1 where a node ended with another status than 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_nodes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=4, metavar="N", help="shells that type the command (default: 4)")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="processes of each (default: 8)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        cost = start_nodes(args.nodes, args.devices, Path(folder))
    console = Console(highlight=False, soft_wrap=True)
    console.print(cost.output)
    console.print(f"nodes x devices   {args.nodes} x {args.devices}, on {os.cpu_count()} cores")
    console.print(f"exit statuses     {' '.join(map(str, cost.statuses))}")
    console.print(f"ranks met after   {cost.started:.0f} s; {cost.seconds:.0f} s in all")
    console.print(f"memory at most    {cost.memory / 2**30:.1f} GiB in {cost.processes} processes")
    return int(any(cost.statuses))


if __name__ == "__main__":
    sys.exit(main())
