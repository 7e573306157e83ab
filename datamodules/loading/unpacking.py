"""Compressed files unpacked within bounds: a few megabytes of DEFLATE may stand for gigabytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from datamodules.errors import UserError

__all__ = ["MOST_PIXELS", "MOST_UNPACKED", "Readable", "bounded_blocks", "check_pixels", "refusal", "unpacked_limit"]

MOST_UNPACKED = 1 << 29
"""Bytes that a compressed file that is held at once unpacks to at most."""

MOST_PIXELS = 89_478_485
"""Of an image that is decoded: where Pillow begins to warn of a decompression bomb, a quarter of a gibibyte in RGB."""

_ALWAYS = 1 << 24  # Bytes.
_RATIO = 30  # Of text it is about 3, of MNIST's images 5; DEFLATE reaches 1,032.
_CHUNK = 1 << 20


def unpacked_limit(packed: int, most: int = MOST_UNPACKED, always: int = _ALWAYS, ratio: int = _RATIO) -> int:
    """How many bytes a compressed file may unpack to: in proportion to its size, within bounds.

    Args:
        packed: its size in bytes.
        most: never more than this.
        always: what any file may unpack to.
        ratio: unpacked bytes for each packed one.

    Example:
        >>> unpacked_limit(1_000), unpacked_limit(1_000_000), unpacked_limit(10**9)
        (16777216, 30000000, 536870912)
    """
    return min(most, max(always, ratio * packed))


def refusal(path: Path, packed: int, found: str, limit: int) -> UserError:
    """The error for a compressed file that unpacks to too much."""
    return UserError(
        f"{path} is refused: its {packed:,} bytes unpack to {found}, and the limit for a file of this size is"
        f" {limit:,}; if these are your data, unpack the file and pass what was in it"
    )


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """At most that many bytes; none at the end."""


def bounded_blocks(stream: Readable, path: Path, packed: int, limit: int) -> Iterator[bytes]:
    """What a decompressing stream yields, piece by piece and no further than its limit.

    Raises:
        UserError: there is more.
    """
    read = 0
    while piece := stream.read(min(_CHUNK, limit + 1 - read)):
        read += len(piece)
        if read > limit:
            raise refusal(path, packed, f"more than {limit:,}", limit)
        yield piece


def check_pixels(size: tuple[int, int], most: int = MOST_PIXELS) -> None:
    """Refuse to decode an image that takes too much memory, however small its file is.

    Args:
        size: width and height.
        most: pixels.

    Raises:
        ValueError: with the size, the limit and what to do.
    """
    width, height = size
    if width * height > most:
        raise ValueError(
            f"it has {width:,} x {height:,} pixels, and the limit is {most:,}; save it smaller, or split it into tiles"
        )
