"""Arrays as people have them in Python."""

from typing import Any

import numpy as np
import pytest
import torch

from datamodules import UserError
from datamodules.images.arrays import collect_images, from_arrays, from_samples, read_npz

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
    "floats": torch.from_numpy(IMAGES / 255),
    "a channel in front": torch.from_numpy(IMAGES)[:, None],
    "a channel behind": IMAGES[..., None],
}


@pytest.mark.parametrize("form", FORMS)
def test_images_of_one_shape_rule_are_the_same(form: str):
    source = from_samples((FORMS[form], LABELS))
    assert np.array_equal(source.parts["train"].images.pixels, IMAGES)


REJECTED: dict[str, tuple[Any, Any, str]] = {
    "sparse": (ROWS.to_sparse(), LABELS, r"the train images are a sparse tensor; pass to_dense\(\) of it"),
    "of SciPy": (Sparse(ROWS.numpy()), LABELS, r"the train images are a sparse matrix; pass toarray\(\) of it"),
    "rows": (ROWS, LABELS, r"of shape \(12, 784\), expected .*; pass images.reshape\(-1, 28, 28\)"),
    "two places of channels": (np.zeros((12, 3, 9, 4), np.uint8), LABELS, r"of shape \(12, 3, 9, 4\), expected"),
    "masked pixels": (np.ma.masked_array(IMAGES, mask=IMAGES > 250), LABELS, "the train images are masked; fill them"),
    "masked labels": (IMAGES, np.ma.masked_array(LABELS, mask=LABELS == 2), "the train labels are masked; fill them"),
    "float labels": (IMAGES, LABELS.astype(float), r"labels are float64, expected .*: pass labels.astype\(int\)"),
    "of Keras": ((IMAGES, LABELS), (IMAGES, LABELS), "found two pairs; pass {'train': data\\[0\\], 'test': data"),
}


@pytest.mark.parametrize("form", REJECTED)
def test_other_forms_are_rejected_with_what_to_pass(form: str):
    images, labels, reason = REJECTED[form]
    with pytest.raises(UserError, match=reason):
        from_samples((images, labels))


def test_quantized_tensors_are_rejected_with_what_to_pass():
    quantized = torch.quantize_per_tensor(ROWS.float(), 1 / 255, 0, torch.quint8)
    with pytest.raises(UserError, match=r"the train images are a quantized tensor; pass its bytes, as .*int_repr"):
        from_samples((quantized, LABELS))


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        (np.where(LABELS == 2, -100, LABELS), 8),
        (torch.tensor(np.where(LABELS == 2, -100, LABELS)), 8),
        (np.array(["a", "b", ""])[LABELS], 8),
        (LABELS[:, None], 12),
    ],
)
def test_missing_labels_are_counted_as_left_out(labels: Any, kept: int):
    source = from_samples((IMAGES, labels))
    assert len(source.parts["train"].labels) == kept
    assert source.left_out == ({"without a label": 12 - kept} if kept < 12 else {})


def test_two_images_with_two_labels_are_one_set():
    assert len(from_samples(([IMAGES[0], IMAGES[1]], [0, 1])).parts["train"].labels) == 2


def test_a_part_that_lacks_a_class_says_so():
    for labels in (LABELS, np.array(list("abc"))[LABELS]):
        source = from_samples({"train": (IMAGES, labels), "val": (IMAGES[:2], labels[:2])})
        assert source.notes == [f"val has no image of {labels[2]}: scores say nothing about them"]


def test_the_printed_names_of_arrays_are_read(tmp_path):
    path = tmp_path / "x.npz"
    others = {"valid_images": IMAGES[:6], "valid_labels": LABELS[:6], "extra": IMAGES, "weights": LABELS}
    forms = {"images": others | {"train_images": IMAGES, "train_labels": LABELS}}
    forms["x"] = {"x_train": IMAGES, "y_train": LABELS, "x_val": IMAGES[:6], "y_val": LABELS[:6]}
    for arrays in forms.values():
        np.savez(path, **arrays)
        with pytest.raises(UserError, match="expected images and labels, .*: pass columns='images=") as error:
            read_npz(path)
        source = read_npz(path, str(error.value).partition("columns=")[2].strip("'"))
        assert {part: len(labels) for part, (_, labels) in source.parts.items()} == {"train": 12, "val": 6}
        assert source.notes == ([f"{path}: not used: extra, weights"] if "extra" in arrays else [])


@pytest.mark.parametrize("shape", [(12, 784), (9, 64)])
def test_rows_of_pixels_are_not_predicted_as_one_image(shape: tuple[int, ...]):
    side = 28 if shape[-1] == 784 else 8
    with pytest.raises(UserError, match=rf"{shape[0]} rows of {side} x {side} pixels.*reshape\(-1, {side}, {side}\)"):
        collect_images(np.zeros(shape, np.uint8), color=False)
    assert len(collect_images(np.zeros((28, 28), np.uint8), color=False)) == 1
    assert len(collect_images(np.zeros((30, 50), np.uint8), color=False)) == 1
    assert from_arrays({"train": (IMAGES, LABELS)}).classes == ("0", "1", "2")
