"""Refuses a folder of the user that hides a package of ours, in one line that names it."""

import sys
from importlib.util import find_spec
from pathlib import Path

_HOLDS = {"callbacks": "gradient_accumulation.py", "datamodules": "contract.py"}
"""A file of each package by which it is known to be ours."""


def refuse_shadows() -> None:
    """Check that the packages that recipes import are ours.

    Python finds a folder ``callbacks/`` with an ``__init__.py`` in the current folder, or beside the program, before
    an installed package of that name.

    Raises:
        ImportError: another folder has one of the names. ``python -m`` ends with that line in place of a traceback.
    """
    for name, file in _HOLDS.items():
        spec = find_spec(name)
        if spec is None:
            continue
        places = [*(spec.submodule_search_locations or ()), spec.origin or ""]
        if not (Path(places[0]) / file).is_file():
            problem = (
                f"{places[0]} hides the package {name} of lightning-recipes: rename your folder, or start from another"
                " one"
            )
            if sys.argv[:1] == ["-m"]:  # As python -m has it until the module is found.
                sys.exit(f"error: {problem}")
            raise ImportError(problem)
