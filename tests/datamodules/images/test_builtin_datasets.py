import gzip
import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits as digits_of_scikit_learn
from sklearn.model_selection import train_test_split

from datamodules.errors import UserError
from datamodules.images.builtin_datasets import bundled_digits, check_pair, load_digits, read_idx
from datamodules.images.labels import check_labels
from tests.datamodules.images.test_mnist import idx

IMAGES = torch.arange(5 * 28 * 28).remainder(251).to(torch.uint8).reshape(5, 28, 28)
LABELS = torch.tensor([3, 1, 4, 1, 5], dtype=torch.uint8)
PACKED = gzip.compress(idx(IMAGES), mtime=0)


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
def test_what_is_written_is_read(tmp_path: Path, compress):
    path = tmp_path / "file"
    for rows in (IMAGES, LABELS):
        path.write_bytes(compress(idx(rows)))
        found = read_idx(path, rows.dim())
        assert found.dtype == torch.uint8
        assert torch.equal(found, rows)
        found.add_(1)  # a tensor over read-only memory would crash here


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no idx file .* starts with nothing, expected 00000803"),
        (b"<html>404 not found</html>", "no idx file .* starts with 3c68746d, expected 00000803"),
        (idx(LABELS), "no idx file .* starts with 00000801, expected 00000803"),
        (idx(IMAGES)[:-1], "holds 3,919 bytes, and its header says 5 x 28 x 28"),
        (idx(IMAGES) + b"x", "holds 3,921 bytes, and its header says 5 x 28 x 28"),
        (idx(IMAGES[:0]), "holds 0 bytes, and its header says 0 x 28 x 28"),
        (PACKED[:-20], "is damaged: .*delete it and run again"),
        (PACKED[:100] + bytes([PACKED[100] ^ 0xFF]) + PACKED[101:], "is damaged"),
    ],
)
def test_a_damaged_file_is_rejected_by_name(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "train-images"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))} .*{reason}"):
        read_idx(path, 3)


@pytest.mark.parametrize(
    ("images", "labels", "reason"),
    [
        (IMAGES, LABELS[:4], "^images holds 5 images and labels 4 labels$"),
        (IMAGES[:, :27], LABELS, "^images holds images of 27 x 28, expected 28 x 28$"),
    ],
)
def test_images_that_contradict_their_labels_are_rejected(images, labels, reason: str):
    check_pair(IMAGES, LABELS, "images", "labels")
    with pytest.raises(UserError, match=reason):
        check_pair(images, labels, "images", "labels")


def test_labels_beyond_the_classes_are_rejected_by_row():
    reason = r"^label 4 at row 2 of labels is outside 0\.\.3 \(2 of 5 .*num_classes=6"
    with pytest.raises(UserError, match=reason):
        check_labels(LABELS.long(), 4, "labels")


def test_the_bundled_digits_are_those_of_scikit_learn():
    expected = digits_of_scikit_learn()
    images, labels = bundled_digits()
    assert images.dtype == "float64"
    assert (images * 16 == expected.images).all()
    assert (labels == expected.target).all()
    numbers = range(len(labels))
    train, test = train_test_split(numbers, test_size=0.2, random_state=0, stratify=expected.target)
    for part, rows in (("train", train), ("test", test)):
        assert load_digits()[part][1].tolist() == expected.target[rows].tolist()
        # The pixels of an image in its middle; bilinear resizing leaves the sum of none of them as it is.
        means = load_digits()[part][0].double().mean((1, 2))
        order = torch.from_numpy(expected.images[rows]).mean((1, 2))
        assert torch.corrcoef(torch.stack([means, order]))[0, 1] > 0.999
