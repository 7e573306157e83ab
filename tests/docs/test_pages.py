"""Every public callback has a page with an example that runs and a place in the site; the notebook runs."""

import ast
import inspect
import json
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import yaml

import callbacks
from docs.code_blocks import ROOT, blocks_of

PAGES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "callbacks").glob("*.md"))}
NAMES = [
    name
    for name in callbacks.__all__
    if inspect.isclass(kind := getattr(callbacks, name)) and issubclass(kind, pl.Callback)
]


@pytest.mark.parametrize("name", NAMES)
def test_a_callback_has_a_page_with_an_example_that_runs(name: str) -> None:
    own = [path for path, text in PAGES.items() if name in text.partition("\n")[0]]
    assert len(own) == 1
    assert any(block.language in ("python", "bash") for block in blocks_of(PAGES[own[0]]))
    assert f"callbacks/{own[0].name}" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"({own[0].name})" in PAGES[ROOT / "docs" / "callbacks" / "index.md"]


@pytest.mark.parametrize("name", NAMES)
def test_a_callbacks_page_begins_with_the_line_that_uses_it(name: str) -> None:
    page = next(text for text in PAGES.values() if name in text.partition("\n")[0])
    assert page.partition("\n\n")[2].startswith("```python\nimport lightning.pytorch as pl\nfrom callbacks import ")
    use, printed = blocks_of(page)[0], page.partition("## ")[0]
    assert name in use.text
    assert re.search(r"^```(text|\{\.text)", printed, re.MULTILINE)


LOOKED_UP = {"help/coming-from.md", "help/troubleshooting.md", "reference/results.md", "reference/results-more.md"} | {
    "scaling/drift.md",
    "scaling/proofs.md",
    "callbacks/works-with.md",
}
"""Pages of tables and messages in which a reader searches; all others are read from top to bottom."""
TWO_SCREENS = 580
"""Words of prose and tables, without code and what it prints."""


def test_a_page_has_two_screens_at_most() -> None:
    words = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        prose = re.sub(r"```.*?```|<!--.*?-->|\]\([^)]*\)", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        words[path.relative_to(ROOT / "docs").as_posix()] = len(prose.split())
    assert {page: count for page, count in words.items() if count > TWO_SCREENS and page not in LOOKED_UP} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*/README.md")), ids=lambda path: path.parent.name)
def test_the_readme_of_a_recipe_has_two_screens_at_most(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = set(yaml.safe_dump(nav).replace("- ", " ").split())
    missing = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in missing if page not in listed] == []


NOTEBOOK = ROOT / "docs" / "notebooks" / "mnist.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, 4)
    client.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    tables = printed.count("best checkpoint")
    assert tables == 1  # Of the one that is not quiet.
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "Traceback" not in printed


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_no_docstring_has_a_tag_that_hides_the_rest_of_its_page() -> None:
    tags = {}
    for path in (
        path for package in ("recipes", "callbacks", "datamodules") for path in (ROOT / package).rglob("*.py")
    ):
        statements = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Expr)
        ]
        docstrings = [node.value.value for node in statements if isinstance(node.value, ast.Constant)]
        prose = [re.sub(r"`[^`]+`|>>> .*", "", str(text)) for text in docstrings]
        tags[path.relative_to(ROOT).as_posix()] = [tag for text in prose for tag in re.findall(r"<[a-z]+>", text)]
    assert {path: found for path, found in tags.items() if found} == {}


def test_no_line_of_the_notebook_is_cut_at_1300_pixels() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()]
    assert [line for line in lines if len(line) > 80] == []
