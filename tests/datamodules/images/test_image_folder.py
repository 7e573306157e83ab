import hashlib
import logging
import pickle
import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from datamodules.base import Process
from datamodules.errors import UserError
from datamodules.images.augmentation import normalizer
from datamodules.images.decoding import UnreadableImage, load_image
from datamodules.images.file_pipeline import ImageFiles, held_in_memory, pixel_statistics
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.source import ArrayImages, split_by_class
from datamodules.images.tensor_pipeline import gray_image

CLASSES = ("ant", "bee", "cow")


def _noise(number: int, width: int = 48, height: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))


def write_class(folder: Path, count: int, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        suffix = ".png" if number % 3 else ".jpg"
        _noise(number, 30 + number % 7, 28 + number % 11).save(folder / f"{number:03}{suffix}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three classes; 13 images to train on and 7 to validate."""
    for start, (name, train, val) in enumerate(zip(CLASSES, (5, 4, 4), (3, 2, 2), strict=True)):
        write_class(tmp_path / "train" / name, train, 100 * start)
        write_class(tmp_path / "val" / name, val, 100 * start + 50)
    return tmp_path


def _data(folder: Path | None, stage: str = "fit", **options: Any) -> ImageFolderDataModule:
    defaults = {"image_size": 64, "batch_size": 3, "eval_batch_size": 3, "num_workers": 0}
    data = ImageFolderDataModule(data_dir=str(folder) if folder else None, **(defaults | options))
    data.setup(stage)
    return data


def _batches(data: ImageFolderDataModule, epochs: int = 2) -> list[tuple[Tensor, Tensor]]:
    loader = data.train_dataloader()
    found = [batch for _ in range(epochs) for batch in loader]
    data.teardown("fit")
    return found


def _equal(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, without the line on the classes."""
    lines = (record.getMessage() for record in caplog.records)
    return [line for line in lines if ": training on " not in line]


@pytest.fixture
def notes(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "lightning_recipes"):
        yield caplog


# What a run sees does not depend on how it is read


@pytest.mark.parametrize("options", [{}, {"mixup": 0.2, "cutmix": 1.0}])
def test_workers_or_caches_change_no_bit_of_a_batch(tree, options):
    expected = _batches(_data(tree, cache_gb=0, **options))
    assert len(expected) == 10
    for num_workers, cache_gb in ((0, 1), (1, 0), (2, 1)):
        assert _equal(_batches(_data(tree, num_workers=num_workers, cache_gb=cache_gb, **options)), expected)
    assert not _equal(_batches(_data(tree, seed=2, cache_gb=0, **options)), expected)


@pytest.mark.parametrize("size", [64, 32])
def test_an_image_drawn_twice_is_augmented_differently(tree, size):
    options: dict[str, Any] = {"balance": "sampler", "cache_gb": 0, "image_size": size}
    plain, augmented = (
        torch.cat([images for images, _ in _batches(_data(tree, augment=augment, **options), epochs=1)])
        for augment in ("none", "standard")
    )
    same = (plain.flatten(1)[:, None] == plain.flatten(1)).all(2).triu(1).nonzero().tolist()
    assert same
    assert not any(torch.equal(augmented[first], augmented[second]) for first, second in same)
    workers = _batches(_data(tree, augment="standard", num_workers=2, **options), epochs=1)
    assert torch.equal(torch.cat([images for images, _ in workers]), augmented)


def test_an_exception_ends_the_workers(tree):
    data = _data(tree, num_workers=1)
    loader = data.train_dataloader()
    batches = iter(loader)
    next(batches)
    data.on_exception(KeyboardInterrupt())
    assert loader._loader is None


def test_predict_reads_the_images_of_a_test_in_file_order(tree):
    write_class(tree / "test" / "bee", 2, 500)
    write_class(tree / "test" / "ant", 1, 600)
    data = _data(tree, "test", predict_inputs=[str(tree / "test")])
    ((tested, labels),) = data.test_dataloader()
    ((given, numbers),) = data.predict_dataloader()
    assert labels.tolist() == [0, 1, 1]
    assert torch.equal(given, tested)
    assert [Path(data.prediction_names[number]).name for number in numbers] == ["600.jpg", "500.png", "501.jpg"]


def test_numbered_batches_are_the_images_of_evaluation(tree):
    data = _data(tree, augment="none")
    parts = [list(data.numbered_batches("train", rank, 2)) for rank in (0, 1)]
    images, targets, numbers = (torch.cat(pieces) for pieces in zip(*parts[0], *parts[1], strict=True))
    assert sorted(numbers.tolist()) == list(range(13))
    loader = data.train_dataloader()
    # The same images in the same numbering as in training without augmentation: features may stand in for them.
    loader.use_features(images, numbers)
    features = list(loader)
    loader.use_features(None, None)
    loader.load_state_dict({"epoch": 0, "consumed": 0})
    assert _equal(features, [data.on_after_batch_transfer(batch, 0) for batch in loader])
    assert targets[numbers.argsort()].tolist() == [0] * 5 + [1] * 4 + [2] * 4
    # Features pass through.
    assert data.on_after_batch_transfer(features[0], 0)[0] is features[0][0]


def test_a_run_goes_on_only_with_the_same_files(tree, tmp_path_factory):
    state = _data(tree).train_dataloader().state_dict()
    elsewhere = shutil.copytree(tree, tmp_path_factory.mktemp("elsewhere") / "photographs")
    for folder in (elsewhere, shutil.make_archive(str(elsewhere), "zip", elsewhere)):
        _data(folder, image_size=32).train_dataloader().load_state_dict(state)
    (elsewhere / "train" / "bee" / "100.png").rename(elsewhere / "train" / "bee" / "99.png")
    with pytest.raises(UserError, match="of a run on 13 samples, found 13, others or in another order; resume"):
        _data(elsewhere).train_dataloader().load_state_dict(state)
    write_class(elsewhere / "train" / "cow", 1, 900)
    with pytest.raises(UserError, match="of a run on 13 samples, found 14; resume with the same data"):
        _data(elsewhere).train_dataloader().load_state_dict(state)


# Folders


def test_class_folders_are_split_by_class(tree, tmp_path):
    folder = tmp_path / "flat"
    for start, name in enumerate(CLASSES):
        write_class(folder / name, 10, 100 * start)

    def parts(**options: Any) -> dict[str, list[str]]:
        data = _data(folder, val_fraction=0.2, **options)
        data.setup("test")
        return {name: list(part.names) for name, part in data._parts.items() if len(part.rows)}

    found = parts(test_fraction=0.1)
    assert len(set(sum(found.values(), []))) == 30
    assert [sum(f"/{name}/" in file for file in found["val"]) for name in CLASSES] == [2, 2, 2]
    assert [sum(f"/{name}/" in file for file in found["test"]) for name in CLASSES] == [1, 1, 1]
    assert parts(test_fraction=0.1) == found
    assert parts(test_fraction=0.1, seed=2) != found
    assert {part: len(files) for part, files in parts().items()} == {"train": 24, "val": 6}
    assert _data(folder, val_fraction=0.0).val_dataloader() == []


def test_a_class_of_few_images_keeps_one_to_train_on():
    classes, targets = ("a", "b", "c"), torch.tensor([0, 1, 1, 2, 2, 2])
    rows = split_by_class(targets, classes, {"test": 0.5, "val": 0.4}, seed=1)
    assert set(targets[rows["train"]].tolist()) == {0, 1, 2}
    # Which ones does not depend on other classes.
    again = split_by_class(torch.tensor([0, 0, 1, 1, 2, 2, 2]), classes, {"test": 0.5, "val": 0.4}, seed=1)
    assert [row - 1 for row in again["val"].tolist() if row > 1] == [row for row in rows["val"].tolist() if row > 0]


def test_splits_are_those_of_earlier_versions_sample_by_sample():
    targets = torch.tensor([(i * i * 7 + i // 5) % 4 for i in range(60)])
    rows = split_by_class(targets, ("ant", "bee", "cow", "dog"), {"test": 0.1, "val": 0.25}, 3)
    assert rows["test"].tolist() == [7, 15, 35, 38, 44, 51]
    assert rows["val"].tolist() == [6, 11, 14, 16, 19, 21, 22, 25, 27, 40, 48, 54, 58, 59]
    assert sorted(torch.cat(list(rows.values())).tolist()) == list(range(60))
    targets = torch.tensor([(i * i * 7 + i // 3) % 37 % 11 for i in range(5000)])
    rows = split_by_class(targets, [f"c{i}" for i in range(11)], {"test": 0.07, "val": 0.13}, 5)
    found = (rows[part].tolist() for part in ("train", "test", "val"))
    hashes = [hashlib.sha256(repr(numbers).encode()).hexdigest()[:16] for numbers in found]
    assert hashes == ["486045a78134100e", "d6083b20ce8fabed", "8cf07f080ea5313c"]


def test_each_kind_of_unused_file_has_a_note(tree, notes):
    (tree / "train" / "readme.md").write_text("x")
    (tree / "train" / "bee" / ".hidden.jpg").write_text("x")
    write_class(tree / "train" / ".cache", 2)
    (tree / "train" / "dog").mkdir()
    write_class(tree / "test", 1)
    (tree / "train" / "ant" / "again").symlink_to(tree / "train" / "ant")
    shutil.rmtree(tree / "val" / "bee")
    shutil.move(tree / "val" / "ant" / "050.png", tree / "val" / "050.png")
    data = _data(tree)
    assert (data.info.classes, data.sizes) == (CLASSES, {"train": 13, "val": 4})
    assert _messages(notes) == [
        f"note: {tree}/test is not used: it is no folder train, val or test of classes",
        f"note: class dog is left out: {tree}/train/dog holds no image",
        f"note: left out 2 images that are not in {{split}}/{{class}}/*, such as {tree}/test/000.jpg",
        f"note: left out 1 files that are no images by their endings: 1 .md, such as {tree}/train/readme.md",
        "note: val has no image of bee: scores say nothing about them",
    ]


def test_a_path_that_is_no_folder_is_rejected(tmp_path):
    with pytest.raises(UserError, match="nowhere' does not exist; pass a folder"):
        _data(tmp_path / "nowhere")
    (tmp_path / "x.bin").touch()
    with pytest.raises(UserError, match=r"x.bin' is neither a folder nor a .zip archive; pass a folder"):
        _data(tmp_path / "x.bin")


# Files that cannot be read


def _damage(tree: Path) -> list[str]:
    """Truncated, empty, of another kind, and overwritten in the middle: the files' names."""
    files = [tree / "train" / name for name in ("ant/000.jpg", "ant/001.png", "bee/100.png", "bee/101.png")]
    jpeg, _, _, png = (file.read_bytes() for file in files)
    damaged = jpeg[: len(jpeg) // 2], b"", b"not an image", png[:60] + bytes(40) + png[100:]
    for file, content in zip(files, damaged, strict=True):
        file.write_bytes(content)
    return [str(file) for file in files]


@pytest.mark.parametrize("options", [{"cache_gb": 0}, {"num_workers": 2, "cache_gb": 1}, {"image_size": 32}])
def test_a_cache_changes_nothing_about_unreadable_images(tree, options, notes):
    whole = [len(targets) for _, targets in _batches(_data(tree))]
    assert notes.messages == [f"{tree.name}: training on 3 classes: ant (5), bee (4), cow (4)"]
    bad = _damage(tree)
    with pytest.raises(UserError, match=r"cannot be read as an image.*; replace or remove the file, or pass"):
        _batches(_data(tree, **options))
    data = _data(tree, **options, on_corrupt="skip")
    loader = data.train_dataloader()
    batches = [batch for _ in range(2) for batch in loader]
    assert [len(targets) for _, targets in batches] != whole
    assert sum(len(targets) for _, targets in batches) == 2 * (13 - 4)
    assert len(loader.unreadable) == 4
    said = _messages(notes)
    assert len(said) == 4
    assert all(any(name in line for line in said) for name in bad)
    assert any("001.png cannot be read as an image: the file is empty; it is left out" in line for line in said)
    assert any("100.png cannot be read as an image: its content is not an image" in line for line in said)
    assert _equal(batches, _batches(_data(tree, **options | {"num_workers": 0, "cache_gb": 0}, on_corrupt="skip")))
    data.teardown("fit")


def test_nothing_to_predict_is_an_error(tree):
    with pytest.raises(UserError, match="no image to predict; pass the names"):
        _data(None, "predict").predict_dataloader()
    data = _data(None, "predict", predict_inputs=[str(tree / "nowhere.jpg")])
    with pytest.raises(UserError, match="none of the 1 images can be read"):
        list(data.predict_dataloader())


# Decoding


def _saved(image: Image.Image, path: Path, **options: Any) -> Tensor:
    image.save(path, **options)
    return load_image(path, 100)


def test_images_of_any_mode_become_rgb_bytes(tmp_path):
    red = Image.new("RGB", (6, 4), (200, 40, 10))
    expected = torch.tensor([200, 40, 10], dtype=torch.uint8).view(3, 1, 1).expand(3, 4, 6)
    for image, suffix in ((red, "png"), (red, "bmp"), (red.convert("P", palette=Image.Palette.ADAPTIVE), "png")):
        assert torch.equal(_saved(image, tmp_path / f"x.{suffix}"), expected)
    gray = _saved(red.convert("L"), tmp_path / "l.png")
    assert torch.equal(gray, gray[:1].expand(3, 4, 6))
    cmyk = _saved(red.convert("CMYK"), tmp_path / "cmyk.jpg", quality=95)
    assert (cmyk.int() - expected.int()).abs().max() < 12
    for mode, value in (("RGBA", (200, 40, 10, 0)), ("LA", (0, 0)), ("1", 1)):
        assert (_saved(Image.new(mode, (6, 4), value), tmp_path / "x.png") == 255).all()


RAMP = np.arange(256).reshape(16, 16)
both_readers = pytest.mark.parametrize(
    "read", [lambda path: load_image(path, 64)[0], lambda path: gray_image(str(path))]
)


@pytest.mark.parametrize("values", [np.uint16(RAMP * 257), np.int32(RAMP), np.float32(RAMP / 255)])
@both_readers
def test_pixels_of_more_than_8_bits_are_rejected(tmp_path, values, read):
    path = tmp_path / "x.tif"
    Image.fromarray(values).save(path)
    with pytest.raises(UserError, match=r"x\.tif cannot be read as an image: its pixels have more than 8 bits"):
        read(path)


@both_readers
def test_colors_of_16_bits_are_rejected(tmp_path, read):
    rows = [b"\0" + row.astype(">u2").tobytes() for row in np.stack([RAMP * 257] * 3, 2)]
    parts = ((b"IHDR", struct.pack(">2I5B", 16, 16, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"".join(rows))))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (*parts, (b"IEND", b""))
    )
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(UserError, match="x.png cannot be .*: its pixels have more than 8 bits"):
        read(tmp_path / "x.png")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    _noise(3, 20, 12).save(tmp_path / "x.png", exif=exif)
    with Image.open(tmp_path / "x.png") as saved:
        upright = np.array(ImageOps.exif_transpose(saved))
    assert np.array_equal(load_image(tmp_path / "x.png", 100).permute(1, 2, 0).numpy(), upright)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_a_reduced_image_keeps_its_content(tmp_path, suffix):
    image = _noise(1, 6, 4).resize((900, 600), Image.Resampling.BICUBIC)
    image.save(tmp_path / f"x.{suffix}", quality=95)
    small = load_image(tmp_path / f"x.{suffix}", 80)
    assert small.shape == (3, 80, 120)
    assert np.abs(small.permute(1, 2, 0).numpy() - np.float32(image.resize((120, 80)))).mean() < 2
    assert load_image(tmp_path / f"x.{suffix}", 5000).shape == (3, 600, 900)


def test_an_image_beyond_pillows_limit_is_unreadable(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    _noise(1, 20, 15).save(tmp_path / "x.png")
    with pytest.raises(UnreadableImage, match=r"x.png cannot be read as an image: .*300 pixels.* exceeds limit of 200"):
        load_image(tmp_path / "x.png", 10)


def test_a_cache_that_validation_filled_serves_training(tree):
    data, expected = _data(tree, cache_gb=1), _batches(_data(tree, cache_gb=0))
    normalizer.cache_clear()
    with torch.inference_mode():
        list(data.pipeline.numbered_batches(data._parts["train"], 3, Process()))
    assert _equal(_batches(data), expected)
    # What asks for the gradient of images goes through the statistics, too.
    pixels = expected[0][0].float().requires_grad_()
    data.preprocessing()(pixels).sum().backward()
    assert pixels.grad is not None


# Sets known by name


def test_without_a_folder_the_bundled_digits_are_used(notes):
    data = ImageFolderDataModule(batch_size=100)
    assert data.num_classes == 10
    data.setup("fit")
    data.setup("test")
    assert (data.dataset, data.image_size, data.pipeline.augment) == ("digits", 32, "light")
    assert data.sizes == {"train": 1295, "val": 142, "test": 360}
    assert _messages(notes) == [
        "no `data_dir`: using the 1,797 bundled digits as small color images; pass data_dir='FOLDER' for your own"
    ]
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (100, 3, 32, 32)
    assert images.dtype == torch.float32
    assert data.train_dataloader().num_workers == 0
    assert len(data.val_dataloader().reader.targets.unique()) == 10


def test_what_was_left_open_is_resolved_to_what_is_used(tmp_path: Path, tree, notes):
    data = ImageFolderDataModule()
    imagenet = {"pixel_mean": [0.485, 0.456, 0.406], "pixel_std": [0.229, 0.224, 0.225]}
    digits = {"dataset": "digits", "image_size": 32, "augment": "light", **imagenet}
    assert data.resolve() == data.resolve() == digits
    data.setup("fit")
    assert len(_messages(notes)) == 2
    assert "augment='light' (shifts, no mirroring)" in _messages(notes)[1]
    large = ImageFolderDataModule(data_dir=str(tree), image_size=224).resolve()
    assert large == {"dataset": "folder", "augment": "standard", **imagenet}
    assert ImageFolderDataModule(**data.resolve()).resolve() == {}


def test_the_image_size_follows_a_folders_files(tree, notes):
    # The files' short sides are 28 to 36 pixels.
    data = _data(tree, image_size=None)
    assert data.image_size == 32
    chosen = r"images of 32 pixels as the files have, augment='light' \(shifts and mirroring\), pixels normalized by"
    assert re.fullmatch(rf".*: {chosen} their mean \(0.49\d, 0.50\d, 0.50\d\)", *_messages(notes))
    every = torch.cat([images.flatten(2) for images, _ in _batches(_data(tree, image_size=32, augment="none"), 1)])
    assert float(every.mean()) == pytest.approx(0, abs=0.02)
    assert float(every.std()) == pytest.approx(1, abs=0.03)
    arrays = [np.full((1, 32, 32, 3), color, np.uint8) for color in ([0, 255, 51], [0, 0, 51])]
    statistics = pixel_statistics(ArrayImages(np.concatenate(arrays), "images"), 32)
    assert statistics == ((0.0, 0.5, 0.2), (0.0039, 0.5, 0.0039)), "the standard deviation is at least 1/255"
    # What is damaged is left to the loaders.
    for file in (tree / "train" / "ant").iterdir():
        file.write_bytes(b"no image")
    assert _data(tree, image_size=None).image_size == 32


def test_given_pixel_statistics_are_kept_by_a_checkpoint(tree):
    mine = _data(tree, image_size=32)
    assert mine.pipeline.statistics[0] != (0.5, 0.5, 0.5), "they were looked at before"
    mine.hparams.update(pixel_mean=[0.5, 0.5, 0.5], pixel_std=[0.25, 0.25, 0.25])
    white = torch.full((1, 3, 4, 4), 255, dtype=torch.uint8)
    assert torch.equal(mine.preprocessing()(white), torch.full((1, 3, 4, 4), 2.0))
    again = ImageFolderDataModule()
    again.load_state_dict(mine.state_dict())
    assert torch.equal(again.preprocessing()(white), mine.preprocessing()(white))


@pytest.mark.parametrize("options", [{}, {"mixup": 0.2, "cutmix": 1.0}, {"augment": "none"}])
def test_small_images_in_memory_are_those_that_workers_read(tree, options, monkeypatch):
    expected = _data(tree, image_size=32, **options)
    reader = expected.train_dataloader().reader
    assert reader.is_in_memory
    monkeypatch.setattr("datamodules.images.file_pipeline._MAX_BYTES_IN_MEMORY", 0)
    for num_workers in (0, 2):
        data = _data(tree, image_size=32, num_workers=num_workers, **options)
        assert not data.train_dataloader().reader.is_in_memory
        assert _equal(_batches(data), _batches(expected))


def test_small_images_are_held_up_to_the_memory_of_the_machine(monkeypatch):
    images = ImageFiles(ArrayImages(np.zeros((5, 16, 16, 3), np.uint8), "images"), 16)
    monkeypatch.setattr("datamodules.images.file_pipeline._MAX_BYTES_IN_MEMORY", 2 * 5 * 3 * 16 * 16)
    assert [held_in_memory(images, 16, copies) is not None for copies in (1, 2, 3)] == [True, True, False]


# Checkpoints and settings


def test_a_checkpoint_of_other_classes_is_rejected(tree):
    state = _data(tree).state_dict()
    assert pickle.loads(pickle.dumps(state)) == state
    _data(tree).load_state_dict(state)
    shutil.move(tree / "train" / "cow", tree / "train" / "dog")
    shutil.move(tree / "val" / "cow", tree / "val" / "dog")
    classes = "trained on the classes ant, bee, cow, found ant, bee, dog; pass the `data_dir`"
    for folder, reason in ((tree, classes), (None, "trained on folder, found digits; pass data_dir=")):
        with pytest.raises(UserError, match=reason):
            _data(folder).load_state_dict(state)


def test_prediction_takes_the_classes_of_its_checkpoint(tree):
    state = _data(tree).state_dict()
    data = _data(None, "predict", predict_inputs=[str(tree / "val")], image_size=None)
    data.load_state_dict(state)
    assert (data.info.classes, data.num_classes, data.image_size) == (CLASSES, 3, 64)
    assert next(iter(data.predict_dataloader()))[0].shape == (3, 3, 64, 64)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dataset": "imagenet"}, "dataset='imagenet': expected one of auto, folder"),
        ({"pixel_std": [0, 1, 1]}, r"pixel_std=\[0, 1, 1\]: expected three numbers"),
        ({"augment": "heavy"}, "augment='heavy': expected one of auto, none, light"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "leave nothing to train on"),
    ],
)
def test_settings_that_make_no_sense_are_rejected(options, reason):
    with pytest.raises(UserError, match=reason):
        ImageFolderDataModule(**options)
