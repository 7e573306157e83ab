"""Releases of Lightning that must not be imported: malicious code was published in them, and runs at the import."""

import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["refuse_compromised_releases"]

_COMPROMISED = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
"""GHSA-w37p-236h-pfx3, CVE-2026-44484."""


def refuse_compromised_releases() -> None:
    """Refuse to go on where one of them is installed, which its metadata tell without an import.

    While ``python -m`` locates its module, which `sys.argv` shows, the error is printed and the process ends with
    status 2.

    Raises:
        ImportError: with what to do.
    """
    for name, releases in _COMPROMISED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found in releases:
            message = (
                f"{name} {found} is a compromised release that steals credentials when it is imported"
                f" (GHSA-w37p-236h-pfx3); it was not imported now: run pip uninstall {name}, then pip install"
                " 'lightning>=2.6.6', and replace the passwords and tokens of this machine if it was imported before"
            )
            if sys.argv[:1] == ["-m"]:
                print(f"error: {message}", file=sys.stderr)  # noqa: T201
                sys.exit(2)
            raise ImportError(message, name=name)
