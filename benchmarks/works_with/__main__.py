"""Trains libraries that are built on Lightning with our callbacks, on 1, 2 and 3 processes and over a stop.

    python -m benchmarks.works_with --list                        # the libraries, and what to install for each
    python -m benchmarks.works_with chemprop                      # repeats its rows, in this environment
    python -m benchmarks.works_with --environments 'env-{}' --out results chemprop scvi  # each in its own environment
    python -m benchmarks.works_with --out results --table         # the table of what is in this folder

Each row trains the library's own module with its own loader, unmodified, on 42 samples: two epochs of updates of 12
samples, as three micro-batches. It is repeated on 2 and 3 processes, stopped by SIGTERM within an epoch on one process
and resumed on two, and stopped on two and resumed on three and on one. If an update has a mean, one batch of 12 is
compared with three of 4. CPU, gloo, one thread.
"""

import argparse
import ast
import importlib
import importlib.metadata
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from .rows import GLOBAL_BATCH, Row, Run

HERE = Path(__file__).parent
ROUNDING = 1e-4
"""Largest difference of two gradients in float32 that is due to rounding, relative to their largest element."""


FAILURES = {
    "line": "one line",
    "traceback": "traceback",
    "died": "a process died",
    "hang": "hang",
    "ranks differ": "SILENT: ranks differ",
}
"""What the kinds of a run that has not trained are called."""


def clients() -> list[str]:
    """Return the names of the libraries."""
    return sorted(path.stem for path in (HERE / "clients").glob("[a-z]*.py"))


def requirements(library: str) -> str:
    """Return what to install for a library, from the constants of its client, which cannot be imported without it."""
    constants = {}
    for statement in ast.parse((HERE / "clients" / f"{library}.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            constants[ast.unparse(statement.targets[0])] = str(statement.value.value)
    return constants.get("INSTALL", constants["LIBRARY"])


def measure(library: str, only: list[str], keep: Path | None) -> dict[str, Any]:
    """Repeat the rows of a library in this environment, and return what each run ended with."""
    start = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"  # As torchrun sets it.
    import torch

    torch.set_num_threads(1)
    client = importlib.import_module(f".clients.{library}", __package__)
    os.environ.update(getattr(client, "ENVIRONMENT", {}))
    package = importlib.import_module(client.PACKAGE)
    ours = importlib.import_module("callbacks")
    for name in ours.__all__:
        getattr(ours, name)  # Imported once here, and not in each process.
    rows = {}
    for name, row in client.ROWS.items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            rows[name] = measure_row(client.PACKAGE, row, keep / f"{library}-{name}" if keep else Path(temporary))
        print(f"{library} {name}: {rows[name]['verdict']}", flush=True)
    return {
        "library": library,
        "version": importlib.metadata.version(client.LIBRARY),
        "torch": torch.__version__.partition("+")[0],
        client.PACKAGE: package.__version__,
        "seconds": round(time.monotonic() - start),
        "rows": rows,
    }


def measure_row(package: str, row: Row, folder: Path) -> dict[str, Any]:
    """Train one row in all ways, and return the runs and the verdict."""
    folder = folder.absolute()
    runs: dict[str, dict[str, Any]] = {}

    def run(name: str, processes: int, **settings: Any) -> dict[str, Any]:
        from .processes import run_ranks

        place = folder / name.replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        before = Path.cwd()
        os.chdir(place)  # Libraries write beside themselves.
        try:
            record = run_ranks(Run(package, row, place, processes, **settings), name.replace(" ", "-"))
        finally:
            os.chdir(before)
        runs[name] = record | {"processes": processes}
        text = record.get("sha256", record.get("error", f"{record.get('kind')} {record.get('exit', '')}"))
        if record["kind"] == "weights":
            text = text[:8]
        print(f"  {name}: {record['kind']} {text[:300]} {record['seconds']} s", flush=True)
        for line in record["lines"]:
            print(f"      {line[:300]}", flush=True)
        if record["kind"] in ("traceback", "died", "hang"):
            print(f"      {record.get('frames')}", flush=True)
        return record

    weights = {processes: run(str(processes), processes) for processes in (1, 2, 3)}
    if weights[1]["kind"] == "weights":
        run("1 again", 1)
    # Without GradientAccumulation, an update is larger on more processes.
    resumed_on = {1: (1,), 2: (2,)} if row.accumulate == "nothing" else {1: (2,), 2: (3, 1)}
    for stopped_on, update in zip((1, 2), row.stops):
        if weights[stopped_on]["kind"] != "weights":
            continue
        run(f"{stopped_on} stopped", stopped_on, stop=update)
        checkpoint = folder / f"{stopped_on}-stopped" / "last.ckpt"
        if checkpoint.exists():
            for processes in resumed_on[stopped_on]:
                # Where only one process works, the resumption is on one too.
                processes = processes if weights[processes]["kind"] == "weights" else stopped_on
                run(f"{stopped_on} then {processes}", processes, checkpoint=checkpoint)
    for processes in weights:
        if weights[processes]["kind"] in ("traceback", "died", "hang", "ranks differ"):
            run(f"stock {processes}", processes, ours=False)
    if not row.whole and row.accumulate != "nothing" and weights[1]["kind"] == "weights":
        whole = run("one batch", 1, noise=False, updates=1, batch_size=GLOBAL_BATCH)
        parts = run("three micro-batches", 1, noise=False, updates=1)
        off = difference(whole, parts)
        runs["three micro-batches"]["difference"] = off
        print(f"      difference {off}")
    for record in runs.values():
        record.pop("gradient", None)
    return {"what": row.what, "user": row.user, "whole": row.whole, "verdict": verdict(row, runs), "runs": runs}


def difference(run: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Return the largest relative difference of the first gradients of two runs; None if one has none."""
    pairs: list[tuple[float, float]] = list(zip(run.get("gradient", []), other.get("gradient", [])))
    if not pairs:
        return None
    scale = max(abs(value) for value, _ in pairs) or 1.0
    return max(abs(value - twin) for value, twin in pairs) / scale


def verdict(row: Row, runs: dict[str, dict[str, Any]]) -> str:
    """Return what the runs of a row show, in a few words, with the names of the runs that show it."""
    ours = {name: run for name, run in runs.items() if not name.startswith("stock")}
    trained = {name: run for name, run in ours.items() if run["kind"] == "weights" and name[0].isdigit()}
    found = []
    for kind, words in FAILURES.items():
        names = [name for name, run in ours.items() if run["kind"] == kind]
        stock = {name.split()[1] for name, run in runs.items() if name.startswith("stock") and run["kind"] == kind}
        library = [name for name in names if name.split()[-1] in stock or name.split()[0] in stock]
        for group, suffix in ((library, ", in stock Lightning as well"), ([n for n in names if n not in library], "")):
            if group:
                found.append(f"{words}{suffix} ({', '.join(group)})")
    groups = [trained]
    if row.accumulate == "nothing":
        groups = [{name: run for name, run in trained.items() if run["processes"] == number} for number in (1, 2, 3)]
    hashes = [{run["sha256"] for run in group.values()} for group in groups if group]
    if hashes and all(len(group) == 1 for group in hashes):
        found.insert(0, f"equal bits {', '.join(next(iter(group))[:8] for group in hashes)} ({', '.join(trained)})")
    elif hashes:
        notes = any("note:" in line or "warning:" in line for run in trained.values() for line in run["lines"])
        word = "different bits, with a line" if notes else "SILENT: different bits"
        found.insert(0, word + " " + ", ".join(f"{name}: {run['sha256'][:8]}" for name, run in trained.items()))
    if "1 again" in trained and trained["1 again"]["sha256"] != trained["1"]["sha256"]:
        found.append("not repeatable on one process")
    for name in ("1 stopped", "2 stopped"):
        if name in ours and ours[name]["kind"] == "weights":
            found.append(f"no stop ({name})")
    if (off := ours.get("three micro-batches", {}).get("difference")) is not None and off > ROUNDING:
        found.append(f"SILENT: one batch differs from three micro-batches by {off:.1g}")
    return "; ".join(found)


def table(folder: Path) -> str:
    """Return the Markdown table of the results in a folder."""
    lines = ["| library | trained | verdict | lines | its user types | seconds |", "|---|---|---|---|---|---|"]
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if "rows" not in result:
            lines.append(f"| {result['library']} | | {result['error']} | | | {result['seconds']} |")
            continue
        for name, row in result["rows"].items():
            notes: dict[str, None] = {}
            for run in row["runs"].values():
                if "error" in run:
                    notes.setdefault(run["error"])
                for line in run["lines"]:
                    notes.setdefault(line)
            text = "<br>".join(note[:330].replace("|", "\\|") for note in notes)
            library = f"{result['library']} {result['version']}"
            cells = (library, f"{name}: {row['what']}", row["verdict"], text, row["user"], result["seconds"])
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def in_environments(pattern: str, libraries: list[str], out: Path, prefix: list[str]) -> None:
    """Repeat the rows of each library in its own environment, and write a file of results for each."""
    for library in libraries:
        python = Path(pattern.format(library)).absolute() / "bin" / "python"
        start = time.monotonic()
        target = out / f"{library}.json"
        target.unlink(missing_ok=True)
        command = [*prefix, str(python), "-m", str(__package__), library, "--json", str(target)]
        print(library, flush=True)
        with (out / f"{library}.txt").open("w") as log:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        if not target.exists():
            tail = (out / f"{library}.txt").read_text().strip().splitlines()[-1:]
            error = f"not run (status {status}): {' '.join(tail)[:300]}"
            result = {"library": library, "error": error, "seconds": round(time.monotonic() - start)}
            target.write_text(json.dumps(result))
    (out / "table.md").write_text(table(out))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter, epilog=__doc__
    )
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help="libraries to train; all by default")
    parser.add_argument("--list", action="store_true", help="print the libraries")
    parser.add_argument("--row", action="append", default=[], help="only this row; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of one library there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the runs print and save")
    parser.add_argument("--environments", metavar="PATTERN", help="environment of a library, with {} for its name")
    parser.add_argument("--prefix", default="", help="command to put in front of each library's run")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="results of all libraries, and table.md")
    parser.add_argument("--table", action="store_true", help="print the table of the results in --out")
    args = parser.parse_args()
    for library in args.libraries:
        if library not in clients():
            parser.error(f"no library {library!r}: choose from {', '.join(clients())}")
    if args.list:
        for library in clients():
            print(f"{library:<24} pip install -e . {requirements(library)}")
        return
    if args.table:
        print(table(args.out))
        return
    if args.environments:
        args.out.mkdir(parents=True, exist_ok=True)
        in_environments(args.environments, args.libraries or clients(), args.out.absolute(), args.prefix.split())
        return
    for library in args.libraries or clients():
        result = measure(library, args.row, args.keep)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
