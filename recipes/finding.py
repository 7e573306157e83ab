"""Finds recipes: the folders beside this file that can be started, as ``recipes/mnist/`` with its ``__main__.py``.

A copy of such a folder is also a recipe: its ``recipe.py`` has a class with a ``title`` of its own.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.errors import UserError

if TYPE_CHECKING:
    from recipes.base import Recipe


def find_recipes() -> dict[str, str]:
    """The names of the recipes, and what the ``__init__.py`` of each says in its first line."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*/__main__.py")):
        package = path.with_name("__init__.py")
        text = package.read_text(encoding="utf-8") if package.is_file() else ""
        found[path.parent.name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def recipe_class(name: str) -> "type[Recipe]":
    """The class of a recipe by the name of its folder: the one in its ``recipe.py`` that has a title of its own.

    Raises:
        UserError: there is no such recipe, or its module has no such class, or several.
    """
    names = find_recipes()
    if name not in names:
        raise UserError(f"there is no recipe {name!r}; expected {', '.join(names)}, or a class of yours")
    module = import_module(f"recipes.{name}.recipe")
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and "title" in vars(kind)
    ]
    if len(kinds) != 1:
        found = ", ".join(kind.__name__ for kind in kinds) or "none"
        raise UserError(f"recipes/{name}/recipe.py: expected one class with a `title` of its own, found {found}")
    return kinds[0]
