"""Classes have one order, however their images are found: numbers by value, other names as texts."""

import csv
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules import from_arrays
from datamodules.images.layouts import find_images

NAMES = {
    "numbers": (["10", "9", "2", "11", "1", "0"], ("0", "1", "2", "9", "10", "11")),
    "texts": (["class10", "class9", "b", "10", "2"], ("10", "2", "b", "class10", "class9")),
}


def _folders(names: list[str], place: Path) -> Path:
    for number, name in enumerate(names * 2):
        (place / "set" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 9, 3), 20 * number, np.uint8)).save(place / "set" / name / f"{number}.png")
    return place / "set"


def _table(names: list[str], place: Path) -> Path:
    paths = sorted(_folders(names, place).rglob("*.png"))
    with (place / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *((path, path.parent.name) for path in paths)])
    return place / "list.csv"


def _lines(names: list[str], place: Path) -> Path:
    rows = []
    for path in sorted(_folders(names, place).rglob("*.png")):
        label = path.parent.name
        rows.append(json.dumps({"path": str(path), "label": int(label) if label.isdigit() else label}))
    (place / "list.jsonl").write_text("\n".join(rows))
    return place / "list.jsonl"


def _archive(names: list[str], place: Path) -> Path:
    with zipfile.ZipFile(place / "set.zip", "w") as file:
        for path in _folders(names, place).rglob("*.png"):
            file.write(path, path.relative_to(place))
    return place / "set.zip"


def _arrays(labels: Any) -> tuple[str, ...]:
    images = np.random.default_rng(1).integers(0, 256, (len(labels), 9, 9, 3), dtype=np.uint8)
    return tuple(from_arrays({"train": (images, labels)}).classes)


WAYS: dict[str, Callable[[list[str], Path], Any]] = {
    "folders": lambda names, place: find_images(_folders(names, place)).classes,
    "archive": lambda names, place: find_images(_archive(names, place)).classes,
    "layout": lambda names, place: find_images(_folders(names, place), layout="{class}/*.png").classes,
    "table": lambda names, place: find_images(_table(names, place)).classes,
    "lines of JSON": lambda names, place: find_images(_lines(names, place)).classes,
    "arrays of texts": lambda names, _: _arrays(np.array(names * 2)),
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_classes_have_one_order_on_every_way(way: str, kind: str, tmp_path: Path):
    names, expected = NAMES[kind]
    assert tuple(WAYS[way](names, tmp_path)) == expected
