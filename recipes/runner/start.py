"""Start of a program: the help and wrong flags before the imports, quick imports, and the fork server of workers.

Importing torch, torchvision and Lightning takes seconds, a quarter of the time for garbage collections that free
nothing. The help and a wrong flag do not need these packages.

The fork server has imported everything, so a worker starts immediately: one process imports torch, Lightning and the
recipe, not each worker. It lives until the run's last process has ended, so that it also starts the workers of a
restart. Nothing in it may start a thread or touch a device: a forked child would inherit a lock that no thread
releases, or a device that it cannot use.
"""

import atexit
import gc
import io
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import current_process, forkserver
from pathlib import Path
from signal import SIGUSR1
from typing import Any

from callbacks.lib.signals import keep_until_imported, restore_handlers
from datamodules.lightning_package import VARIABLE, lightning_package
from recipes.runner.command import COMMANDS, HELP_FLAGS, PRINT_CONFIG_FLAGS, help_text
from recipes.runner.hints import read_help, read_trainer_parameters, unknown_flag
from recipes.runner.variables import is_another_rank, names_a_rank, without_local_rank
from recipes.version import __version__

_NO_TRAINING = {"predict", "export", "list"}
_DEVICES = re.compile(r"--devices[= ](\S+)")
_AGENT = re.compile(r"--(num[-_]nodes|max[-_]restarts)\b")
_OTHER_NODE = re.compile(r"--node[-_]rank[= ](?!0\b)")
_MODULES = "LIGHTNING_RECIPES_PRELOAD"
_MODULES_OF_EVERY_RUN = (
    *("torch._dynamo", "torch.distributed", "torch.nn.parallel.distributed", "torch.utils.tensorboard"),
    *("torch.distributed.elastic.multiprocessing", "torchmetrics", "datamodules.lightning"),
    *("recipes.runner.run", "recipes.runner.worker"),
)


def program_name() -> str:
    """Return the typed start of the program: ``python -m recipes.mnist``."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    program = getattr(main, "PROGRAM", None)
    if program:
        return str(program)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"


def _announce(args: Sequence[str]) -> None:
    """Print on rank 0 that the imports take seconds."""
    # Lightning is not imported yet, so only flags and variables of the launchers show the rank.
    is_other_rank = _OTHER_NODE.search(" ".join(args)) or is_another_rank(os.environ)
    if is_other_rank or (HELP_FLAGS | PRINT_CONFIG_FLAGS).intersection(args):
        return
    # Other programs read the standard output of these commands.
    stream = sys.stderr if {"predict", "export"}.intersection(args) else sys.stdout
    if stream is sys.stdout or stream.isatty():
        with suppress(BrokenPipeError):  # As in `| true`; the next line ends the program.
            print("loading PyTorch and Lightning ...", file=stream, flush=True)


def _handle_early_flags(args: Sequence[str]) -> None:
    """Print the help or the version, or reject a flag that does not exist, before anything is imported.

    The help and the flags of a program that is not a recipe of this package are left to its parser.
    """
    help_flags = HELP_FLAGS.intersection(args)
    if "--version" in args and not help_flags:
        print(f"lightning-recipes {__version__}")  # noqa: T201
        sys.exit(0)
    recipe = _recipe_package()
    page = read_help(recipe) if recipe else None
    if page is None:
        return
    if help_flags:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            return  # Not a command; the parser reports it.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # The terminal may lack characters of a docstring.
        try:
            print(help_text(program_name(), page, any(flag.endswith("all") for flag in help_flags)), flush=True)  # noqa: T201
        except BrokenPipeError:  # For example in --help | head.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    problem = _unknown_flag(args, page.names())
    if problem:
        print(f"error: {problem}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


def _unknown_flag(args: Sequence[str], flags: Collection[str]) -> str:
    """Return the error for the first unknown flag, or ""."""
    for arg in args:
        flag, equals, _ = arg.removeprefix("--").partition("=")
        name = flag.replace("-", "_")
        if name not in flags and not equals:
            name = name.removeprefix("no_")
        exists = name in {*flags, "config", "print_config"} or name.startswith("trainer.")
        if exists or not re.match(r"--\w", arg):
            continue
        trainer_parameters = read_trainer_parameters()
        return "" if trainer_parameters is None else unknown_flag(flag, name, flags, trainer_parameters)
    return ""


def _recipe_package() -> str:
    """Return the package of the started recipe, such as recipes.mnist; "" for another program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package = spec.parent if spec else ""
    return package if package.startswith("recipes.") else ""


def _discard_last_warnings() -> None:
    """Close standard error: extensions print warnings about objects that outlive the interpreter."""
    with suppress(OSError):
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _will_start_processes(args: Sequence[str]) -> bool:
    """Return whether the command will start processes on this node, according to its text."""
    if names_a_rank(os.environ) or {*HELP_FLAGS, *_NO_TRAINING}.intersection(args):
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

    Use it in the first lines of a program, before other objects exist. Commands that train or evaluate print a line
    immediately. Ctrl-C exits with status 130 and no message; SIGUSR1 is kept until `run` handles it. The interpreter
    exits without a collection of the imported objects, which would take over a second. If several processes will train,
    their fork server imports meanwhile.
    """
    # A worker imports the program for its classes; its agent has already printed the line.
    if getattr(current_process(), "_inheriting", False):
        yield
        return
    # Slurm's signal before a time limit: otherwise it would end the process, and no rank would request a requeue.
    keep_until_imported(SIGUSR1)
    args = without_local_rank(sys.argv[1:], os.environ)
    _handle_early_flags(args)
    _announce(args)
    if _will_start_processes(args):
        spec = sys.modules["__main__"].__spec__
        start_fork_server([f"{spec.parent}.recipe"] if spec else [])
    # Otherwise a rank that loses rank 0 prints the C++ stack of its store.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Exit handlers run in reverse order: the first registered handler is called last.
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


def start_method() -> str:
    """Return the start method of worker processes: forkserver, or spawn on systems without it."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def start_fork_server(modules: Iterable[str]) -> None:
    """Start the fork server, unless it is running; it imports in parallel to this process.

    Args:
        modules: modules to import in addition to the modules of every run, such as the recipe's.
    """
    if start_method() != "forkserver":
        return
    multiprocessing.set_forkserver_preload([__name__])
    # NumPy's OpenBLAS starts threads on import unless it is limited to one thread. The limit does not reach the
    # workers: they get the environment of this process.
    modules_to_import = " ".join([*modules, *_MODULES_OF_EVERY_RUN])
    # The server does not import the program, so it is told which of Lightning's two packages the program uses.
    variables = {_MODULES: modules_to_import, VARIABLE: lightning_package(), "OPENBLAS_NUM_THREADS": "1"}
    previous = dict(os.environ)
    os.environ.update(variables)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(previous)


def import_and_freeze(modules: Iterable[str]) -> None:
    """Import modules in a fork server, whose children share them."""
    atexit.register(os._exit, 0)  # A regular exit would take a second for clean-up, and print warnings.
    # Collections during imports free nothing, and frozen objects stay on pages that parent and children share.
    gc.disable()
    for name in modules:
        with suppress(Exception):  # The worker imports the module again, and reports the error.
            import_module(name)
    gc.freeze()
    gc.enable()


def _import_everything(modules: Iterable[str]) -> None:
    """Import the modules and prepare the fork server; called when the server imports this module."""
    # In a separate session, the server's workers receive no Ctrl-C from the terminal: the agent passes it on, once.
    os.setsid()
    # The server ends with its last client. Its children get the handlers back, so that their parents can end them.
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    previous_handlers: dict[int, Any] = {signum: signal.signal(signum, signal.SIG_IGN) for signum in signals}
    os.register_at_fork(after_in_child=lambda: restore_handlers(previous_handlers))
    import_and_freeze(modules)


if _MODULES in os.environ:
    _import_everything(os.environ.pop(_MODULES).split())
