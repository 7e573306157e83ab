"""Speed up the imports of a program: no garbage collection, and the worker processes import meanwhile.

Importing torch, torchvision and Lightning takes seconds, a quarter of them for collections that free nothing.
"""

import atexit
import gc
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from recipes.runner.flag_names import flag_names
from recipes.runner.fork_server import start_fork_server
from recipes.runner.hints import flag_meant
from recipes.runner.worker import is_worker
from recipes.version import __version__

_HELP = {"-h", "--help", "--help-all", "--help_all"}
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
_NO_TRAINING = {"predict", "export", "list"}
_DEVICES = re.compile(r"--devices[= ](\S+)")
_AGENT = re.compile(r"--(num[-_]nodes|max[-_]restarts)\b")
_OTHER_NODE = re.compile(r"--node[-_]rank[= ](?!0\b)")


def program_name() -> str:
    """Return what the user typed to start the program: ``python -m recipes.mnist``."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    program = getattr(main, "PROGRAM", None)
    if program:
        return str(program)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"


def _announce(args: Sequence[str]) -> None:
    """Print on rank 0 that the imports take seconds."""
    if is_worker(os.environ):  # Its agent has printed the line.
        return
    # Lightning is not imported yet, so that only flags and variables of the launchers tell the rank.
    is_other_rank = _OTHER_NODE.search(" ".join(args)) or any(os.environ.get(name, "0") != "0" for name in _RANKS)
    if is_other_rank or {*_HELP, "--print-config", "--print_config"}.intersection(args):
        return
    # The standard output of these commands is read by other programs.
    stream = sys.stderr if {"predict", "export"}.intersection(args) else sys.stdout
    if stream is sys.stdout or stream.isatty():
        print("loading PyTorch and Lightning ...", file=stream, flush=True)


def _answer_at_once(args: Sequence[str]) -> None:
    """Print the version, or refuse a misspelled flag of our recipes, before anything is imported.

    A name that is not close to a flag is left to the parser, which also knows the Trainer's parameters.
    """
    if "--version" in args:
        print(f"lightning-recipes {__version__}")  # noqa: T201
        sys.exit(0)
    flags = flag_names(_recipe_name())
    if not flags or is_worker(os.environ):
        return
    for arg in args:
        flag = arg.removeprefix("--").partition("=")[0]
        name = flag.replace("-", "_")
        if not arg.startswith("--") or name.removeprefix("no_") in {*flags, "config", "print_config", "help_all"}:
            continue
        hint = "" if "." in name else flag_meant(name, flags)
        if hint:
            print(f"error: there is no flag --{flag}{hint}", file=sys.stderr)  # noqa: T201
            sys.exit(2)


def _recipe_name() -> str:
    """Return the folder of the recipe that was started, such as mnist; empty for another program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package = spec.parent if spec else ""
    return package.removeprefix("recipes.") if package.startswith("recipes.") else ""


def _discard_last_warnings() -> None:
    """Close standard error: extensions print warnings about objects that outlive the interpreter."""
    with suppress(OSError):
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _will_start_processes(args: Sequence[str]) -> bool:
    """Return whether the command will start processes on this node, judged by its text only."""
    if any(name in os.environ for name in _RANKS) or {*_HELP, *_NO_TRAINING}.intersection(args):
        return False
    command_line = " ".join(args)
    if _AGENT.search(command_line):
        return True
    match = _DEVICES.search(command_line)
    devices = match[1] if match else "auto"
    if devices in ("auto", "-1"):
        return len(list(Path("/dev").glob("nvidia[0-9]*"))) > 1
    return "," in devices or (devices.isdigit() and int(devices) > 1)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection for the imports inside, and exclude their objects from it.

    Use it in the first lines of a program, before other objects exist. Commands that train or evaluate print a line at
    once. Ctrl-C exits with status 130 and no message. The interpreter exits without a collection of the imported
    objects, which would take over a second. If several processes will train, their fork server imports meanwhile.
    """
    _answer_at_once(sys.argv[1:])
    _announce(sys.argv[1:])
    if _will_start_processes(sys.argv[1:]):
        spec = sys.modules["__main__"].__spec__
        start_fork_server([f"{spec.parent}.recipe"] if spec else [])
    # Otherwise a rank that loses rank 0 prints the C++ stack of its store.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Exit handlers run in reverse order: registered first, this one is called last.
    atexit.register(_discard_last_warnings)
    gc.disable()
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    else:
        gc.freeze()
    finally:
        gc.enable()
