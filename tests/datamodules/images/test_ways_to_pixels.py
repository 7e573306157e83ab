"""A picture has the same pixels on every way: a file, a folder, an archive, a cache, and objects in memory."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as V

from datamodules import ImageFolderDataModule, UserError
from datamodules.images.decoding import crop_pct, evaluation_pixels
from tests.support.pictures import has_transparency, upright_rgb, write_pictures


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def _expected(path: Path, size: int) -> Tensor:
    """The pixels by Pillow and torchvision alone."""
    image = torch.from_numpy(np.array(upright_rgb(path))).permute(2, 0, 1)
    side = max(1, round(min(image.shape[1:]) * crop_pct(size)))
    top, left = ((length - side) // 2 for length in image.shape[1:])
    square = image[:, top : top + side, left : left + side].float()
    return V.resize(square, [size, size], antialias=True).round().to(torch.uint8)


def _predicted(images: Any, size: int) -> dict[int, Tensor]:
    """The pixels that a network gets from `predict`, by the number of the image."""
    data = ImageFolderDataModule(image_size=size, num_workers=0)
    data.take_inputs(images)
    loader = data.predict_dataloader()
    found = {}
    for batch in loader.loaded_batches():
        found |= dict(zip(batch.rows.tolist(), batch.inputs.clone()))
    return found


def _validated(place: Path, size: int, **options: Any) -> dict[str, Tensor]:
    """The pixels that a network gets in validation, by the name of the file."""
    data = ImageFolderDataModule(data_dir=str(place), image_size=size, num_workers=0, **options)
    data.setup("validate")
    names = data.sample_names("val")
    found = {}
    for batch in data.val_dataloader().loaded_batches():
        for row, image in zip(batch.rows.tolist(), batch.inputs.clone()):
            found[Path(names[row]).name] = image
    return found


def _array(path: Path) -> np.ndarray:
    image = ImageOps.exif_transpose(Image.open(path))
    return np.asarray(image.convert("RGBA" if has_transparency(image) else "RGB"))


def _decoded(path: Path) -> Image.Image:
    image = Image.open(path)
    image.load()
    return image


def _folder(pictures: list[Path], folder: Path) -> Path:
    for part in ("train", "val"):
        for number, path in enumerate(pictures):
            (folder / part / str(number % 2)).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / part / str(number % 2))
    return folder


def _zip(folder: Path) -> Path:
    archive = folder.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*.*")):
            file.write(path, path.relative_to(folder))
    return archive


IN_MEMORY: dict[str, Callable[[Path], Any]] = {
    "predict of a file": str,
    "predict of a PIL image": Image.open,
    "predict of a decoded PIL image": _decoded,
    "predict of an array": _array,
}


@pytest.mark.parametrize("size", [48, 64, 96])
def test_every_way_gives_the_same_pixels(pictures: list[Path], tmp_path: Path, size: int):
    expected = {path.name: _expected(path, size) for path in pictures}
    ways = {"content of a file": {path.name: evaluation_pixels(path.read_bytes(), size) for path in pictures}}
    for way, make in IN_MEMORY.items():
        # Of an array with 1, 3 or 4 rows it is not known which dimension has the channels.
        usable = [path for path in pictures if way != "predict of an array" or len(_array(path)) > 4]
        found = _predicted([make(path) for path in usable], size)
        ways[way] = {path.name: found[number] for number, path in enumerate(usable)}
    folder = _folder(pictures, tmp_path / "set")
    ways["validation"] = _validated(folder, size, cache_gb=0)
    ways["validation, cold cache"] = _validated(folder, size, cache_gb=1)
    ways["validation, warm cache"] = _validated(folder, size, cache_gb=1)
    ways["validation of a zip archive"] = _validated(_zip(folder), size, cache_gb=0)
    table = {}
    for way, found in ways.items():
        assert len(found) >= len(pictures) - 2, way
        differences = {name: int((image.int() - expected[name].int()).abs().max()) for name, image in found.items()}
        table[way] = (max(differences.values()), [name for name, value in differences.items() if value])
    assert table == dict.fromkeys(ways, (0, []))


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
    found = _validated(tmp_path / "set", 128, cache_gb=1, val_fraction=0.5)
    expected = {path.name: _expected(path, 128) for path in pictures}
    assert all(torch.equal(image, expected[name]) for name, image in found.items())


def test_what_the_caller_hands_over_does_not_change(pictures: list[Path]):
    images = [Image.open(path) for path in pictures if path.suffix in (".jpg", ".png")]
    before = [(image.size, image.mode, image.fp.tell(), len(image.tile), dict(image.info)) for image in images]
    _predicted(images, 32)
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
        _predicted(pixels, 32)


def test_a_black_image_has_no_other_range():
    assert _predicted(np.zeros((40, 40, 3), np.uint8), 32)[0].max() == 0
