"""Registry of the recipes: the folders beside this file with a ``__main__.py``, such as ``recipes/mnist/``.

A copy of such a folder is a new recipe: its ``title``, and thus the folder of its runs, is the name of the folder.

Tested in `tests/package/test_console_command.py`.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.errors import UserError

if TYPE_CHECKING:
    from recipes.base import Recipe


def find_recipes() -> dict[str, str]:
    """Return the recipes by name, with the first line of the docstring of their ``__init__.py``."""
    summaries = {}
    for path in sorted(Path(__file__).parent.glob("*/__main__.py")):
        package = path.with_name("__init__.py")
        source = package.read_text(encoding="utf-8") if package.is_file() else ""
        # Parsed, not imported: a recipe imports torch.
        summaries[path.parent.name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return summaries


def recipe_class(name: str) -> "type[Recipe]":
    """Return the class of a recipe: the one class in its ``recipe.py`` that sets a ``title``.

    Raises:
        UserError: there is no such recipe, or its module has no such class, or several such classes.
    """
    names = find_recipes()
    if name not in names:
        raise UserError(f"there is no recipe {name!r}; expected {', '.join(names)}, or a class of yours")
    module = import_module(f"recipes.{name}.recipe")
    classes = [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__ == module.__name__ and "title" in vars(cls)
    ]
    if len(classes) != 1:
        class_names = ", ".join(cls.__name__ for cls in classes) or "none"
        raise UserError(f"recipes/{name}/recipe.py: expected one class that sets a `title`, found {class_names}")
    return classes[0]
