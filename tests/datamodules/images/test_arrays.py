"""Images of your own in the MNIST recipe."""

import logging
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from datamodules import MNISTDataModule, UserError
from datamodules.images.arrays import collect_images, from_arrays
from datamodules.images.builtin_datasets import load_digits
from datamodules.images.layouts import find_images
from datamodules.images.source import Source
from datamodules.images.tensor_pipeline import read_digits

Digits = tuple[np.ndarray, np.ndarray]
PLAIN: dict[str, Any] = {"shift": 0, "rotation": 0, "scale": 0, "batch_size": 32}


@pytest.fixture(scope="module")
def digits() -> Digits:
    """120 of the bundled digits: images of 28 x 28 bytes, and labels."""
    images, labels = load_digits()["train"]
    return images[:120].numpy(), labels[:120].numpy()


def write_tree(folder: Path, images: np.ndarray, labels: np.ndarray, suffix: str = ".png") -> None:
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:03}{suffix}")


def _read(tree: Source, invert: bool = False) -> tuple[Tensor, Tensor]:
    """The images to train on in MNIST's form, and their labels."""
    images, labels = tree.parts["train"]
    return read_digits(images, invert).pixels, labels


def _given(images: Any, labels: Any, test: tuple[Any, Any] | None = None, **options: Any) -> MNISTDataModule:
    data = MNISTDataModule(**options)
    data.set_samples({"train": (images, labels), "test": test})
    return data


def _set_up(data: MNISTDataModule) -> dict[str, set[tuple[bytes, int]]]:
    """The images and labels that each part holds."""
    data.setup("fit")
    data.setup("test")
    held = {}
    for name, part in data._parts.items():
        held[name] = {(part.images[row].numpy().tobytes(), int(part.labels[row])) for row in part.rows}
    return held


def test_the_same_images_from_any_source_are_the_same_set(tmp_path: Path, digits: Digits):
    images, labels = digits
    order = np.argsort(labels, kind="stable")  # That of a folder of class folders.
    images, labels = images[order], labels[order]
    write_tree(tmp_path / "tree", images, labels)
    np.savez_compressed(tmp_path / "set.npz", images=images, labels=labels)
    found = [
        MNISTDataModule(data_dir=str(tmp_path / "tree"), **PLAIN),
        MNISTDataModule(data_dir=str(tmp_path / "set.npz"), **PLAIN),
        _given(images, labels, **PLAIN),
        _given(torch.from_numpy(images), torch.from_numpy(labels), **PLAIN),
        _given(images[..., None] / 255, list(map(str, labels)), **PLAIN),
    ]
    batches: list[list[tuple[Tensor, Tensor]]] = []
    for data in found:
        held = _set_up(data)
        assert data.dataset == "custom"
        assert data.class_names == tuple("0123456789")
        assert sum(data.sizes.values()) == 120
        assert not held["train"] & held["val"]
        assert not held["train"] & held["test"]
        loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
        batches.append([batch for loader in loaders for batch in loader])
    assert [data.title for data in found[:3]] == ["tree", "set.npz", "arrays"]
    for others in batches[1:]:
        assert all(map(torch.equal, chain(*batches[0]), chain(*others)))
        assert len(others) == len(batches[0])
    expected = {(pixels.tobytes(), int(label)) for pixels, label in zip(images, labels, strict=True)}
    assert set.union(*held.values()) == expected, "light on dark at 28 x 28, the images stay as they are"


def test_only_missing_parts_are_held_out(tmp_path: Path, digits: Digits):
    images, labels = digits
    write_tree(tmp_path / "train", images[:60], labels[:60])
    write_tree(tmp_path / "test", images[60:], labels[60:])
    data = MNISTDataModule(data_dir=str(tmp_path), val_fraction=0.2, **PLAIN)
    held = _set_up(data)
    assert held["test"] == {(pixels.tobytes(), int(label)) for pixels, label in zip(images[60:], labels[60:])}
    assert len(held["train"]) + len(held["val"]) == 60
    assert not held["train"] & held["val"]
    parts = {"images": images[:60], "labels": labels[:60], "test_images": images[60:], "test_labels": labels[60:]}
    np.savez(tmp_path / "ours.npz", **parts)
    medical = {"train_images": images[:50], "train_labels": labels[:50, None], "val_images": images[50:60]}
    medical |= {"val_labels": labels[50:60, None], "test_images": images[60:], "test_labels": labels[60:]}
    np.savez(tmp_path / "medical.npz", **medical)
    sizes = {}
    for name, columns in (("ours", None), ("medical", "images=train_images,labels=train_labels")):
        data = MNISTDataModule(data_dir=str(tmp_path / f"{name}.npz"), columns=columns, val_fraction=0, **PLAIN)
        _set_up(data)
        sizes[name] = data.sizes
    assert sizes["ours"] == {"train": 60, "test": 60}
    assert sizes["medical"] == {"train": 50, "val": 10, "test": 60}
    assert data.validates


def test_images_of_any_size_take_mnists_form_as_in_predict(tmp_path: Path, digits: Digits):
    images, labels = digits
    large = [Image.fromarray(255 - pixels).resize((70, 90)) for pixels in images[:20]]
    for number, image in enumerate(large):
        (tmp_path / str(number % 2)).mkdir(exist_ok=True)
        image.convert("RGB" if number % 3 else "L").save(tmp_path / str(number % 2) / f"{number:02}.png")
    found, found_labels = _read(find_images(tmp_path), invert=True)
    files = [number for parity in (0, 1) for number in range(parity, 20, 2)]
    predicted = read_digits(collect_images([large[number] for number in files], color=False), invert=True)
    assert torch.equal(found, predicted.pixels)
    assert found_labels.tolist() == [0] * 10 + [1] * 10
    assert found[:, 0].max() < 64
    dark, _ = _read(from_arrays({"train": (255 - images, labels)}, "dark"), invert=True)
    assert np.array_equal(dark.numpy(), images)
    light, _ = _read(from_arrays({"train": (images, labels)}, "light"))
    assert np.array_equal(light.numpy(), images)
    channels, _ = _read(from_arrays({"train": (np.stack([images] * 3, 1), labels)}, "color"))
    assert np.array_equal(channels.numpy(), images)


def test_small_images_are_enlarged(digits: Digits):
    images = np.stack([np.array(Image.fromarray(pixels).crop((4, 4, 24, 24)).resize((8, 8))) for pixels in digits[0]])
    for given, invert in ((images, False), (255 - images, True)):
        found, _ = _read(from_arrays({"train": (given, digits[1])}, "small"), invert)
        assert found[:, :4].max() == found[:, :, 24:].max() == 0
        assert (found.float() - torch.from_numpy(digits[0]).float()).abs().mean() < 20
        predicted = read_digits(collect_images(given, color=False), invert)
        assert torch.equal(predicted.pixels, found), "predict sees what was trained on"


def test_a_checkpoint_keeps_whether_its_images_are_inverted(tmp_path: Path, digits: Digits, caplog: Any):
    images, labels = digits
    Image.fromarray(255 - images[0]).save(tmp_path / "dark.png")
    states = {}
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        for invert in (None, True):
            data = _given(255 - images, labels, invert=invert, **PLAIN)
            data.setup("fit")
            states[invert] = data.state_dict()
    (note,) = (record.getMessage() for record in caplog.records)
    assert note.startswith("note: the border of most train images is light, 255 of 255; pass invert=True if light and")
    assert [state["invert"] for state in states.values()] == [False, True]
    assert states[True]["borders"][0] == 0.0

    def predicted(state: dict[str, Any], **options: Any) -> tuple[Tensor, list[str]]:
        caplog.clear()
        data = MNISTDataModule(predict_inputs=[str(tmp_path / "dark.png")], **options)
        data.load_state_dict(state)
        data.setup("predict")
        with caplog.at_level(logging.WARNING, "lightning_recipes"):
            (batch,) = data.predict_dataloader()
        return batch[0], [record.getMessage() for record in caplog.records]

    light = MNISTDataModule().preprocessing()(torch.from_numpy(images[:1])[:, None])
    assert torch.equal(predicted(states[True])[0], light)
    assert predicted(states[True])[1] == []
    unlike, notes = predicted(states[True], invert=False)
    assert not torch.equal(unlike, light)
    (note,) = notes
    assert "1 of 1 images have a border of brightness 255 to 255 (training images: 0 to" in note
    assert note.endswith("; pass invert=True if light and dark are exchanged")


def test_a_published_set_is_not_inverted_for_prediction_alone():
    with pytest.raises(
        UserError, match="invert=True: .* is light on dark.*; leave `invert` out, and pass it to predict"
    ):
        MNISTDataModule(dataset="digits", invert=True).setup("fit")


LABELS = np.arange(6) % 3
IMAGES = np.full((6, 9, 9), 200, np.uint8)


@pytest.mark.parametrize(
    ("images", "labels", "reason"),
    [
        (IMAGES / 255 * 16, LABELS, r"float64 from 12\.5\d* to .* floats from 0 to 1: pass images / 12"),
        (IMAGES // 20, LABELS, r"uint8 from 10 to 10, expected whole numbers from 0 to 255"),
        (IMAGES * 0, LABELS, "the train images are all black: every pixel is 0"),
        (IMAGES.astype(str), LABELS, "the train images are <U3, expected numbers"),
        ([IMAGES[0], IMAGES[0, 1:]], LABELS, "the train images are no array: .*; pass images of one size"),
        (IMAGES[:, :, 0][:, :8], LABELS, r"of shape \(6, 8\), expected \(n, height, width\)"),
        (IMAGES[:0], LABELS[:0], "the train images are empty"),
        (IMAGES, LABELS[:5], r"labels are of shape \(5,\), expected one for each of 6 images"),
        (IMAGES / 255 + np.array([0, 0, 0, np.nan, 0, 0]).reshape(6, 1, 1), LABELS, "hold NaN, the first in image 3"),
        (IMAGES, LABELS + 99_998, "the train labels go to 100,000, expected class numbers from 0, below 100,000"),
        (torch.tensor(IMAGES).bfloat16(), LABELS, "the train images are float32 from .*: pass images / 2"),
        (IMAGES, LABELS + 0.5, "labels are float64, expected class numbers from 0, or names"),
        (IMAGES, LABELS * 0 - 100, "no train image has a label"),
        (IMAGES, LABELS * 0 + 1, "the train labels are all 1; expected two classes or more"),
    ],
)
def test_arrays_of_unexpected_type_shape_or_range_are_rejected(images: Any, labels: Any, reason: str):
    with pytest.raises(UserError, match=reason):
        _given(images, labels)


def test_unlabeled_rows_are_left_out():
    data = _given(IMAGES, np.array([0, 1, -100, 1, 0, 1]), test=(IMAGES, LABELS), **PLAIN)
    data.setup("fit")
    assert data.left_out == {"without a label": 1}
    assert sum(data.sizes.values()) == 5


def test_a_label_outside_the_classes_is_rejected_with_its_row():
    data = _given(IMAGES, np.array([0, 1, 1, 1, 0, 1]), test=(IMAGES, LABELS), **PLAIN)
    with pytest.raises(UserError, match=r"label 2 at row 2 of the test labels is outside 0\.\.1 .*pass num_classes=3"):
        data.setup("test")


def test_a_class_of_the_test_set_needs_training_images():
    named = _given(IMAGES, np.array(list("abbaba")), num_classes=3, **PLAIN)
    assert (named.num_classes, named.info.classes) == (3, ("a", "b"))
    with pytest.raises(UserError, match="test holds classes that train has no image of: c"):
        _given(IMAGES, list("abbaba"), test=(IMAGES, list("abcabc")))


def _npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_an_unusable_archive_is_rejected_by_name(tmp_path: Path):
    good = _npz(tmp_path / "good.npz", images=IMAGES, labels=LABELS)
    (tmp_path / "cut.npz").write_bytes(good.read_bytes()[:-100])
    flipped = bytearray(good.read_bytes())
    flipped[300] ^= 255
    (tmp_path / "flipped.npz").write_bytes(flipped)
    (tmp_path / "text.npz").write_text("images,labels")
    objects = _npz(tmp_path / "objects.npz", images=np.array([None, 1], dtype=object), labels=LABELS)
    cases = {
        tmp_path / "none.npz": "none.npz cannot be read: No such file",
        tmp_path / "cut.npz": r"cut\.npz is no NumPy file \(\.npz\) of numbers and texts, or damaged",
        tmp_path / "flipped.npz": "flipped.npz is no NumPy file .* damaged: Bad CRC-32",
        tmp_path / "text.npz": "text.npz is no NumPy file",
        objects: "objects.npz is no NumPy file .* Object arrays cannot be loaded",
        _npz(tmp_path / "half.npz", images=IMAGES): "half.npz holds images; expected images and labels",
        _npz(tmp_path / "many.npz", **dict.fromkeys("abcdefghijkl", LABELS)): "many.npz holds a, .*, i, j; expected",
    }
    for path, reason in cases.items():
        with pytest.raises(UserError, match=reason):
            find_images(path)
    with pytest.raises(UserError, match="pass data_dir='.*/cut.npz'"):
        find_images(tmp_path)


def test_unusable_images_are_counted(tmp_path: Path, digits: Digits, caplog: Any):
    images, labels = digits
    write_tree(tmp_path, images[:40], labels[:40])
    Image.new("L", (50, 50), 255).save(tmp_path / "0" / "blank.png")
    (tmp_path / "1" / "photo.heic.txt").write_text("")
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        data = MNISTDataModule(data_dir=str(tmp_path), **PLAIN)
        data.setup("fit")
    notes = [record.getMessage() for record in caplog.records]
    assert notes[0].startswith("note: left out 1 files that are no images by their endings: 1 .txt, such as")
    assert notes[1] == f"note: 1 of 41 train images are blank, such as {tmp_path}/0/blank.png"
    assert data.left_out == {".txt": 1}
    for number in range(7):
        (tmp_path / "2" / f"broken{number}.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"7 of 48 images cannot be used: .*broken0\.png cannot be read .*; and 2 more"):
        MNISTDataModule(data_dir=str(tmp_path), **PLAIN).setup("fit")


def test_a_checkpoint_rejects_data_with_other_classes(tmp_path: Path, digits: Digits):
    images, labels = digits
    names = np.array(["ma", "mu"])[labels % 2]
    state = _given(images, names).state_dict()
    assert state == {"dataset": "custom", "invert": False, "classes": ["ma", "mu"]}
    Image.fromarray(images[0]).save(tmp_path / "0.png")
    data = MNISTDataModule(predict_inputs=[str(tmp_path / "0.png")])
    data.load_state_dict(state)
    data.setup("predict")
    assert len(next(iter(data.predict_dataloader()))[0]) == 1
    assert (data.class_names, data.num_classes, data.info.mean[0]) == (("ma", "mu"), 2, 0.1307)
    data = _given(images, labels)
    with pytest.raises(UserError, match="trained on the classes ma, mu, found 0, 1, 2"):
        data.load_state_dict(state)
    with pytest.raises(UserError, match="dataset='custom' needs `data_dir`"):
        MNISTDataModule(dataset="custom").setup("fit")
