"""Versions, source code and settings of a rank, to compare it with the other ranks."""

import hashlib
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

__all__ = ["code_version", "fingerprint"]

_PACKAGES = ("recipes", "callbacks", "datamodules")


def code_version(files: Iterable[Path]) -> str:
    """The first twelve digits of a SHA-256 of source files."""
    digest = hashlib.sha256()
    # From the name upwards: where a package lies may differ, and folders of one name hold files of one name.
    for path in sorted(dict.fromkeys(files), key=lambda path: path.parts[::-1]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _sources(classes: Iterable[type]) -> list[Path]:
    root = Path(__file__).parents[2]
    files = [path for name in _PACKAGES for path in (root / name).rglob("*.py")]
    modules = [sys.modules.get("__main__"), *(sys.modules.get(cls.__module__) for cls in classes)]
    named = [getattr(module, "__file__", None) for module in modules]
    return files + [path for name in named if name and (path := Path(name)).suffix == ".py" and path.is_file()]


def fingerprint(settings: dict[str, Any], classes: Iterable[type] = ()) -> dict[str, Any]:
    """Everything that has to be equal on all ranks, by name.

    Args:
        settings: of the experiment, as plain Python; folders may differ.
        classes: the user's classes, whose files belong to the code.
    """
    same = {k: v for k, v in settings.items() if not k.endswith("_dir")}
    return same | {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "the code": code_version(_sources(classes)),
    }
