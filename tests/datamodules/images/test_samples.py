"""Arrays as people have them in Python."""

from typing import Any

import numpy as np
import pytest
import torch

from datamodules import UserError
from datamodules.images.arrays import from_arrays, from_samples, read_npz
from datamodules.images.given_images import given_images

IMAGES = np.random.default_rng(1).integers(0, 256, (12, 28, 28), dtype=np.uint8)
LABELS = np.arange(12) % 3


class Sparse:
    """What a matrix of SciPy has."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def toarray(self) -> np.ndarray:
        return self.values


ROWS = torch.from_numpy(IMAGES.reshape(12, 784) / 255)
FORMS: dict[str, Any] = {
    "sparse": ROWS.to_sparse(),
    "sparse rows": ROWS.to_sparse_csr(),
    "of SciPy": Sparse(ROWS.numpy()),
    "rows": ROWS,
    "rows with a channel": ROWS.view(12, 1, 784),
    "with a channel in front": torch.from_numpy(IMAGES)[:, None],
}


@pytest.mark.parametrize("form", FORMS)
def test_images_of_any_form_are_the_same(form: str):
    source = from_samples((FORMS[form], LABELS))
    assert np.array_equal(source.parts["train"].images.pixels, IMAGES)


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        (np.ma.masked_array(LABELS, mask=LABELS == 2), 8),
        (np.ma.masked_array(np.array(list("abc"))[LABELS], mask=LABELS == 2), 8),
        (torch.tensor(LABELS).bfloat16(), 12),
        (torch.tensor(np.where(LABELS == 2, -100, LABELS)), 8),
    ],
)
def test_masked_labels_are_left_out_and_counted(labels: Any, kept: int):
    source = from_samples((IMAGES, labels))
    assert len(source.parts["train"].labels) == kept
    assert source.left_out == ({"without a label": 12 - kept} if kept < 12 else {})


def test_quantised_tensors_and_masked_pixels_are_refused_with_what_to_pass():
    quantised = torch.quantize_per_tensor(ROWS.float(), 1 / 255, 0, torch.quint8)
    with pytest.raises(UserError, match=r"the train images are a quantised tensor; pass its bytes, as .*int_repr"):
        from_samples((quantised, LABELS))
    with pytest.raises(UserError, match=r"the train images have masked pixels; fill them"):
        from_samples((np.ma.masked_array(IMAGES, mask=IMAGES > 250), LABELS))


def test_the_pairs_of_keras_are_training_and_test():
    source = from_samples(((IMAGES, LABELS), (IMAGES[:6], LABELS[:6])))
    assert {part: len(labels) for part, (_, labels) in source.parts.items()} == {"train": 12, "test": 6}
    # Two images and their labels are none.
    assert len(from_samples(([IMAGES[0], IMAGES[1]], [0, 1])).parts["train"].labels) == 2


def test_arrays_of_a_file_that_are_not_used_are_named(tmp_path):
    path = tmp_path / "x.npz"
    others = {"valid_images": IMAGES[:6], "valid_labels": LABELS[:6], "extra_images": IMAGES, "weights": LABELS}
    np.savez(path, train_images=IMAGES, train_labels=LABELS, **others)
    source = read_npz(path)
    assert {part: len(labels) for part, (_, labels) in source.parts.items()} == {"train": 12, "val": 6}
    assert source.notes == [f"{path}: not used: extra_images, weights"]


@pytest.mark.parametrize("shape", [(12, 784), (12, 1, 784), (9, 64)])
def test_rows_of_pixels_are_not_predicted_as_one_image(shape: tuple[int, ...]):
    side = 28 if shape[-1] == 784 else 8
    with pytest.raises(UserError, match=rf"{shape[0]} rows of {side} x {side} pixels.*reshape\(-1, {side}, {side}\)"):
        given_images(np.zeros(shape, np.uint8), colour=False)
    assert len(given_images(np.zeros((28, 28), np.uint8), colour=False)) == 1
    assert len(given_images(np.zeros((30, 50), np.uint8), colour=False)) == 1
    assert from_arrays({"train": (IMAGES, LABELS)}).classes == ("0", "1", "2")
