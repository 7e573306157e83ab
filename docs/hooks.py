"""What mkdocs fills in: parts of the repository, and public names.

A page asks with a comment: ``<!-- include: CHANGELOG.md -->`` or ``<!-- public names: callbacks -->``.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from code_blocks import ROOT, page_text


def reference(package: str) -> str:
    """The public names of a package for mkdocstrings."""
    tree = ast.parse((ROOT / package / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [(alias.name, node.module) for node in imports for alias in node.names if alias.name != "__version__"]
    return "\n\n".join(f"::: {package}.{module}.{name}" for name, module in names)


def on_page_markdown(markdown: str, **others: Any) -> str:
    """Fill in what a page asks for."""
    return re.sub(r"<!-- public names: (\w+) -->", lambda found: reference(found[1]), page_text(markdown))
