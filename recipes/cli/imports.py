"""Which modules the classes that a file of settings names may be imported from.

Importing a module runs it. What is typed is the user's own; a file, such as a ``config.yaml`` that came with somebody
else's run, may name classes of known packages and of what the program has imported anyway.
"""

import importlib
import re
import sys
from collections.abc import Iterable

from jsonargparse import set_parsing_settings

from datamodules.errors import UserError

__all__ = ["allow_imports", "explain_refused_import", "import_module_of", "is_known"]

_KNOWN = {"callbacks", "datamodules", "lightning", "recipes", "torch", "torchmetrics", "torchvision"}


def _top(name: str) -> str:
    return name.partition(".")[0]


def is_known(path: str) -> bool:
    """Whether a class, by its import path, is one that any file of settings may name."""
    return _top(path) in _KNOWN


def allow_imports(typed: Iterable[str]) -> None:
    """Restrict the imports of jsonargparse, for the rest of the process, to known modules.

    Args:
        typed: modules or classes that the user has named on the command line.
    """
    imported = {_top(name) for name in sys.modules} - sys.stdlib_module_names
    # A module that is denied by its name, such as `os` and `subprocess`, stays so unless the user has typed it.
    allowed = {*_KNOWN, *imported, *map(_top, typed)} - {"jsonargparse"}
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=sorted(name for name in allowed if name.isidentifier()),
        # Parameters of type Any take values of all classes, and torch has some that start a program.
        instantiate_subclass_spec_in_any=False,
    )


def explain_refused_import(message: str) -> str | None:
    """What to type where a file named a class of another module; None where the message is about something else."""
    found = re.search(r"Importing '([\w.]+)' is not allowed", message)
    if found is None:
        return None
    known = ", ".join(sorted(_KNOWN))
    return (
        f"a setting names the class {found[1]}, which would import and run {_top(found[1])}: a file of settings may"
        f" name classes of {known}; if you trust that module, pass --trust-modules {_top(found[1])}"
    )


def import_module_of(path: str, typed: Iterable[str]) -> None:
    """Import the module of a class that a setting names by its import path, under the rule of `allow_imports`.

    Args:
        path: such as lion_pytorch.Lion; a name without a dot is of no module.
        typed: modules or classes that the user has named on the command line.

    Raises:
        UserError: the module may not be imported, or cannot be.
    """
    module = path.rpartition(".")[0]
    if not module or module in sys.modules:
        return
    if _top(module) not in {*_KNOWN, *map(_top, typed)}:
        raise UserError(explain_refused_import(f"Importing {path!r} is not allowed") or path)
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{path} cannot be imported: {error}; install its package, or correct the name") from error
