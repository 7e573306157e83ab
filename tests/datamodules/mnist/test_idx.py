import gzip
import re
import struct
from pathlib import Path

import pytest
import torch

from datamodules.errors import UserError
from datamodules.mnist.idx import check_images_and_labels, read_idx


def _idx(rows: torch.Tensor, sizes: tuple[int, ...] | None = None) -> bytes:
    sizes = tuple(rows.shape) if sizes is None else sizes
    return struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes) + bytes(rows.flatten().tolist())


IMAGES = torch.arange(5 * 28 * 28).remainder(251).to(torch.uint8).reshape(5, 28, 28)
LABELS = torch.tensor([3, 1, 4, 1, 5], dtype=torch.uint8)


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
def test_what_is_written_is_read(tmp_path: Path, compress):
    path = tmp_path / "file"
    for rows in (IMAGES, LABELS):
        path.write_bytes(compress(_idx(rows)))
        found = read_idx(path, rows.dim())
        assert found.dtype == torch.uint8
        assert torch.equal(found, rows)
        found.add_(1)  # a tensor over read-only memory would crash here


def _flipped_inside(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no idx file .* starts with nothing, expected 00000803"),
        (b"\0\0\x08", "no idx file"),
        (b"<html>404 not found</html>", "no idx file .* starts with 3c68746d, expected 00000803"),
        (_idx(LABELS), "holds labels, expected images; are two files swapped"),
        (b"\0\0\x0d\x03" + bytes(12), "starts with 00000d03, expected 00000803"),
        (_idx(IMAGES)[:-1], r"has a header of 5 rows of 784 bytes, 3,920 in all; found 3,919: it ends in row 4"),
        (_idx(IMAGES)[: 16 + 784 + 10], r"found 794: it ends in row 1"),
        (_idx(IMAGES)[:16], r"found 0: it ends in row 0"),
        (_idx(IMAGES) + b"x", "found 3,921: there is more after the last row"),
        (_idx(IMAGES[:0]), "is empty: its header says 0 x 28 x 28"),
        (_idx(IMAGES[:0], (5, 0, 28)), "is empty: its header says 5 x 0 x 28"),
        (_idx(IMAGES, (2**32 - 1, 2**32 - 1, 2**32 - 1)), "has a header of 4,294,967,295 rows"),
        (gzip.compress(_idx(IMAGES), mtime=0)[:-20], "is damaged: .*delete it and run again"),
        (gzip.compress(_idx(IMAGES), mtime=0)[:5], "is damaged"),
        (_flipped_inside(gzip.compress(_idx(IMAGES), mtime=0)), "is damaged"),
        (gzip.compress(_idx(IMAGES), mtime=0) + b"rubbish", "is damaged"),
        (gzip.compress(_idx(IMAGES)[:-1], mtime=0), "it ends in row 4"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_the_place_and_the_reason(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "train-images"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))} .*{reason}"):
        read_idx(path, 3)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_idx(tmp_path / "nothing", 3)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_idx(tmp_path, 3)


@pytest.mark.parametrize("num_classes", [6, 10, 255, 256, 257, 1000])
def test_good_images_and_labels_pass(num_classes: int):
    check_images_and_labels(IMAGES, LABELS, num_classes, "images", "labels")


@pytest.mark.parametrize(
    ("images", "labels", "num_classes", "reason"),
    [
        (IMAGES, LABELS[:4], 10, "^images holds 5 images and labels 4 labels$"),
        (IMAGES, LABELS, 5, r"^label 5 at row 4 of labels is outside 0\.\.4 \(1 of 5 labels are\).*num_classes=6"),
        (IMAGES, LABELS, 4, r"^label 4 at row 2 of labels is outside 0\.\.3 \(2 of 5 .*num_classes=6"),
        (IMAGES[:, :27], LABELS, 10, "^images holds images of 27 x 28, expected 28 x 28$"),
    ],
)
def test_images_and_labels_that_contradict_are_refused(images, labels, num_classes: int, reason: str):
    with pytest.raises(UserError, match=reason):
        check_images_and_labels(images, labels, num_classes, "images", "labels")
