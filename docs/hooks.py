"""What mkdocs fills in: parts of the repository, public names, and the pictures that code blocks make.

A page asks with a comment: ``<!-- include: CHANGELOG.md -->`` or ``<!-- public names: callbacks -->``.
Pages whose code saves pictures are run, once for each version of their text, in ``.cache/docs``.
"""

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from code_blocks import ROOT, kept_pictures, page_text, pictures_of


def public_names(package: str) -> list[tuple[str, str]]:
    """The public names of a package, and the module that defines each."""
    tree = ast.parse((ROOT / package / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [(alias.name, f"{package}.{node.module}") for node in imports for alias in node.names]


def reference(package: str) -> str:
    """The public names of a package for mkdocstrings."""
    return "\n\n".join(f"::: {module}.{name}" for name, module in public_names(package) if name != "__version__")


def pictures(page: Path) -> dict[str, Path]:
    """The pictures that a page's code saves, by name; made where they are not there."""
    text = page_text(page.read_text(encoding="utf-8"))
    names = pictures_of(text)
    if not names:
        return {}
    folder = kept_pictures(text)
    if not all((folder / name).is_file() for name in names):
        env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with TemporaryDirectory() as here:
            command = [sys.executable, str(ROOT / "docs" / "code_blocks.py"), str(page), here]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
        if done.returncode:
            raise PluginError(f"the code of {page} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return {name: folder / name for name in names}


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures."""
    pages = [file for file in files.documentation_pages() if file.abs_src_path]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda file: pictures(Path(file.abs_src_path)), pages))
    for page, found in zip(pages, made, strict=True):
        for name, path in found.items():
            uri = (Path(page.src_uri).parent / name).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **others: Any) -> str:
    """Fill in what a page asks for."""
    return re.sub(r"<!-- public names: (\w+) -->", lambda found: reference(found[1]), page_text(markdown))
