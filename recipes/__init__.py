"""Recipes: complete LightningModules with a command line. Names are imported when they are used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.classification import Classifier
    from recipes.cli import run
    from recipes.mnist.recipe import MNISTClassifier
    from recipes.recipe import Recipe

__all__ = ["Classifier", "MNISTClassifier", "Recipe", "run"]

_HOMES = {
    "Classifier": "recipes.classification",
    "MNISTClassifier": "recipes.mnist.recipe",
    "Recipe": "recipes.recipe",
    "run": "recipes.cli",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'recipes' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
