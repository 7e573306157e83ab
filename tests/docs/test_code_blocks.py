"""Every code block of the documentation runs, page by page, from the first to the last."""

from pathlib import Path

import pytest

from docs.code_blocks import ROOT, blocks_of, page_text, pictures_of, run_page, shell_lines
from tests.support.ranks import run_ranks

PAGES = {
    str(path.relative_to(ROOT / "docs")): path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if any(block.language in ("python", "bash") or block.title for block in blocks_of(page_text(path.read_text())))
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run_ranks(run_page, 1, str(PAGES[page]), str(tmp_path), timeout=280)


PAGE = """
```python title="mine.py"
print("written")
```

Text.

```bash
python -m recipes.mnist --seed 2 \\
    --name two   # a comment
python mine.py
```

<!-- parsed: needs four machines -->
```bash
torchrun --nnodes 4 -m recipes.mnist --seed 1
```

- item

    <!-- as it is -->
    ```python
    x = 1
    plt.savefig("one.png")
    ```
"""


def test_blocks_have_their_titles_comments_and_indents() -> None:
    blocks = blocks_of(PAGE)
    assert [(block.language, block.title, block.how) for block in blocks] == [
        ("python", "mine.py", ""),
        ("bash", None, ""),
        ("bash", None, "parsed: needs four machines"),
        ("python", None, "as it is"),
    ]
    assert [block.line for block in blocks] == [2, 8, 15, 22]
    assert shell_lines(blocks[1].text) == [
        ["python", "-m", "recipes.mnist", "--seed", "2", "--name", "two"],
        ["python", "mine.py"],
    ]
    assert blocks[3].text.startswith("x = 1\n")
    assert pictures_of(PAGE) == ["one.png"]


FAULTS = {
    "```python\n1 / 0\n```": "ZeroDivisionError",
    "```bash\npython -m recipes.mnist --sede 1\n```": "status 2",
    "<!-- parsed: x -->\n```bash\nsrun python -m recipes.mnist --sede 1\n```": "sede",
    "```bash\npython -m recipes.mnist test --ckpt missing.ckpt\n```": "status 2",
    '```python title="a.py"\nraise ValueError("b")\n```\n\n```bash\npython a.py\n```': "ValueError",
}


@pytest.mark.parametrize("page", FAULTS)
def test_a_block_that_fails_is_named_with_its_line(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# Title\n\n{page}\n")
    with pytest.raises(AssertionError, match=rf"page\.md:\d+: (?s:.)*{FAULTS[page]}"):
        run_ranks(run_page, 1, str(tmp_path / "page.md"), str(tmp_path))
