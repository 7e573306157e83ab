"""What a release needs: a description that holds outside of the repository, a lock, no promise of what is not there."""

import ast
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recipes import version
from tests.package.test_documents import DOCUMENTS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_LINK = re.compile(r"\]\(([^)]+)\)")


def _locked() -> dict[str, list[str]]:
    versions: dict[str, list[str]] = {}
    for name, number in re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        versions.setdefault(canonicalize_name(name), []).append(number)
    return versions


@pytest.mark.parametrize("address", ["", "https://example.org/project"])
def test_links_of_the_description_hold_outside_the_repository(address: str) -> None:
    text = (ROOT / "README.md").read_text()
    description = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["description"]
    links = _LINK.findall(description(text, address))
    relative = [link for link in _LINK.findall(text) if not link.startswith(("http", "#"))]
    assert len(relative) > 10
    if address:
        assert [f"{address}/blob/main/{link}" for link in relative] == links
    assert all(link.startswith(("http", "#")) for link in links)


def test_setup_reads_the_address_of_the_version_file() -> None:
    assert runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["setting"]("ADDRESS") == version.ADDRESS


def test_pages_install_what_exists() -> None:
    if version.RELEASED:
        pytest.skip("`pip install lightning-recipes` finds a release")
    pages = [*DOCUMENTS, *(ROOT / "docs").rglob("*.ipynb"), *(ROOT / "recipes").rglob("*.py")]
    promise = re.compile(r"pip install (?!-e )[^\n]*lightning-recipes")
    wrong = [path for path in pages if promise.search(path.read_text()) and path != ROOT / "recipes" / "version.py"]
    assert wrong == []


def test_every_dependency_is_locked_within_its_bounds() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(text for name in extras if name != "peers" for text in extras[name])]
    locked = _locked()
    for requirement in map(Requirement, wanted):
        if requirement.name != PROJECT["name"]:
            versions = locked[canonicalize_name(requirement.name)]
            assert all(number in requirement.specifier for number in versions), requirement


def test_the_table_of_contributing_names_every_dependency() -> None:
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for part in extras.values() for text in part)]
    names = {Requirement(text).name for text in texts} - {PROJECT["name"]}
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2].partition("\n## ")[0]
    assert names == set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE))))


def test_classifiers_name_the_tested_versions_of_python() -> None:
    minors = [int(minor) for minor in re.findall(r":: 3\.(\d+)", " ".join(PROJECT["classifiers"]))]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert PROJECT["requires-python"] == f">=3.{minors[0]}"


def test_types_are_exported_to_users() -> None:
    for package in ("callbacks", "datamodules", "recipes"):
        assert (ROOT / package / "py.typed").exists()
        ast.parse((ROOT / package / "__init__.pyi").read_text())
