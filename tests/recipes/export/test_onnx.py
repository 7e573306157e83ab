"""ONNX files, read and run with onnxruntime and numpy, give the scores of the checkpoint."""

import gzip
import json
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest

from datamodules import MNISTDataModule
from recipes import MNISTClassifier
from recipes.base import Recipe
from recipes.export import export
from tests.support.tables import QUIET

runtime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")


def trained(recipe: Recipe, data: pl.LightningDataModule, folder: Path, **options) -> tuple[pl.Trainer, Path]:
    """A Trainer that has trained a recipe, and its checkpoint."""
    options = {"max_epochs": 1, "enable_progress_bar": False, "enable_checkpointing": False} | QUIET | options
    trainer = pl.Trainer(**options)
    trainer.fit(recipe, data)
    trainer.save_checkpoint(folder / "best.ckpt")
    return trainer, folder / "best.ckpt"


def first_images(folder: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, of shape (count, 1, 28, 28), and labels of MNIST's test files, as another program reads them."""
    images = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28)
    return pixels[:count], np.frombuffer(labels, np.uint8, offset=8)[:count]


def test_bytes_in_give_the_accuracy_of_test_on_a_thousand_images(shared_data: Path, tmp_path: Path):
    data = MNISTDataModule(data_dir=str(shared_data / "mnist"), dataset="mnist", eval_batch_size=250)
    recipe = MNISTClassifier()
    trainer, checkpoint = trained(
        recipe, data, tmp_path, limit_train_batches=12, limit_val_batches=0, limit_test_batches=4
    )
    (scores,) = trainer.test(recipe, data, verbose=False)
    path = export(MNISTClassifier(), str(checkpoint), "onnx").path.rename(tmp_path / "alone.onnx")

    session = runtime.InferenceSession(path)
    images, labels = first_images(shared_data / "mnist", 1000)
    logits, probabilities = session.run(["logits", "probabilities"], {"images": images})
    accuracy = (logits.argmax(1) == labels).mean()
    assert 0.5 < accuracy < 1
    assert accuracy == pytest.approx(scores["test/accuracy"], abs=1e-7)
    assert np.allclose(probabilities.sum(1), 1)

    described = session.get_modelmeta().custom_metadata_map
    assert json.loads(described["class_names"]) == list("0123456789")
    assert json.loads(described["mean"]) == list(data.info.mean)
    assert described["layout"] == "NCHW"
    for wrong in (images / np.float32(255), images[:, :, :14]):
        with pytest.raises(Exception, match="Unexpected input data type|Got invalid dimensions"):
            session.run(None, {"images": wrong})
    # The folders of the machine that wrote it are nobody's business.
    assert str(Path(__file__).parents[3]).encode() not in path.read_bytes()
