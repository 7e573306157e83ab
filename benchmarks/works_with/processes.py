"""Runs of a client in forked processes, which have imported its library once, with what torchrun sets."""

import importlib
import json
import os
import re
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..harness.processes import free_port
from .rows import Run

LIMIT = 300.0
"""Seconds after which a run counts as hung."""
GRACE = 120.0
"""Seconds that the other ranks have to end after a rank has failed."""

OURS = re.compile(r"^(note|warning|error|Error|hint)\b|SIGTERM after|resume with|^(saved|stopped|ended)\b")
LOST = ("Connection closed by peer", "Connection reset by peer")
FOLDERS = ("callbacks", "datamodules", "recipes")


def our_root() -> Path:
    """Return the folder that holds our packages."""
    package = importlib.import_module("callbacks")
    return Path(str(package.__file__)).parents[1]


def failure(error: BaseException) -> dict[str, Any]:
    """Return the message of an exception, who raised it and the last frames.

    An error of ours is one that a `raise` in our files has raised. Everything else is a traceback.
    """
    from datamodules.errors import UserError

    root = our_root()
    frames = traceback.extract_tb(error.__traceback__)
    folders = [str(root / name) + "/" for name in FOLDERS]
    last = frames[-1]
    in_our_files = any(last.filename.startswith(folder) for folder in folders)
    raised = in_our_files and str(last.line).startswith(("raise ", "self._fail", "fail("))
    kind = "line" if isinstance(error, UserError) or raised else "traceback"
    text = " / ".join(line.strip() for line in str(error).splitlines() if line.strip())
    places = [f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}:{frame.name}" for frame in frames[-4:]]
    return {
        "kind": kind,
        "error": f"{type(error).__name__}: {text}"[:900],
        "user_error": isinstance(error, UserError),
        "frames": places,
    }


def _child(run: Run, rank: int, port: int, result: Path, output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if run.processes > 1:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.processes, "LOCAL_WORLD_SIZE": run.processes}
        variables |= {"GROUP_RANK": 0, "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="works-with", TORCHELASTIC_MAX_RESTARTS="0")
    run = replace(run, rank=rank)
    record: dict[str, Any] = {}
    try:
        run.row.train(run)
    except SystemExit as stop:
        record["exit"] = stop.code
    except BaseException as error:
        traceback.print_exc()
        record |= failure(error)
    record = run.record | record
    result.write_text(json.dumps(record))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if "sha256" in record or "exit" in record else 1)


def _our_lines(outputs: list[Path]) -> list[str]:
    """Return the lines of our callbacks, each once."""
    lines: dict[str, None] = {}
    for output in outputs:
        for line in output.read_text(errors="replace").splitlines():
            # A warning of Python is printed with the file and the line that it is about.
            text = re.sub(r"^\S+:\d+: \w*Warning: ", "", line.strip())
            if OURS.search(text) and "site-packages" not in line:
                lines.setdefault(re.sub(r"/\S*/(?=[^/\s]*\.ckpt)", ".../", text))
    return list(lines)


def run_ranks(run: Run, name: str) -> dict[str, Any]:
    """Run a client on its number of processes, and return what it ended with.

    Returns:
        the record of rank 0, with `lines` of our callbacks, `seconds`, and the `kind`: "weights", "stopped", "line",
        "traceback", "died", "hang" or "ranks differ".
    """
    start = time.monotonic()
    run.folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    outputs = [run.folder / f"{name}.{rank}.txt" for rank in range(run.processes)]
    results = [output.with_suffix(".json") for output in outputs]
    ranks: dict[int, int] = {}
    for rank in range(run.processes):
        results[rank].unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                _child(run, rank, port, results[rank], outputs[rank])
            finally:
                os._exit(99)
        ranks[child] = rank
    failed_at = None
    hung = False
    while ranks:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in ranks:
            del ranks[child]
            if status and failed_at is None:
                failed_at = time.monotonic()
            continue
        time.sleep(0.05)
        now = time.monotonic()
        if now - start > LIMIT or (failed_at is not None and now - failed_at > GRACE):
            hung = now - start > LIMIT
            for child in list(ranks):
                os.kill(child, 9)
                os.waitpid(child, 0)
                del ranks[child]
    records = [
        json.loads(result.read_text()) if result.exists() else _died(output) for result, output in zip(results, outputs)
    ]
    record = _combined(records)
    if hung:
        record["kind"] = "hang"
    return record | {"lines": _our_lines(outputs), "seconds": round(time.monotonic() - start, 1)}


def _died(output: Path) -> dict[str, Any]:
    """Return the record of a rank that left none: it was aborted, or killed as it hung."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return {"kind": "died", "error": f"died: {' / '.join(lines[-2:])}"[:400]}


def _combined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of the ranks: of the first that failed with a line, failed at all, or of rank 0."""
    for kind in ("line", "traceback", "died"):
        for record in records:
            # A rank whose peer has failed loses its connection, which is no failure of its own.
            lost = any(words in record.get("error", "") for words in LOST)
            if record.get("kind") == kind and not (lost and kind == "traceback" and len(records) > 1):
                return record
    record = records[0]
    if "exit" in record:
        return record | {"kind": "stopped"}
    if len({str(record.get("parameters")) for record in records}) > 1:
        return record | {"kind": "ranks differ"}
    return record | {"kind": "weights" if "sha256" in record else "traceback"}
