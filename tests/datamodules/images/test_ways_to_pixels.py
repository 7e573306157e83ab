"""A picture has the same pixels on every way: a file, a folder, an archive, a cache, and objects in memory."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.harness.pictures import write_pictures
from benchmarks.pixels import WAYS, expected_pixels, predicted, validated
from datamodules import ImageFolderDataModule, UserError
from datamodules.images.decoding import evaluation_pixels


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.mark.parametrize("size", [48, 64, 96])
def test_every_way_gives_the_same_pixels(pictures: list[Path], size: int):
    expected = {path.name: expected_pixels(path, size) for path in pictures}
    table = {}
    for way, read in WAYS.items():
        pixels = read(pictures, size)
        assert len(pixels) >= len(pictures) - 2, way
        differences = {name: int((image.int() - expected[name].int()).abs().max()) for name, image in pixels.items()}
        table[way] = (max(differences.values()), [name for name, value in differences.items() if value])
    assert table == dict.fromkeys(WAYS, (0, []))


def test_evaluation_reads_no_cache_of_training(pictures: list[Path], tmp_path: Path):
    for number, path in enumerate(pictures):
        (tmp_path / "set" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "set" / str(number % 2))
    options = {"val_fraction": 0.5, "num_workers": 0, "cache_gb": 1}
    # Training with inputs of 64 pixels decodes to 128, the size of the later evaluation.
    for seed in range(1, 4):
        data = ImageFolderDataModule(
            data_dir=str(tmp_path / "set"), image_size=64, augment="standard", seed=seed, **options
        )
        data.setup("fit")
        list(data.train_dataloader())
    found = validated(tmp_path / "set", 128, cache_gb=1, val_fraction=0.5)
    expected = {path.name: expected_pixels(path, 128) for path in pictures}
    assert all(torch.equal(image, expected[name]) for name, image in found.items())


def test_what_the_caller_hands_over_does_not_change(pictures: list[Path]):
    images = [Image.open(path) for path in pictures if path.suffix in (".jpg", ".png")]
    before = [(image.size, image.mode, image.fp.tell(), len(image.tile), dict(image.info)) for image in images]
    predicted(images, 32)
    assert [(image.size, image.mode, image.fp.tell(), len(image.tile), dict(image.info)) for image in images] == before


def test_an_image_that_the_caller_has_reduced_is_taken_as_it_is(pictures: list[Path]):
    path = next(path for path in pictures if path.name.startswith("large"))
    reduced = Image.open(path)
    reduced.draft("RGB", (300, 200))
    seen = Image.open(path)
    seen.draft("RGB", (300, 200))
    seen.load()
    assert seen.size != Image.open(path).size
    assert torch.equal(evaluation_pixels(reduced, 64), evaluation_pixels(np_image(seen), 64))


def np_image(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.array(image))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.full((40, 40, 3), 16, np.uint8), "uint8 from 16 to 16, expected .* images / 16, or PIL.Image.fromarray"),
        (np.full((40, 40, 3), 1 / 255), "expected whole numbers from 0 to 255 or floats from 0 to 1: pass images"),
        (np.full((1, 300, 3), 200, np.uint8), "their channels may be first or last, so pass images of PIL"),
    ],
)
def test_an_array_of_another_range_or_form_is_an_error(pixels: np.ndarray, message: str):
    with pytest.raises(UserError, match=message):
        predicted(pixels, 32)


def test_a_black_image_has_no_other_range():
    assert predicted(np.zeros((40, 40, 3), np.uint8), 32)[0].max() == 0
