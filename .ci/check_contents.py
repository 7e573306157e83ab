"""Ends with status 1 where a wheel or an sdist lacks a file of the packages or holds another: ``FILE...``."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGES = ("callbacks", "datamodules", "recipes")
SOURCES = ("tests", "docs", "benchmarks", ".ci")
"""What an sdist holds besides, in files that git has."""
ROOT = Path(__file__).parents[1]


def names_in(archive: Path) -> set[str]:
    """Paths in the archive; those of an sdist without its top folder."""
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as tar:
        return {member.name.partition("/")[2] for member in tar if member.isfile()}


def main() -> None:
    package = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".html", ".json", ".npz", ".py", ".pyi", ".xz") or path.name == "py.typed"
    }
    tracked = set(subprocess.check_output(["git", "ls-files", *SOURCES], cwd=ROOT, text=True).splitlines())
    for archive in map(Path, sys.argv[1:]):
        names = names_in(archive)
        wanted = package | tracked if archive.suffix == ".gz" else package
        if missing := wanted - names:
            sys.exit(f"{archive.name} lacks {sorted(missing)}")
        if foreign := {name for name in names - wanted if name.endswith(".py") and name != "setup.py"}:
            sys.exit(f"{archive.name} holds {sorted(foreign)}")


if __name__ == "__main__":
    main()
