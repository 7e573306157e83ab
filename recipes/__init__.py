"""Recipes: complete LightningModules with a command line. Names are imported when they are used."""

from lazy_loader import attach_stub

import datamodules  # noqa: F401 - it refuses releases of Lightning that must not be imported.

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
