"""Recipes: complete LightningModules with a command line. Names are imported when they are used."""

from lazy_loader import attach_stub

from recipes.shadowing import reject_shadows

reject_shadows()

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
