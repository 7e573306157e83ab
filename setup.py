"""The description and the links of the package, which depend on its address; the rest is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

_ROOT = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")
_PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}


def setting(name: str) -> str:
    """A text of `recipes/version.py`, which is read and not imported."""
    found = re.search(rf'^{name} = "(.*)"$', (_ROOT / "recipes" / "version.py").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"recipes/version.py has no line {name} = ...")
    return found[1]


def description(text: str, address: str) -> str:
    """The README with links that hold outside of the repository; without an address it is text alone."""
    return _LINK.sub(rf"[\1]({address}/blob/main/\2)" if address else r"\1", text)


if __name__ == "__main__":
    address = setting("ADDRESS")
    setup(
        long_description=description((_ROOT / "README.md").read_text(), address),
        long_description_content_type="text/markdown",
        project_urls={name: f"{address}/blob/main/{page}" for name, page in _PAGES.items()} if address else {},
    )
