"""Reads a page of HTML as a browser does, and rejects one that is not well formed or refers to other files."""

import re
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["Page", "read_page"]

_VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """What a page shows: its text without styles, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        assert text.startswith("<!doctype html>")
        assert not re.search(r"@import|url\((?!#)", text), "a reference in a style"
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object", "base"), tag
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"a script in {tag}"
            in_page = name == "src" and str(value).startswith("data:image/")
            is_file_of_run = tag == "a" and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(value)) is not None
            assert in_page or is_file_of_run or name not in ("src", "href", "xlink:href"), f"a reference to {value}"
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a beginning"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def read_page(path: Path) -> Page:
    """Read a page."""
    return Page(path.read_text(encoding="utf-8"))
