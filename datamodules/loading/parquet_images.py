"""Images in Parquet files, as Hugging Face's data sets are published: a file's bytes and a label in each row."""

import json
from pathlib import Path
from typing import Any

import torch

from datamodules.errors import UserError
from datamodules.loading.archives import Archive
from datamodules.loading.file_table import FileTable
from datamodules.loading.image_tree import PARTS, part_of

__all__ = ["parquet_files", "read_parquet"]

_IMAGES, _LABELS = {"image", "img"}, {"label", "labels", "fine_label"}


class _Images(Archive):
    """The bytes of images in memory, by number."""

    def __init__(self, file: Path, images: Any) -> None:
        super().__init__(str(file), torch.empty(0, 5), (0, file.stat().st_mtime_ns))
        self._images = images

    def size(self, row: int) -> int:
        """Bytes that a file holds."""
        return len(self.read(row))

    def read(self, row: int) -> bytes:
        """What a file holds."""
        image = self._images[row].as_py()
        return bytes(image["bytes"] if isinstance(image, dict) else image)


def parquet_files(place: Path) -> dict[str, list[Path]]:
    """The files of each part, by their names, in a folder that has no other than data; or a file alone."""
    if place.suffix == ".parquet":
        return {"train": [place]}
    found: dict[str, list[Path]] = {}
    if any(inner.is_dir() and inner.name != "data" and inner.name[0] != "." for inner in place.glob("*")):
        return found
    for file in sorted([*place.glob("*.parquet"), *place.glob("data/*.parquet")]):
        found.setdefault(part_of(file.name) or "train", []).append(file)
    return found


def read_parquet(files: dict[str, list[Path]]) -> tuple[dict[str, tuple[FileTable, list[tuple[int, str]]]], int]:
    """The images of each part, in memory, and the numbers and labels of their rows; and how many have no label.

    Raises:
        UserError: pyarrow is not installed, a file is damaged, or it has other columns.
    """
    parts = {part: (FileTable(), list[tuple[int, str]]()) for part in PARTS}
    unlabelled = 0
    for part, of_part in files.items():
        try:
            import pyarrow.parquet

            table = pyarrow.concat_tables(map(pyarrow.parquet.read_table, of_part))
        except ImportError as error:
            raise UserError(f"pyarrow reads {of_part[0]}, and is not installed: pip install pyarrow") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{' and '.join(map(str, of_part))} cannot be read: {error}") from error
        image, label = ([name for name in table.column_names if name in known] for known in (_IMAGES, _LABELS))
        if len(image) != 1 or len(label) != 1:
            found = ", ".join(table.column_names)
            raise UserError(f"{of_part[0]} has the columns {found}; expected one called image, and one called label")
        about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
        names = about.get("features", {}).get(label[0], {}).get("names")
        labels = table[label[0]].to_pylist()
        # -1 is how test sets are published without their labels.
        rows = [(row, names[y] if names else str(y)) for row, y in enumerate(labels) if y not in (None, -1)]
        unlabelled += len(labels) - len(rows)
        every = FileTable(
            map(str, range(len(labels))), f"{of_part[0].parent}/{part}/", _Images(of_part[0], table[image[0]])
        )
        parts[part] = (every.select(torch.tensor([row for row, _ in rows], dtype=torch.int64)), rows)
    return parts, unlabelled
