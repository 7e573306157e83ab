"""Photographs of telephones in HEIC, which Pillow reads with the package pillow-heif."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["HEIC", "prepare_to_read", "reads_heic"]

HEIC = (".heic", ".heif", ".hif")
"""The endings of such files."""


@cache
def reads_heic() -> bool:
    """Whether pillow-heif is installed."""
    return find_spec("pillow_heif") is not None


@cache
def _register() -> None:
    import pillow_heif

    pillow_heif.register_heif_opener()


def prepare_to_read(file: str | Path) -> None:
    """Make Pillow read HEIC, before it opens a file of this name."""
    if Path(file).suffix.lower() in HEIC and reads_heic():
        _register()
