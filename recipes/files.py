"""Small files of a run, which are either complete or as they were before."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callbacks.lib.writing import whole_or_nothing

__all__ = ["write_rows", "write_text"]

# A file's name in another encoding is written as its bytes.
_ERRORS = "surrogateescape"


def write_text(path: Path, text: str) -> None:
    """Write a file of text.

    Raises:
        OSError: the file is as it was before.
    """
    with whole_or_nothing(path) as part:
        part.write_text(text, encoding="utf-8", errors=_ERRORS)


def write_rows(
    path: Path, rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], columns: Sequence[str] | None = None
) -> None:
    """Write JSON, CSV, or the first column as lines of text, by the file's suffix.

    Args:
        columns: of a CSV or text file; by default the keys of the first row.

    Raises:
        OSError: the file is as it was before.
    """
    table = [rows] if isinstance(rows, Mapping) else rows
    if path.suffix == ".txt" and columns:
        # A line for each row, whatever its text holds: other programs compare the files line by line.
        write_text(path, "".join(" ".join(str(row[columns[0]]).split("\n")) + "\n" for row in table))
        return
    if path.suffix != ".csv":
        write_text(path, json.dumps(rows, indent=2, ensure_ascii=False, default=str) + "\n")
        return
    with whole_or_nothing(path) as part, part.open("w", newline="", encoding="utf-8", errors=_ERRORS) as file:
        writer = csv.DictWriter(file, fieldnames=columns or list(table[0]))
        writer.writeheader()
        writer.writerows(table)
