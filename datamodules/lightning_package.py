"""The choice between `lightning` and `pytorch_lightning`, which hold the same code twice, with different classes.

A program with sorted imports imports our callbacks before either, so they may be of the wrong one. The program's
Trainer calls their hooks anyway, but they would not recognize its loaders and checkpoint callbacks: they end the run.

Tested in `tests/package/test_lightning_package.py`.
"""

import os
import sys
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Self

from datamodules.errors import UserError

VARIABLE = "LIGHTNING_RECIPES_LIGHTNING"
TRAINERS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""The packages of Lightning, and the module of each that holds the Trainer."""

_KINDS = ("Trainer", "Callback", "LightningModule", "LightningDataModule")


@cache
def lightning_package() -> str:
    """Return the package to import: the environment variable's, else the imported one, else the installed one.

    If both are imported, or none is and both are installed, it is `lightning`. A process decides once.

    Raises:
        UserError: the environment variable names no package of Lightning.
    """
    name = os.environ.get(VARIABLE)
    if name:
        if name not in TRAINERS:
            raise UserError(f"{VARIABLE}={name}: expected {' or '.join(TRAINERS)}")
        return name
    imported = (package for package in TRAINERS if package in sys.modules)
    installed = (package for package in TRAINERS if find_spec(package))
    return next(imported, None) or next(installed, "lightning")


def package_of(value: object) -> str | None:
    """Return the package of Lightning that a Trainer, callback, module or data module is of; None for others."""
    packages = (base.__module__.partition(".")[0] for base in type(value).__mro__ if base.__name__ in _KINDS)
    return next((package for package in packages if package in TRAINERS), None)


def check_package(package: str | None, value: object) -> None:
    """Raise if a callback, module or data module is of another package of Lightning than its Trainer.

    Args:
        package: the package of the Trainer.
        value: what the Trainer gets.

    Raises:
        UserError: the value is of the other package.
    """
    other = package_of(value)
    if package is None or other is None or other == package:
        return
    ours = lightning_package()
    wanted = package if other == ours else other
    raise UserError(
        f"a Trainer of {package} got {type(value).__name__}, which is of {other}: set {VARIABLE}={wanted}, or import "
        f"{wanted} before callbacks, datamodules and recipes, and before whatever imports {ours}"
    )


@cache
def _name_packages_in_errors(package: str) -> None:
    """Have the Trainer of a package raise our line in place of "Expected a parent".

    Lightning calls this function of its own for a module that is of none of its classes, and only then.
    """
    for name in ("model_helpers", "compile"):
        module: Any = sys.modules[f"{TRAINERS[package]}.utilities.{name}"]
        module._check_mixed_imports = partial(check_package, package)


class OneLightning:
    """Base of our modules and data modules: a Trainer of the other package rejects them in one line.

    The other package may be imported after ours, so it is prepared when an object is made.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Build the object, and prepare the other package if it is imported."""
        for package in TRAINERS.keys() - {lightning_package()}:
            if hasattr(sys.modules.get(TRAINERS[package]), "Trainer"):  # Its import has ended.
                _name_packages_in_errors(package)
        return super().__new__(cls)
