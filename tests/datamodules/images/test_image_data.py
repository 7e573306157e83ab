"""A data module of images is a source and a pipeline; the two with flags are nothing else."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import (
    FilePipeline,
    ImageDataModule,
    ImageFolderDataModule,
    MNISTDataModule,
    TensorPipeline,
    UserError,
    from_arrays,
)
from datamodules.images.decoding import evaluation_pixels
from datamodules.images.source import Source
from tests.support.tables import quiet_trainer

LABELS = np.arange(30) % 3
GRAY = np.random.default_rng(1).integers(0, 256, (30, 28, 28), dtype=np.uint8)
COLORED = np.random.default_rng(2).integers(0, 256, (30, 40, 36, 3), dtype=np.uint8)
SIZES = {"batch_size": 8, "eval_batch_size": 9, "val_fraction": 0.2, "test_fraction": 0.1}


def _source(pixels: np.ndarray) -> Source:
    return from_arrays({"train": (pixels, LABELS)})


def _batches(data: ImageDataModule) -> list[Any]:
    data.setup("fit")
    data.setup("test")
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    return [tensor for loader in loaders for batch in loader for tensor in batch]


@pytest.mark.parametrize(
    ("pixels", "pipeline", "flags"),
    [
        (GRAY, TensorPipeline(shift=1, invert=True), MNISTDataModule("custom", shift=1, invert=True, **SIZES)),
        (COLORED, FilePipeline(mixup=0.2), ImageFolderDataModule("folder", mixup=0.2, **SIZES)),
    ],
)
def test_the_flags_give_the_batches_of_a_source_in_a_pipeline(pixels, pipeline, flags):
    flags.set_samples(_source(pixels))
    plain = ImageDataModule(_source(pixels), pipeline, **SIZES)
    assert all(map(torch.equal, _batches(plain), _batches(flags)))
    assert plain.state_dict() == flags.state_dict()
    assert plain.hparams.items() <= flags.hparams.items()


def test_a_checkpoint_of_a_source_in_a_pipeline_is_plain(tmp_path: Path):
    class Mean(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (batch[0].mean() - self.weight) ** 2

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Mean(), ImageDataModule(_source(GRAY), TensorPipeline(), val_fraction=0))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["datamodule_hyper_parameters"]["shift"] == 2.0
    assert saved["ImageDataModule"] == {
        "dataset": "custom",
        "classes": ["0", "1", "2"],
        "invert": False,
        "borders": saved["ImageDataModule"]["borders"],
    }


def test_a_given_number_of_classes_holds_for_mixed_labels():
    data = ImageDataModule(_source(COLORED), FilePipeline(mixup=0.2), num_classes=5)
    data.setup("fit")
    assert next(iter(data.train_dataloader()))[1].shape[1] == 5
    assert (data.num_classes, data.class_names) == (5, ())


def test_a_label_out_of_range_is_rejected_by_either_pipeline():
    for pixels, pipeline in ((GRAY, TensorPipeline()), (COLORED, FilePipeline())):
        data = ImageDataModule(_source(pixels), pipeline, num_classes=2)
        with pytest.raises(UserError, match=r"label 2 at row 2 of the train labels is outside 0\.\.1"):
            data.setup("fit")


@pytest.mark.parametrize("size", [16, 64])
def test_evaluation_is_a_function_of_one_picture(size: int):
    data = ImageDataModule(_source(COLORED), FilePipeline(image_size=size), test_fraction=0.2)
    data.setup("test")
    ((images, _),) = data.test_dataloader()
    files = data._parts["test"].images.files
    pixels = torch.stack([evaluation_pixels(files.read(row), size) for row in range(len(files))])
    assert torch.equal(data.preprocessing()(pixels), images)


def test_a_folders_classes_are_known_before_auto_is_resolved(tmp_path: Path):
    for number in range(6):
        (tmp_path / f"{number % 3}").mkdir(exist_ok=True)
        Image.fromarray(GRAY[number]).save(tmp_path / f"{number % 3}" / f"{number}.png")
    data = MNISTDataModule(data_dir=str(tmp_path))
    assert (data.dataset, data.num_classes) == ("auto", 3)
