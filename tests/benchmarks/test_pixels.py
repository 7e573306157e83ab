"""The consistency of image preprocessing, with a few images."""

from pathlib import Path

import pytest

from benchmarks.harness.pictures import write_pictures
from benchmarks.pixels import WAYS, compare


def test_every_way_gives_an_image_the_same_pixels(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    paths = write_pictures(tmp_path / "pictures", copies=1)[8:14]
    *rows, graph = compare(paths, 32, tmp_path)
    assert [row.way for row in rows] == list(WAYS)
    assert {(row.images, row.largest, row.differ, row.changed) for row in rows} == {(6, 0, 0, 0)}
    assert graph.way == "ONNX graph"
    assert (graph.images, graph.changed) == (6, 0)
    assert graph.largest <= 1
