"""The text of ``--help``, kept on disk: making it imports torch and Lightning, which takes seconds.

It is that of the recipes of this package only, whose sources are known. A text is taken where nothing that it was made
from has changed: the sources of the package, the versions of what it reads signatures from, the program and the width.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

__all__ = ["cached_help", "keep_help"]

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("recipes", "callbacks", "datamodules")
_READ = ("lightning", "torch", "torchvision", "jsonargparse", "docstring-parser")
_ASKED = ({"--help"}, {"-h"}, {"--help-all"}, {"--help_all"})


def _states() -> Iterator[str]:
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            state = path.stat()
            yield f"{path} {state.st_mtime_ns} {state.st_size}"


def _file(program: str, args: Sequence[str]) -> Path | None:
    """Where the text for this call is kept; None where none is."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or not spec.name.startswith("recipes.") or {arg for arg in args if arg != "fit"} not in _ASKED:
        return None
    made_of = [program, *args, str(shutil.get_terminal_size((100, 24)).columns), sys.version, *_states()]
    made_of += [f"{name} {version(name)}" for name in _READ]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-recipes" / "help"
    return base / hashlib.sha256("\n".join(made_of).encode()).hexdigest()


def cached_help(program: str, args: Sequence[str]) -> str | None:
    """The help that was printed before for the same call; None where there is none."""
    try:
        return (path.read_text(encoding="utf-8") or None) if (path := _file(program, args)) else None
    except (OSError, ValueError, RuntimeError, ImportError):
        return None


def keep_help(program: str, args: Sequence[str], text: str) -> None:
    """Keep the help of a call, where that is possible."""
    try:
        if path := _file(program, args):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_text(text, encoding="utf-8")
            part.replace(path)
            for old in sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)[:-32]:
                old.unlink(missing_ok=True)
    except (OSError, RuntimeError, ImportError):
        return
