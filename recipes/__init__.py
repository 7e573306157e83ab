"""Recipes: complete LightningModules with a command line. Names are imported when they are used."""

from pathlib import Path
from runpy import run_path

from lazy_loader import attach_stub

# By its path: the name `callbacks` may be the one that is shadowed.
_shadowing = run_path(str(Path(__file__).parents[1] / "callbacks" / "lib" / "shadowing.py"))
_shadowing["check_not_shadowed"]("callbacks", "datamodules")

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
