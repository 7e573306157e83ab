"""Compares the pixels of 1,000 images on every way to a network: files, archives, caches, objects in memory, ONNX.

    python -m benchmarks.pixels                     # at 64 and 224 pixels, four minutes on two cores
    python -m benchmarks.pixels --copies 1 --sizes 64

A script draws the images, in 31 kinds: EXIF's eight orientations, transparency, gray, CMYK, palettes, 1 bit, an
animation, sides of 1 to 1,203 pixels, and six formats. Pillow and torchvision alone say what the pixels should be. For
each way a row has the largest difference of a value (of 255), the images that differ, and those whose class changes in
a network of random weights, whose logits lie close together.
"""

import argparse
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as V

from benchmarks.harness.pictures import has_transparency, upright_rgb, write_pictures
from datamodules import ImageFolderDataModule
from datamodules.images.decoding import crop_pct, evaluation_pixels
from recipes import ResNetFineTuner
from recipes.export import export

__all__ = ["WAYS", "Difference", "compare", "expected_pixels", "main", "predicted", "validated"]

Pixels = dict[str, Tensor]
"""uint8 of shape (3, side, side) by the name of the file."""


def expected_pixels(path: Path, size: int) -> Tensor:
    """Return the pixels of an image by Pillow and torchvision alone, uint8 of shape (3, size, size)."""
    image = torch.from_numpy(np.array(upright_rgb(path))).permute(2, 0, 1)
    side = max(1, round(min(image.shape[1:]) * crop_pct(size)))
    top, left = ((length - side) // 2 for length in image.shape[1:])
    square = image[:, top : top + side, left : left + side].float()
    resized: Tensor = V.resize(square, [size, size], antialias=True)
    return resized.round().to(torch.uint8)


def _content(paths: Sequence[Path], size: int) -> Pixels:
    return {path.name: evaluation_pixels(path.read_bytes(), size) for path in paths}


def predicted(inputs: Any, size: int) -> dict[int, Tensor]:
    """Return the pixels that a network gets from `predict`, by the number of the input."""
    data = ImageFolderDataModule(image_size=size, num_workers=0)
    data.set_inputs(inputs)
    pixels: dict[int, Tensor] = {}
    for batch in data.predict_dataloader().loaded_batches():
        pixels |= zip(batch.rows.tolist(), batch.inputs.clone(), strict=True)
    return pixels


def _predicted_as(paths: Sequence[Path], size: int, make: Callable[[Path], Any]) -> Pixels:
    # Of an array with 1, 3 or 4 rows it is not known which dimension has the channels.
    usable = [path for path in paths if make is not _array or len(_array(path)) > 4]
    pixels = predicted([make(path) for path in usable], size)
    return {usable[number].name: image for number, image in pixels.items()}


def _decoded(path: Path) -> Image.Image:
    image = Image.open(path)
    image.load()
    return image


def _array(path: Path) -> Any:
    image = ImageOps.exif_transpose(Image.open(path))
    return np.asarray(image.convert("RGBA" if has_transparency(image) else "RGB"))


def validated(place: Path, size: int, **settings: Any) -> Pixels:
    """Return the pixels that a network gets in validation."""
    data = ImageFolderDataModule(data_dir=str(place), image_size=size, num_workers=0, **settings)
    data.setup("validate")
    names = data.sample_names("val")
    pixels: Pixels = {}
    for batch in data.val_dataloader().loaded_batches():
        for number, image in zip(batch.rows.tolist(), batch.inputs.clone(), strict=True):
            pixels[Path(names[number]).name] = image
    return pixels


def _folder(paths: Sequence[Path]) -> Path:
    """Return a folder of two classes for training and validation with the images."""
    folder = paths[0].parent.parent / "set"
    if not folder.exists():
        for part in ("train", "val"):
            for number, path in enumerate(paths):
                (folder / part / str(number % 2)).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / part / str(number % 2))
    return folder


def _of_folder(paths: Sequence[Path], size: int, cache_gb: float = 0) -> Pixels:
    return validated(_folder(paths), size, cache_gb=cache_gb)


def _of_archive(paths: Sequence[Path], size: int) -> Pixels:
    folder = _folder(paths)
    archive = folder.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*.*")):
            file.write(path, path.relative_to(folder))
    return validated(archive, size, cache_gb=0)


WAYS: dict[str, Callable[[Sequence[Path], int], Pixels]] = {
    "content of a file": _content,
    "predict of files": partial(_predicted_as, make=str),
    "validation of a folder": _of_folder,
    "validation, cold cache": partial(_of_folder, cache_gb=4),
    "validation, warm cache": partial(_of_folder, cache_gb=4),
    "validation of a zip archive": _of_archive,
    "predict of PIL images": partial(_predicted_as, make=Image.open),
    "predict of decoded PIL images": partial(_predicted_as, make=_decoded),
    "predict of arrays": partial(_predicted_as, make=_array),
}
"""Functions of the images and the size, by the name of the way."""


class Difference(NamedTuple):
    """How the images of one way differ from those that Pillow and torchvision give."""

    way: str
    images: int
    largest: int
    """The largest difference of a value, of 255."""
    differ: int
    """Images with a difference."""
    changed: int
    """Images of another class."""


def _network(size: int, folder: Path) -> tuple[ResNetFineTuner, Path]:
    """Return a network of random weights with statistics of its inputs, and its checkpoint."""
    torch.manual_seed(1)
    recipe = ResNetFineTuner(num_classes=10, image_size=size, weights="none", arch="resnet20")
    recipe.network(torch.randn(32, 3, size, size))
    data = ImageFolderDataModule(dataset="digits", image_size=size)
    checkpoint = {"state_dict": recipe.state_dict(), "ImageFolderDataModule": data.state_dict()}
    settings = {"dataset": "digits", "image_size": size}
    torch.save(checkpoint | {"datamodule_hyper_parameters": settings}, folder / f"{size}.ckpt")
    return recipe.eval(), folder / f"{size}.ckpt"


@torch.no_grad()
def _classes(recipe: ResNetFineTuner, pixels: Mapping[str, Tensor]) -> dict[str, int]:
    normalize = ImageFolderDataModule(dataset="digits", image_size=recipe.hparams.image_size).preprocessing()
    return {name: int(recipe.network(normalize(image.unsqueeze(0))).argmax()) for name, image in pixels.items()}


def _of_graph(
    paths: Sequence[Path], size: int, recipe: ResNetFineTuner, checkpoint: Path
) -> tuple[Pixels, dict[str, int]]:
    """Return the pixels inside an exported ONNX graph, and its classes."""
    import onnx
    import onnxruntime

    file = checkpoint.with_suffix(".onnx")
    export(ResNetFineTuner(**recipe.hparams), str(checkpoint), "onnx", str(file))
    model = onnx.load(file)
    model.graph.output.append(onnx.helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, [1, 3, size, size]))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    pixels: Pixels = {}
    classes = {}
    for path in paths:
        inputs = {"image": np.asarray(upright_rgb(path))[None]}
        cropped, probabilities = session.run(["images", "probabilities"], inputs)
        pixels[path.name] = torch.from_numpy(cropped)[0]
        classes[path.name] = int(probabilities.argmax())
    return pixels, classes


def compare(paths: Sequence[Path], size: int, folder: Path) -> Iterator[Difference]:
    """Yield the differences of each way for some images, which stand in one folder.

    Args:
        paths: the images; their names differ.
        size: side of the network's inputs, in pixels.
        folder: an existing folder for a checkpoint.
    """
    expected = {path.name: expected_pixels(path, size) for path in paths}
    recipe, checkpoint = _network(size, folder)
    right = _classes(recipe, expected)

    def difference(way: str, pixels: Pixels, classes: Mapping[str, int] | None = None) -> Difference:
        largest = {name: int((image.int() - expected[name].int()).abs().max()) for name, image in pixels.items()}
        others = {name: image for name, image in pixels.items() if largest[name]}
        if classes is None:
            # Equal pixels have equal classes.
            classes = _classes(recipe, others)
        changed = sum(number != right[name] for name, number in classes.items())
        return Difference(way, len(pixels), max(largest.values()), len(others), changed)

    for way, read in WAYS.items():
        yield difference(way, read(paths, size))
    yield difference("ONNX graph", *_of_graph(paths, size, recipe, checkpoint))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=33, help="images of each of 31 kinds")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 224], help="sides of the network's inputs")
    options = parser.parse_args(arguments)
    # Images are small work, in which threads wait for each other.
    torch.set_num_threads(1)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            paths = write_pictures(folder / "pictures", options.copies)
            print(f"\n| {len(paths):,} images at {size} pixels | images | largest difference | differ | other class |")
            print("|---|---|---|---|---|")
            for row in compare(paths, size, folder):
                print(f"| {row.way} | {row.images:,} | {row.largest} | {row.differ} | {row.changed} |", flush=True)


if __name__ == "__main__":
    main()
