"""Check that no folder of the user shadows one of our packages.

Tested in `tests/package/test_console_command.py`.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

_FILE_OF_PACKAGE = {"callbacks": "gradient_accumulation.py", "datamodules": "contract.py"}
"""A file in each of our packages; a package without it is not ours."""


def reject_shadows() -> None:
    """Check that the packages that recipes import are ours.

    Python finds a folder ``callbacks/`` with an ``__init__.py`` in the current folder, or beside the program, before
    an installed package of that name.

    Raises:
        ImportError: another folder has one of the names. ``python -m`` prints this error as one line, not a traceback.
    """
    for name, file in _FILE_OF_PACKAGE.items():
        spec = find_spec(name)
        if spec is None:
            continue
        locations = [*(spec.submodule_search_locations or ()), spec.origin or ""]
        if not (Path(locations[0]) / file).is_file():
            problem = (
                f"{locations[0]} hides the package {name} of lightning-recipes: rename your folder, or start from"
                " another one"
            )
            if sys.argv[:1] == ["-m"]:  # The value during python -m, until the module is found.
                sys.exit(f"error: {problem}")
            raise ImportError(problem)
