"""What mkdocs fills in: parts of the repository, public names, links to edit a page, and names that stay in one line.

A page asks with a comment: ``<!-- include: CHANGELOG.md -->``, ``<!-- public names: callbacks -->`` or
``<!-- notebook: docs/notebooks/mnist.ipynb -->``.
"""

import ast
import json
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


def cells(notebook: str) -> str:
    """The cells of a notebook as Markdown, without its title.

    Example:
        >>> title, code = {"cell_type": "markdown", "source": ["# Title"]}, {"cell_type": "code", "source": ["x = 1"]}
        >>> print(cells(json.dumps({"cells": [title, code]})))
        ```python
        x = 1
        ```
    """
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    texts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in sources]
    return re.sub(r"\A# .*\n+", "", "\n\n".join(texts))


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


def keep_names(page: str) -> str:
    """Make an element of each name in code within which a browser would break a line.

    A name of more than 44 characters is longer than a line of a phone.

    Example:
        >>> keep_names("<p>bit-identical: <code>--seed 1</code></p>")
        '<p>bit-identical: <code><span class="name">--seed</span> 1</code></p>'
    """
    name = re.compile(r"(?<!\S)(?=\S*[-/|{[])\S{2,44}(?!\S)")

    def mark(text: re.Match[str]) -> str:
        return name.sub(r'<span class="name">\g<0></span>', text[0])

    return re.sub(r"<code.*?</code>", lambda code: re.sub(r"(?<=>)[^<]+", mark, code[0]), page, flags=re.DOTALL)


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
    text = re.sub(r"<!-- notebook: (.+?) -->", lambda found: cells((ROOT / found[1]).read_text(encoding="utf-8")), text)
    return re.sub(r"<!-- public names: (\w+) -->", lambda found: reference(found[1]), text)


def on_page_content(content: str, **others: Any) -> str:
    """Keep the names of a page in one line each."""
    return keep_names(content)
