"""Where two files of sentences stop to belong together, when one has more lines than the other."""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["find_line_separator", "find_shift"]

_SEPARATORS = re.compile("[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_SURE = 6.0  # Standard errors. The best of all places is compared, which chance alone takes to 3 or 4.


def find_line_separator(lines: Sequence[str | None]) -> tuple[int, str] | None:
    """The first line, from 1, with a character at which other programs end a line, and that character's code point.

    Example:
        >>> find_line_separator(["un", "deux\\u2028trois"])
        (2, 'U+2028')
    """
    for number, line in enumerate(lines, 1):
        if line and (found := _SEPARATORS.search(line)):
            return number, f"U+{ord(found[0]):04X}"
    return None


def find_shift(shorter: Sequence[int], longer: Sequence[int]) -> int | None:
    """The first line, from 0, that only the longer of two files has, by the lengths of the sentences.

    Translations are about as long as their sources (Gale and Church, 1993). The surplus lines are taken to be in one
    place, and it is the place that leaves the smallest differences of logarithms of lengths.

    Args:
        shorter, longer: characters in each line of the two files.

    Returns:
        None where the lengths do not tell.
    """
    surplus, count = len(longer) - len(shorter), len(shorter)
    if not count or surplus < 1:
        return None
    a, b = (np.log1p(np.asarray(side, dtype=np.float64)) for side in (shorter, longer))
    a += b.mean() - a.mean()
    # Above 0 where a line fits the one after the surplus better than the one of its own number.
    gain: npt.NDArray[np.float64] = np.abs(a - b[:count]) - np.abs(a - b[surplus:])
    after = np.cumsum(gain[::-1])[::-1]  # Of a shift at each place: of all lines from there on.
    place = int(after.argmax())
    shifted = gain[place:]
    sure = _SURE * float(shifted.std()) * len(shifted) ** 0.5
    return place if len(shifted) > 9 and after[place] > sure else None
