"""``python -m benchmarks.gpu [PARTS] [--data-dir DIR] [--json FILE] [--rehearse]``: proofs and figures of one GPU.

Each part runs in a process of its own, which is killed at its limit, and the next one goes on. Nothing is downloaded.
"""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["PARTS", "main"]

INTERRUPTED = 130
REHEARSED = "rehearsed, no figures"


class Part(NamedTuple):
    """What runs in a process of its own.

    Args:
        function: ``module:name``; it takes a `Setting` and returns a `Section`.
        seconds: after which it is killed.
    """

    what: str
    function: str
    seconds: int


PARTS = {
    "exactness": Part("the tests that need a GPU", "proofs:exactness", 180),
    "no_sync": Part("no step of the three recipes waits for the GPU", "proofs:no_sync", 60),
    "mnist_99": Part("seconds to 99 % on MNIST, which --data-dir has to hold", "speed:mnist_99", 50),
    "mnist_step": Part("a step of MNIST's default network, by hand and by the recipe", "speed:mnist_step", 50),
    "cifar": Part("a ResNet-18 on images of CIFAR's size", "speed:cifar", 60),
    "resnet50": Part("a ResNet-50 at 224 pixels", "speed:resnet50", 110),
    "translator": Part("the translator", "speed:translator", 50),
    "memory": Part("memory by micro-batches, and running out of it", "proofs:memory", 35),
}
"""The parts in the order in which they run: under ten minutes together."""


def build_parser() -> argparse.ArgumentParser:
    """The command line; the parts are listed in its help."""
    listed = "\n".join(f"  {name:12} {part.what} (at most {part.seconds} s)" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Proves and measures on one GPU, in under ten minutes, without a network.",
        epilog=f"parts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="PARTS", help="parts to run; all where none is named")
    parser.add_argument("--data-dir", default="data", metavar="FOLDER", help="where MNIST is (default: data)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each part")
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="the GPU's bf16 peak, if it is not known")
    parser.add_argument("--rehearse", action="store_true", help="run all of it tiny on the CPU, for no figures")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)  # Of the process of one part.
    return parser


def _run_part(name: str, args: argparse.Namespace) -> int:
    """One part in this process: prints its table, and writes it to the file of the answer as it grows."""
    from rich.console import Console

    from benchmarks.gpu.speed import Setting
    from benchmarks.harness.measurements import Section, as_json, describe_machine, print_section
    from datamodules.errors import UserError
    from recipes.launch.host_tuning import stop_gpu_search, tune_allocator

    stop_gpu_search()
    machine = describe_machine(tune_allocator())

    def save(section: Section) -> None:
        beside = args.answer.with_suffix(".tmp")
        beside.write_text(json.dumps(as_json(machine, {name: section}, False), allow_nan=False), encoding="utf-8")
        beside.replace(args.answer)

    module, _, function = PARTS[name].function.partition(":")
    setting = Setting(args.data_dir, args.rehearse, args.peak_tflops, save)
    try:
        section: Section = getattr(import_module(f"benchmarks.gpu.{module}"), function)(setting)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    save(section)
    # In a rehearsal the table is drawn, too, for nobody.
    console = Console(highlight=False, file=io.StringIO() if args.rehearse else None)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    print_section(section, console)
    failed = [note for note in section.notes if "failed" in note]
    if args.rehearse:
        print("\n".join([f"{name}: {REHEARSED}; {len(section.rows)} rows", *failed]))
    return 1 if args.rehearse and failed else 0


def _start_part(name: str, args: argparse.Namespace, answer: Path) -> str:
    """Run a part in a process of its own; how it ended."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", name, "--answer", str(answer)]
    command += ["--data-dir", args.data_dir, *(["--rehearse"] if args.rehearse else [])]
    command += ["--peak-tflops", str(args.peak_tflops)] if args.peak_tflops else []
    limit = PARTS[name].seconds * (5 if args.rehearse else 1)
    process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"killed at its limit of {limit} s"
    finally:
        # Its own processes, too, such as pytest's.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {0: "done", 2: "left out"}.get(status, f"failed with status {status}")


def _write(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        beside = path.with_name(f"{path.name}.tmp")
        beside.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts, printing and writing each as soon as it is done; returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; expected {', '.join(PARTS)}")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"cannot write {args.json}: name a file in a folder that exists")
    if not args.rehearse:
        import torch

        if not torch.cuda.is_available():
            parser.exit(2, f"{parser.prog}: there is no CUDA GPU here; --rehearse runs all of it tiny on the CPU\n")
    if args.answer is not None:
        return _run_part(args.names[0], args)
    results: dict[str, Any] = {"format": 1, "rehearsed": args.rehearse, "machine": {}, "parts": {}}
    lines, failed, began = [], False, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        for name in args.names or PARTS:
            start, answer = time.monotonic(), Path(scratch, f"{name}.json")
            print(f"== {name}: {PARTS[name].what}", flush=True)
            try:
                ended = _start_part(name, args, answer)
            except KeyboardInterrupt:
                print("interrupted: what was done is kept", file=sys.stderr)
                return INTERRUPTED
            part: dict[str, Any] = {"ended": ended, "seconds": round(time.monotonic() - start, 1)}
            if answer.is_file():
                found = json.loads(answer.read_text(encoding="utf-8"))
                results["machine"] = results["machine"] or found["machine"]
                part |= found["sections"][name]
            results["parts"][name] = part
            _write(args.json, results)
            goals = part.get("goals", [])
            failed |= ended not in ("done", "left out") or (name in ("exactness", "no_sync") and not _met(goals))
            lines.append(f"{name:12} {ended}, {part['seconds']:.0f} s")
            if not args.rehearse:
                reached = ("missed", "reached")
                lines += [f"{'':12} {reached[goal['met']]}: {goal['goal']}; found {goal['found']}" for goal in goals]
    print("\n".join(["", *lines, f"{time.monotonic() - began:.0f} s in all"]))
    if args.rehearse:
        print(REHEARSED)
    return int(failed)


def _met(goals: Sequence[dict[str, Any]]) -> bool:
    return bool(goals) and all(goal["met"] for goal in goals)


if __name__ == "__main__":
    sys.exit(main())
