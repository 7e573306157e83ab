"""What mkdocs fills in: parts of the repository, public names, and links to edit a page.

A page asks with a comment: ``<!-- include: CHANGELOG.md -->`` or ``<!-- public names: callbacks -->``.
"""

import ast
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from code_blocks import ROOT, page_text

REPOSITORY = "LIGHTNING_RECIPES_REPOSITORY"
"""The variable with the address of the repository: where it is set, each page links to its source there."""


def reference(package: str) -> str:
    """The public names of a package for mkdocstrings."""
    tree = ast.parse((ROOT / package / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [(alias.name, node.module) for node in imports for alias in node.names if alias.name != "__version__"]
    return "\n\n".join(f"::: {package}.{module}.{name}" for name, module in names)


def edit_url(repository: str, page: str, markdown: str) -> str:
    """Where the source of a page is edited: the file that it includes, or the page itself.

    Example:
        >>> edit_url("https://host/us/it", "recipes/mnist.md", "<!-- include: recipes/mnist/README.md -->")
        'https://host/us/it/edit/main/recipes/mnist/README.md'
        >>> edit_url("https://host/us/it/", "start.md", "# Start")
        'https://host/us/it/edit/main/docs/start.md'
    """
    included = re.search(r"<!-- include: (.+?) -->", markdown)
    source = included[1] if included else f"docs/{page}"
    return f"{repository.rstrip('/')}/edit/main/{source}"


def on_config(config: Any, **others: Any) -> Any:
    """Show the version and the repository in the header."""
    version = runpy.run_path(str(ROOT / "recipes" / "version.py"))["__version__"]
    config.site_name = f"lightning-recipes {version}"
    config.repo_url = os.environ.get(REPOSITORY)
    config.repo_name = "Repository" if config.repo_url else None
    return config


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Fill in what a page asks for, and link to its source."""
    if REPOSITORY in os.environ:
        page.edit_url = edit_url(os.environ[REPOSITORY], page.file.src_uri, markdown)
    text = page_text(markdown, page.file.src_uri)
    return re.sub(r"<!-- public names: (\w+) -->", lambda found: reference(found[1]), text)
