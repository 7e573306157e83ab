"""Photographs of telephones in HEIC, which Pillow reads with the package pillow-heif."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["HEIC", "prepare_to_read", "reads_heic", "why_no_image"]

HEIC = (".heic", ".heif", ".hif")
"""The endings of such files."""

_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


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


def why_no_image(content: bytes) -> str:
    """Why Pillow finds no image in a file's content."""
    if content[4:8] == b"ftyp" and content[8:12] in _BRANDS:
        return "its content is HEIC: " + ("name it .heic" if reads_heic() else "pip install pillow-heif to read it")
    return "its content is not an image" if content else "the file is empty"
