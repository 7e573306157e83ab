"""The first lines of a program: imports without garbage collection, and help that was printed before.

Importing torch, torchvision and Lightning takes seconds, a quarter of them for collections that free nothing. This file
imports nothing of them, so that help that was kept is printed at once.
"""

import atexit
import gc
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("recipes", "callbacks", "datamodules")
_READ = ("lightning", "torch", "torchvision", "jsonargparse", "docstring-parser")
_HELP = {"-h", "--help", "--help-all", "--help_all"}
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
_OTHER_NODE = re.compile(r"--node[-_]rank[= ](?!0\b)")


def program_name() -> str:
    """What the user typed to start the program: ``python -m recipes.mnist``."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if program := getattr(main, "PROGRAM", None):
        return str(program)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"


def _kept_help(program: str, args: Sequence[str]) -> Path | None:
    """Where the help for this call is kept; None where none is: only that of the recipes of this package is.

    It is taken where nothing that it was made from has changed: sources, versions, program and width.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or not spec.name.startswith("recipes.") or len(args) != 1 or args[0] not in _HELP:
        return None
    root = Path(__file__).parents[2]
    sources = sorted(path for name in _PACKAGES for path in (root / name).rglob("*.py"))
    made_of = [program, *args, str(shutil.get_terminal_size((100, 24)).columns), sys.version]
    made_of += [f"{path} {(state := path.stat()).st_mtime_ns} {state.st_size}" for path in sources]
    made_of += [f"{name} {version(name)}" for name in _READ]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-recipes" / "help"
    return base / hashlib.sha256("\n".join(made_of).encode()).hexdigest()


def keep_help(program: str, args: Sequence[str], text: str) -> None:
    """Keep the help of a call, where that is possible."""
    with suppress(OSError, RuntimeError, ImportError):
        if path := _kept_help(program, args):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_text(text, encoding="utf-8")
            part.replace(path)
            for old in sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)[:-32]:
                old.unlink(missing_ok=True)


def _announce(args: Sequence[str]) -> None:
    """Say on rank 0 that the imports take seconds."""
    other = _OTHER_NODE.search(" ".join(args)) or any(os.environ.get(name, "0") != "0" for name in _RANKS)
    if other or {*_HELP, "--print-config", "--print_config"}.intersection(args):
        return
    # The output of some commands is for other programs.
    stream = sys.stderr if {"predict", "export"}.intersection(args) else sys.stdout
    if stream is sys.stdout or stream.isatty():
        print("loading PyTorch and Lightning ...", file=stream, flush=True)


def _discard_last_warnings() -> None:
    """Close standard error: extensions print warnings about objects that are alive when the interpreter is not."""
    with suppress(OSError):
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection for the imports inside, and exclude their objects from it.

    For the first lines of a program, before it has created other objects. Help that was printed before ends the
    program. Commands that train or evaluate print that they have started. Ctrl-C exits with status 130 and no message.
    The interpreter exits without a collection of these objects, which would take over a second.
    """
    with suppress(OSError, ValueError, RuntimeError, ImportError):
        if (path := _kept_help(program_name(), sys.argv[1:])) and (text := path.read_text(encoding="utf-8")):
            print(text, end="")  # noqa: T201
            sys.exit()
    _announce(sys.argv[1:])
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
