"""The pictures of the site, and the script that takes them."""

import re

from docs.code_blocks import ROOT
from docs.pictures import FOLDER, last_words


def test_a_line_that_is_written_over_shows_its_last_words() -> None:
    output = "a\r\nepoch 1\repoch 2\x1b[K\r\n\x1b[1mdone\x1b[0m\r\n"
    assert last_words(output) == "a\nepoch 2\ndone\n"


def test_pages_show_each_picture_in_both_color_schemes() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w-]+)\.png", page.read_text())}
    assert shown == {path.stem for path in FOLDER.glob("*.png")}
    assert {name.replace("-light", "-dark") for name in shown} == {name for name in shown if name.endswith("-dark")}
