"""The first lines of a program: imports without garbage collection, and beside those of the processes to start.

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
    """What the user typed to start the program: ``python -m recipes.mnist``."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if program := getattr(main, "PROGRAM", None):
        return str(program)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"


def _announce(args: Sequence[str]) -> None:
    """Say on rank 0 that the imports take seconds."""
    if is_worker(os.environ):  # Its agent has said so.
        return
    other = _OTHER_NODE.search(" ".join(args)) or any(os.environ.get(name, "0") != "0" for name in _RANKS)
    if other or {*_HELP, "--print-config", "--print_config"}.intersection(args):
        return
    # The output of some commands is for other programs.
    stream = sys.stderr if {"predict", "export"}.intersection(args) else sys.stdout
    if stream is sys.stdout or stream.isatty():
        print("loading PyTorch and Lightning ...", file=stream, flush=True)


def _answer_at_once(args: Sequence[str]) -> None:
    """Print the version, and refuse a misspelled flag of a recipe of this package, before anything is imported.

    The parser answers for a name that is not close to a flag: it also knows the Trainer's parameters.
    """
    if "--version" in args:
        print(f"lightning-recipes {__version__}")  # noqa: T201
        sys.exit(0)
    known = flag_names(_recipe_name())
    if not known or is_worker(os.environ):
        return
    for arg in args:
        flag = arg.removeprefix("--").partition("=")[0]
        name = flag.replace("-", "_")
        if not arg.startswith("--") or name.removeprefix("no_") in {*known, "config", "print_config", "help_all"}:
            continue
        if "." not in name and (hint := flag_meant(name, known)):
            print(f"error: there is no flag --{flag}{hint}", file=sys.stderr)  # noqa: T201
            sys.exit(2)


def _recipe_name() -> str:
    """The folder of the recipe that is started, such as mnist; empty for another program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package = spec.parent if spec else ""
    return package.removeprefix("recipes.") if package.startswith("recipes.") else ""


def _discard_last_warnings() -> None:
    """Close standard error: extensions print warnings about objects that are alive when the interpreter is not."""
    with suppress(OSError):
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _will_start_processes(args: Sequence[str]) -> bool:
    """Whether the command will start processes on this node, as far as its text tells before anything is imported."""
    if any(name in os.environ for name in _RANKS) or {*_HELP, *_NO_TRAINING}.intersection(args):
        return False
    text = " ".join(args)
    if _AGENT.search(text):
        return True
    typed = _DEVICES.search(text)
    devices = typed[1] if typed else "auto"
    if devices in ("auto", "-1"):
        return len(list(Path("/dev").glob("nvidia[0-9]*"))) > 1
    return "," in devices or (devices.isdigit() and int(devices) > 1)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection for the imports inside, and exclude their objects from it.

    For the first lines of a program, before it has created other objects. Commands that train or evaluate print that
    they have started. Ctrl-C exits with status 130 and no message. The interpreter exits without a collection of these
    objects, which would take over a second. Where several processes will train, the server that they are forked from
    imports meanwhile.
    """
    _answer_at_once(sys.argv[1:])
    _announce(sys.argv[1:])
    if _will_start_processes(sys.argv[1:]):
        spec = sys.modules["__main__"].__spec__
        start_fork_server([f"{spec.parent}.recipe"] if spec else [])
    # Else a rank whose rank 0 was killed prints the stack of the store's C++ code.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Registered before others, and so called after them.
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
