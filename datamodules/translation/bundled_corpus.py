"""An artificial French-English corpus from a small grammar, for runs without a file."""

import lzma
from functools import lru_cache
from pathlib import Path

BUNDLED_TITLE = "bundled artificial French-English sentences"

_FILE = Path(__file__).with_name("bundled_pairs.txt.xz")


@lru_cache(maxsize=1)
def bundled_pairs() -> tuple[tuple[str, str], ...]:
    """French and English sentences, 5,428 pairs, always the same.

    Example:
        >>> len(bundled_pairs()), bundled_pairs()[0]
        (5428, ('La petite femme est fatiguée.', 'The small woman is tired.'))
    """
    lines = lzma.decompress(_FILE.read_bytes()).decode().splitlines()
    pairs = [line.split("\t") for line in lines]
    return tuple((french, english) for french, english in pairs)
