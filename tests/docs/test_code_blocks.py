"""Every code block of the documentation runs, page by page, from the first to the last."""

from pathlib import Path

import pytest

from docs.code_blocks import ROOT, blocks_of, move_link, page_text, run_page, shell_lines
from tests.support.ranks import run_ranks

PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if any(block.language in ("python", "bash") or block.title for block in blocks_of(page_text(path.read_text())))
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run_ranks(run_page, 1, str(PAGES[page]), str(tmp_path), timeout=800)


def test_no_line_of_a_code_block_is_cut_at_1300_pixels() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")]
    blocks = [(page, block) for page in pages for block in blocks_of(page.read_text())]
    lines = [
        f"{page.name}:{block.line}: {line}"
        for page, block in blocks
        for line in block.text.splitlines()
        if len(line) > 80
    ]
    assert not lines, "wrap them, or use ```{.text .wrap}"


PAGE = """
```python title="mine.py"
print("written")
```

<!-- parsed: needs four machines -->
```bash
python -m recipes.mnist --seed 2 \\
    --name two   # a comment's apostrophe
python mine.py 'a
  b'
```

- item

    ```python
    x = 1
    ```
"""


def test_blocks_are_read_with_their_marks() -> None:
    file, shell, code = blocks_of(PAGE)
    assert (file.language, file.title, file.line) == ("python", "mine.py", 2)
    assert (shell.how, shell.line) == ("parsed: needs four machines", 7)
    assert shell_lines(shell.text) == [
        ["python", "-m", "recipes.mnist", "--seed", "2", "--name", "two"],
        ["python", "mine.py", "a\n  b"],
    ]
    assert code.text == "x = 1\n"


LINKS = {
    "../../docs/recipes/resnet-data.md": "[text](resnet-data.md)",
    "../../docs/start.md#use-the-model": "[text](../start.md#use-the-model)",
    "../../docs/same-weights.svg": "text",
    "../mnist/README.md": "text",
}
"""What links of a recipe's README become on its page of the site."""


@pytest.mark.parametrize("target", LINKS)
def test_a_link_of_an_included_file_leads_to_its_site_page(target: str) -> None:
    assert move_link("text", target, "recipes/resnet/README.md", "recipes/resnet.md") == LINKS[target]


FAULTS = {
    "```python\n1 / 0\n```": "ZeroDivisionError",
    "```bash\npython -m recipes.mnist --sede 1\n```": "status 2",
    "<!-- parsed: x -->\n```bash\nsrun python -m recipes.mnist --sede 1\n```": "status 2",
    '```python title="a.py"\nraise ValueError("b")\n```\n\n```bash\npython a.py\n```': "ValueError",
}


@pytest.mark.parametrize("page", FAULTS)
def test_a_block_that_fails_is_named_with_its_line(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# Title\n\n{page}\n")
    with pytest.raises(AssertionError, match=rf"page\.md:\d+: (?s:.)*{FAULTS[page]}"):
        run_ranks(run_page, 1, str(tmp_path / "page.md"), str(tmp_path))
