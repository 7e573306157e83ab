"""One run, killed again and again: kill -9 at random moments, and each time the same command line."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from rich.console import Console

from benchmarks.faults.runs import EPOCHS, Run, tail, undisturbed_digest

__all__ = ["kill_again_and_again"]

_PAUSE = 0.05  # Seconds between updates, so that most kills come in the middle.
_LIFE = 0.6  # Seconds that a run trains at most before it is killed.
_START = 6.0  # About the seconds of the imports, in which every fifth kill comes.


def _files(run: Run) -> dict[str, int]:
    """The sizes of the files that a run has written, by name."""
    folder = run.folder / "runs"
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _kill_once(run: Run, moments: random.Random) -> bool:
    """Start the run, and kill it at a random moment; False where it has ended before."""
    marker = run.folder / "updates"
    marker.unlink(missing_ok=True)
    process = run.start({"pause": _PAUSE})[0]
    if moments.random() < 0.2:
        _sleep(process, moments.uniform(0, _START))
    else:
        while not marker.exists() and process.poll() is None:
            time.sleep(0.01)
        _sleep(process, moments.uniform(0, _LIFE))
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    output = process.communicate()[0]
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"it ended with {process.returncode}: {tail(output)}")
    return alive


def _sleep(process: "subprocess.Popen[str]", seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.01)


def kill_again_and_again(recipe: str, folder: Path, kills: int, seed: int, console: Console) -> list[str]:
    """Kill a run so often, each time start it by the same command line, and compare what it leaves in the end.

    Returns what differs from an undisturbed run: the weights, a file, or its size.
    """
    epochs = EPOCHS + kills // 3  # Longer than all lives together.
    undisturbed, run = Run(recipe, folder / "undisturbed", epochs=epochs), Run(recipe, folder / "killed", epochs=epochs)
    reference, moments, done = undisturbed_digest(undisturbed), random.Random(seed), 0
    run.folder.mkdir()
    faults = []
    try:
        while done < kills and _kill_once(run, moments):
            done += 1
        if done < kills:
            faults.append(f"the run had ended after {done} kills, before the next one could come")
        status, output, _ = run.finish(run.start({}))
        if status:
            raise RuntimeError(f"the last run ended with {status}: {tail(output)}")
        if run.digest() != reference:
            faults.append("OTHER weights than an undisturbed run")
        left, expected = _files(run), _files(undisturbed)
        faults += [f"{name} is left over" for name in sorted(left.keys() - expected.keys())]
        faults += [f"{name} is missing" for name in sorted(expected.keys() - left.keys())]
        faults += [
            f"{name} has {left[name]:,} bytes, {expected[name]:,} in an undisturbed run"
            for name in sorted(left.keys() & expected.keys())
            # Each start adds what it ran on to the hashes of the weights.
            if left[name] > 1.1 * expected[name] + 1000 * (1 + done)
        ]
    except RuntimeError as error:
        faults.append(str(error))
    verdict = "; ".join(faults) or "the weights, files and sizes of an undisturbed run"
    console.print(f"{recipe}: {done} kills with SIGKILL at random moments (seed {seed}): {verdict}", soft_wrap=True)
    shutil.rmtree(folder, ignore_errors=True)
    return [f"{recipe}, {kills} kills: {fault}" for fault in faults]
