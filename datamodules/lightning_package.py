"""The choice between `lightning` and `pytorch_lightning`, which hold the same code twice.

The two have different classes: a Trainer of one rejects callbacks of the other.
"""

import os
import sys
from functools import cache
from importlib.util import find_spec

from datamodules.errors import UserError

VARIABLE = "LIGHTNING_RECIPES_LIGHTNING"
PACKAGES = ("lightning", "pytorch_lightning")


@cache
def lightning_package() -> str:
    """Return the package to import: the environment variable's, else the imported one, else the installed one.

    If both are imported, or none is and both are installed, it is `lightning`. A process decides once.

    Raises:
        UserError: the environment variable names no package of Lightning.
    """
    name = os.environ.get(VARIABLE)
    if name and name not in PACKAGES:
        raise UserError(f"{VARIABLE}={name}: expected {' or '.join(PACKAGES)}")
    named = [name] if name else []
    imported = [package for package in PACKAGES if package in sys.modules]
    installed = (package for package in PACKAGES if find_spec(package))
    return next(iter([*named, *imported]), None) or next(installed, "lightning")
