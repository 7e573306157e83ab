"""A page of HTML in one file, without scripts and without references to other files, from sections."""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["Image", "Section", "render"]


class Image(NamedTuple):
    """A PNG as a data URI, with its description; a wide one may be scrolled on a narrow screen."""

    name: str
    uri: str
    wide: bool

    @classmethod
    def of_png(cls, name: str, data: bytes) -> "Image":
        """Describe the bytes of a PNG."""
        (width,) = struct.unpack(">I", data[16:20])
        return cls(name, f"data:image/png;base64,{base64.b64encode(data).decode()}", width > 900)


@dataclass
class Section:
    """A part of a page; what it has is shown in this order.

    Args:
        tiles: the main figures, large.
        code: in a fixed-width font.
        legend: names and colours of the curves in the drawings.
        drawings: as SVG, which is not escaped.
        columns: heads of the table's columns.
        rows: of the table, each with its name first.
        shares: name, text, and share from 0 to 1, which a bar shows.
        folded: the text to unfold all of this by.
    """

    heading: str = ""
    text: str = ""
    _: KW_ONLY
    tiles: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    legend: Sequence[tuple[str, str]] = ()
    drawings: Sequence[str] = ()
    images: Sequence[Image] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    shares: Sequence[tuple[str, str, float]] = ()
    folded: str = ""


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page, with all text escaped."""
    from jinja2 import Template

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return str(page.render(title=title, subtitle=subtitle, sections=sections))
