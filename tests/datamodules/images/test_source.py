"""A source is what listing and reading share: the same images give the same batches, wherever they come from."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ImageFolderDataModule, MNISTDataModule, UserError, from_arrays, from_folder

PIXELS = np.random.default_rng(1).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
NAMES = ["ant", "bee", "cow"] * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The images in folders of their classes, in the order of the array."""
    for number, (pixels, name) in enumerate(zip(PIXELS, NAMES, strict=True)):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name / f"{number:02}.png")
    return tmp_path


@pytest.mark.parametrize("augment", ["none", "light", "standard"])
def test_images_in_memory_give_the_batches_of_their_files(folder: Path, augment: str):
    order = np.argsort(NAMES, kind="stable")
    source = from_arrays({"train": (PIXELS[order], np.array(NAMES)[order])})
    batches = []
    for samples in (source, from_folder(folder), (torch.from_numpy(PIXELS[order]), [NAMES[row] for row in order])):
        data = ImageFolderDataModule(batch_size=4, val_fraction=0.25, augment=augment, num_workers=0)  # type: ignore[arg-type]
        data.set_samples(samples)
        data.setup("fit")
        assert (data.class_names, data.image_size) == (("ant", "bee", "cow"), 16)
        batches.append([batch for loader in (data.train_dataloader(), data.val_dataloader()) for batch in loader])
        data.teardown("fit")
    for others in batches[1:]:
        for first, second in zip(batches[0], others, strict=True):
            assert all(map(torch.equal, first, second))


def test_a_source_serves_the_small_recipe_as_well(folder: Path):
    data = MNISTDataModule(batch_size=4, val_fraction=0.25, test_fraction=0)
    data.set_samples(from_folder(folder))
    data.setup("fit")
    assert (data.dataset, data.num_classes, data.sizes) == ("custom", 3, {"train": 9, "val": 3})


def test_what_is_no_set_of_images_is_rejected():
    for samples in (PIXELS, (PIXELS,), {"val": (PIXELS, NAMES)}, {"train": (PIXELS, NAMES), "dev": (PIXELS, NAMES)}):
        with pytest.raises(UserError, match="expected \\(images, labels\\), or a dict of such pairs"):
            ImageFolderDataModule().set_samples(samples)
