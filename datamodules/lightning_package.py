"""Choice between `lightning` and `pytorch_lightning`, which have the same code but different classes.

With sorted imports a program imports our callbacks before Lightning, so they may use the wrong package. The program's
Trainer would call their hooks, but they would not recognize its loaders and checkpoint callbacks. So they raise.

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
"""The packages of Lightning, and the module of each with the Trainer."""

_KINDS = ("Trainer", "Callback", "LightningModule", "LightningDataModule")


@cache
def lightning_package() -> str:
    """Return the package to import: from the environment variable, else the imported, else the installed package.

    A tie is broken in favor of `lightning`. The result is fixed for the process.

    Raises:
        UserError: the value of the environment variable is not a package of Lightning.
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
    """Return the package of Lightning of a Trainer, callback, module or data module; None for other objects."""
    packages = (base.__module__.partition(".")[0] for base in type(value).__mro__ if base.__name__ in _KINDS)
    return next((package for package in packages if package in TRAINERS), None)


def check_package(package: str | None, value: object) -> None:
    """Raise a UserError if a callback, module or data module is not of its Trainer's package of Lightning.

    Args:
        package: package of the Trainer.
        value: object that is passed to the Trainer.

    Raises:
        UserError: the object is of the other package.
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
    """Replace the error "Expected a parent" of a package's Trainer by our message.

    Lightning calls the replaced function only for a module that is not an instance of its classes.
    """
    for name in ("model_helpers", "compile"):
        module: Any = sys.modules[f"{TRAINERS[package]}.utilities.{name}"]
        module._check_mixed_imports = partial(check_package, package)


class OneLightning:
    """Base class of our modules and data modules: a Trainer of the other package rejects them in one line.

    The other package may be imported after ours, so it is prepared when an object is created.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Create the object, and prepare the other package if it is imported."""
        for package in TRAINERS.keys() - {lightning_package()}:
            if hasattr(sys.modules.get(TRAINERS[package]), "Trainer"):  # Its import has ended.
                _name_packages_in_errors(package)
        return super().__new__(cls)
