"""A user's own `datamodules` beside a script is imported in place of ours, and names that we need are missing from it.

Python looks in the script's folder, or with ``python -m`` in the current one, before it looks among the installed
packages. A package `recipes` of the user's cannot be detected: then none of our code runs.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["check_not_shadowed"]

_ROOT = Path(__file__).resolve().parents[2]


def _found(name: str) -> Path | None:
    """Where ``import name`` looks: a package's folder or a module's file."""
    spec = sys.modules[name].__spec__ if name in sys.modules else find_spec(name)
    if spec is None:
        return None
    place = next(iter(spec.submodule_search_locations or ()), spec.origin)
    return Path(place).resolve() if place else None


def check_not_shadowed(*names: str) -> None:
    """Refuse to go on where another package or module has the name of one of ours.

    While ``python -m`` locates its module, which `sys.argv` shows, the error is printed and the process ends with
    status 2.

    Args:
        names: packages that stand beside this one; where one of them does not, it is not checked.

    Raises:
        ImportError: with one line that says what to rename.
    """
    for name in names:
        found = _found(name)
        if found is None or found == _ROOT / name or not (_ROOT / name).is_dir():
            continue
        kind = "folder" if found.is_dir() else "file"
        message = f"{found} shadows the package `{name}` of lightning-recipes; rename this {kind}"
        if sys.argv[:1] == ["-m"]:
            print(f"error: {message}", file=sys.stderr)  # noqa: T201
            sys.exit(2)
        raise ImportError(message, name=name, path=str(found))
