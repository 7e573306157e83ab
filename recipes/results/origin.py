"""Where a run's code comes from: the versions of what it uses, and its commit."""

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from recipes.version import __version__

__all__ = ["commit_of", "versions"]


def versions() -> dict[str, str]:
    """The versions of this package, Python, torch and Lightning."""
    return {
        "lightning-recipes": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "lightning": pl.__version__,
    }


def _git(folder: Path, *args: str) -> str | None:
    """What a command of git prints; None where it fails or there is no git."""
    command = ["git", "-C", str(folder), *args]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip()


def commit_of(file: Path) -> str | None:
    """The commit of the git repository that holds a file of source code, with ``-dirty`` where files differ from it.

    None where the file is in none, such as in a folder of installed packages.
    """
    folder = file.resolve().parent
    if _git(folder, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changed else commit
