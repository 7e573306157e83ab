"""Runs benchmark sections: ``python -m benchmarks [NAMES] [--json out.json] [--quick] [--compare old.json]``."""

import argparse
import difflib
import json
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import SECTIONS

if TYPE_CHECKING:
    from benchmarks.harness.measurements import Section

WIDTH = 120  # Where there is no terminal that would wrap what is longer.
INTERRUPTED = 130  # What a shell reports for a program ended by Ctrl-C.


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or greater")
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part) for part in text.split(",")}))


def _json_path(text: str) -> Path:
    path = Path(text).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {path}: name a file in a folder that exists")
    return path


def _results(text: str) -> dict[str, Any]:
    try:
        results: dict[str, Any] = json.loads(Path(text).expanduser().read_text(encoding="utf-8"))
        _ = results["sections"], results["machine"]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text} holds no results; pass a file that --json has written") from error
    return results


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line, whose help lists the sections."""
    section_list = "\n".join(f"  {name:16} {description}" for name, description in SECTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compares the recipes with what a user would use instead, and prints ratios.",
        epilog=f"sections:\n{section_list}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAMES", help="sections to run; all by default")
    parser.add_argument("--json", type=_json_path, metavar="FILE", help="write the results there, after each section")
    parser.add_argument("--compare", type=_results, metavar="FILE", help="print what changed since these results")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer, to see that it works; rough figures")
    parser.add_argument("--repeats", type=_positive, metavar="N", help="rounds; by default each section's own choice")
    parser.add_argument("--threads", type=_positive, metavar="N", help="of torch; by default each section's own choice")
    parser.add_argument("--data-dir", default="data", metavar="FOLDER", help="where data sets are (default: data)")
    parser.add_argument(
        "--devices", type=_counts, default=(), metavar="N,N", help="scaling: processes on a node, as in 1,2,4,8"
    )
    return parser


def check_names(parser: argparse.ArgumentParser, names: Sequence[str]) -> list[str]:
    """Return the sections to run, each once. A wrong name ends the program and lists similar names."""
    for name in names:
        if name not in SECTIONS:
            near = difflib.get_close_matches(name.replace("-", "_"), SECTIONS, n=1, cutoff=0.4) or list(SECTIONS)
            parser.error(f"no section {name!r}; did you mean {' or '.join(near)}?")
    return list(dict.fromkeys(names or SECTIONS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run sections, print and write the results of each as soon as it is done, and return the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    names = check_names(parser, args.names)

    # Imported here, so that help and errors of the command line need not wait for torch.
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from benchmarks.harness.measurements import Options, as_json, describe_machine, print_section, write_json
    from datamodules.errors import UserError
    from recipes.runner.machine import resolve_precision, tune_allocator

    # SIGTERM acts as Ctrl-C, which keeps the results of complete rounds.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    tuned = tune_allocator()  # Before the first large allocation.
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    machine = describe_machine(tuned)
    machine["precision"] = "{}, {}, unless a section names another one".format(*resolve_precision("auto"))
    for key, text in machine.items():
        console.print(f"{key}: {text}", soft_wrap=True)
    if args.compare is not None:
        from benchmarks.harness.comparison import differing_machines

        for difference in differing_machines(args.compare["machine"], machine):
            console.print(f"[yellow]compared with another machine: {difference}", soft_wrap=True)
    options = Options(args.quick, args.repeats, args.threads, args.data_dir, args.devices)
    done: dict[str, Section] = {}
    interrupted = False
    for name in names:
        # Redrawn between measurements only, since the thread of a bar would disturb them.
        with Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as bar:
            task = bar.add_task(name)

            def show(what: str, count: int, total: int, bar: Progress = bar, task: TaskID = task) -> None:
                bar.update(task, description=what, completed=count, total=total, refresh=True)

            try:
                done[name] = import_module(f"benchmarks.sections.{name}").run(options, show)
            except KeyboardInterrupt:
                interrupted = True
            except UserError as error:
                parser.exit(1, f"{parser.prog}: error in {name}: {error}\n")
        if name in done:
            interrupted = interrupted or done[name].interrupted
            print_section(done[name], console)
        if args.json is not None:
            write_json(args.json, machine, done, interrupted)
        if args.compare is not None and name in done:
            from benchmarks.harness.comparison import changes

            lines = changes(args.compare, as_json(machine, {name: done[name]}, interrupted))
            for line in lines or [f"{name}: nothing changed beyond the noise"]:
                console.print(line, soft_wrap=True)
        if interrupted:
            print("interrupted: what was done is kept", file=sys.stderr)
            return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
