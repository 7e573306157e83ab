"""Predictions from Python and from the command line, and the preprocessing that they share with exports."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from datamodules import ImageFolderDataModule, MNISTDataModule, TranslationDataModule, UserError
from datamodules.images.arrays import collect_images
from datamodules.images.builtin_datasets import load_digits
from recipes import MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator, predict
from recipes.inputs import new_data_module, preprocessing
from recipes.prediction import all_rows
from tests.support.command_lines import MNIST, typed
from tests.support.tables import quiet_trainer


def _trained(recipe: pl.LightningModule, data: pl.LightningDataModule, path: Path, **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(**options)
    trainer.fit(recipe, data)
    trainer.save_checkpoint(path)
    return trainer


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A checkpoint of a network that has learned the bundled digits for two epochs, and its test accuracy."""
    path = tmp_path_factory.mktemp("digits") / "best.ckpt"
    recipe, data = MNISTClassifier(), MNISTDataModule(dataset="digits", batch_size=64)
    trainer = _trained(recipe, data, path, max_epochs=2)
    return path, trainer.test(recipe, data, verbose=False)[0]["test/accuracy"]


def _classes(rows: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([int(row["class"]) for row in rows])


def test_a_checkpoint_holds_the_preprocessing_of_its_data(digits):
    recipe = MNISTClassifier.load_from_checkpoint(digits[0])
    data = MNISTDataModule(dataset="digits")
    data.setup("test")
    inputs = torch.cat([batch for batch, _ in data.test_dataloader()])
    prepare = preprocessing(recipe)
    assert prepare is not None
    assert torch.equal(prepare(data._parts["test"].images), inputs)


def test_without_preprocessing_nothing_is_predicted():
    assert preprocessing(MNISTClassifier()) is None
    with pytest.raises(UserError, match="MNISTClassifier.load_from_checkpoint"):
        predict(MNISTClassifier(), np.zeros((28, 28), np.uint8))


def test_arrays_are_predicted_as_accurately_as_test_says(digits):
    path, accuracy = digits
    images, labels = load_digits()["test"]
    recipe = MNISTClassifier.load_from_checkpoint(path)
    rows = predict(recipe, images)
    assert float((_classes(rows) == labels).double().mean()) == pytest.approx(accuracy, abs=1e-7)
    with torch.no_grad():
        expected = recipe.eval()(preprocessing(recipe)(images[:, None])).softmax(1)
    assert torch.allclose(torch.tensor([row["probability"] for row in rows]), expected.max(1).values, atol=1e-5)


def test_images_are_taken_in_every_form(digits, tmp_path: Path):
    images = load_digits()["test"][0][:4].numpy()
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    recipe = MNISTClassifier.load_from_checkpoint(digits[0], top_k=2)
    expected = predict(recipe, list(map(Image.fromarray, images)))
    assert list(expected[0]) == ["file", "class", "probability", "class_2", "probability_2", "note"]
    for given in (
        images,
        torch.from_numpy(images)[:, None],
        images[..., None] / 255,
        images[:, None].repeat(3, 1).astype(np.float32) / 255,
        list(images.astype(np.int64)),
        str(tmp_path),
        [tmp_path / f"{i}.png" for i in range(4)],
        [images[:1], Image.fromarray(images[1]), str(tmp_path / "2.png"), torch.from_numpy(images[3])],
    ):
        rows = predict(recipe, given)
        assert [row["class"] for row in rows] == [row["class"] for row in expected]
        assert [row["probability"] for row in rows] == pytest.approx([row["probability"] for row in expected], abs=1e-5)


def test_only_a_color_network_reads_three_channels_as_one_image():
    pixels = np.zeros((3, 40, 40), np.uint8)
    assert collect_images(pixels, color=True).names == ["images[0]"]
    assert collect_images(pixels, color=False).names == ["images[0]", "images[1]", "images[2]"]
    assert len(collect_images(pixels.transpose(1, 2, 0), color=False)) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no image to predict"),
        (3, "images of int cannot be predicted"),
        (np.full((28, 28), 2.5), "the images are float64 from 2.5 to 2.5, expected .* floats from 0 to 1: pass images"),
        (np.array(["a"]), "<U1"),
    ],
)
def test_what_is_no_image_is_rejected(given, message):
    with pytest.raises(UserError, match=message):
        collect_images(given, color=False)


def test_predicting_leaves_the_modes_of_all_modules(tmp_path: Path):
    recipe = MNISTClassifier()
    _trained(recipe, MNISTDataModule(dataset="digits"), tmp_path / "a.ckpt", max_steps=1, limit_val_batches=0)
    recipe.train()
    recipe.network.block1.eval()
    modes = [module.training for module in recipe.modules()]
    images = load_digits()["test"][0][:8]
    rows = predict(recipe.double(), images)
    assert [module.training for module in recipe.modules()] == modes
    loaded = predict(MNISTClassifier.load_from_checkpoint(tmp_path / "a.ckpt"), images)
    assert [row["class"] for row in rows] == [row["class"] for row in loaded]


def test_an_input_without_a_prediction_says_why(digits, tmp_path: Path):
    good, blank, torn = (str(tmp_path / name) for name in ("good.png", "blank.png", "torn.png"))
    Image.fromarray(load_digits()["test"][0][0].numpy()).save(good)
    Image.new("RGB", (90, 60), (240, 230, 220)).save(blank)
    Path(torn).write_text("no image")
    recipe = MNISTClassifier.load_from_checkpoint(digits[0], top_k=1)
    rows = predict(recipe, [torn, good, good, blank, "missing.png"])
    assert [row["file"] for row in rows] == [torn, good, good, blank, "missing.png"]
    assert [row["class"] is None for row in rows] == [True, False, False, True, True]
    assert [row["note"] for row in rows] == [
        "cannot be read as an image: its content is not an image",
        None,
        None,
        "unclear: the image is blank",
        "cannot be read as an image: No such file or directory",
    ]
    assert [row["class"] for row in predict(recipe, blank)] == [None]
    recipe.min_confidence = 1.1
    assert predict(recipe, good)[0]["note"] == "unclear: low probability"


def test_the_command_ends_with_status_1_for_an_unreadable_input(digits, tmp_path: Path):
    Image.fromarray(load_digits()["test"][0][0].numpy()).save(tmp_path / "good.png")
    Image.new("L", (90, 60), 200).save(tmp_path / "blank.png")
    (tmp_path / "torn.png").write_text("no image")
    _trained(
        Seq2SeqTranslator(source_vocab_size=9, target_vocab_size=9, hidden_size=8),
        _Nothing(),
        tmp_path / "other.ckpt",
        max_steps=0,
    )
    saved = torch.load(digits[0])
    torch.save(saved | {"config": saved["hyper_parameters"] | {"precision": "bf16-mixed"}}, tmp_path / "bf16.ckpt")
    ckpt = f"predict --ckpt {digits[0]} --top-k 1"
    mixed, unclear, missing, other, bf16 = typed(
        tmp_path,
        f"{ckpt} torn.png blank.png good.png --output rows.json",
        f"{ckpt} blank.png",
        f"{ckpt} missing.png",
        "predict --ckpt other.ckpt good.png",
        "predict --ckpt bf16.ckpt good.png --output bf16.json",
        **MNIST,
    )
    assert mixed.status == 1
    assert "error: 1 of 3 inputs could not be read: torn.png cannot be read as an image" in mixed.err
    assert [line.split()[0] for line in mixed.out.splitlines()] == ["file", "torn.png", "blank.png", "good.png"]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["class"] is None for row in rows] == [True, True, False]
    assert rows[1]["note"] == "unclear: the image is blank"
    assert unclear.status == 0
    assert "unclear: the image is blank" in unclear.out
    assert missing.status == 2
    assert "error: missing.png cannot be read as an image: No such file or directory" in missing.err
    assert other.status == 2
    assert "other.ckpt is a checkpoint of the recipe seq2seq, and this is mnist" in other.err
    assert bf16.status == 0, bf16.err
    (row,) = predict(MNISTClassifier.load_from_checkpoint(tmp_path / "bf16.ckpt"), tmp_path / "good.png")
    assert [row | {"file": "good.png"}] == json.loads((tmp_path / "bf16.json").read_text())


class _Nothing(pl.LightningDataModule):
    def train_dataloader(self) -> list[Any]:
        return []


def test_a_resnet_predicts_images_of_any_form(tmp_path: Path):
    recipe = ResNetFineTuner(num_classes=10, weights="none", image_size=32, small_images=True)
    data = ImageFolderDataModule(dataset="digits", batch_size=8)
    _trained(recipe, data, tmp_path / "a.ckpt", max_steps=1, limit_val_batches=0)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 40, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "torn.png").write_text("no image")
    recipe = ResNetFineTuner.load_from_checkpoint(tmp_path / "a.ckpt")
    rows = predict(recipe, [pixels, tmp_path / "torn.png", tmp_path / "a.png", pixels.transpose(2, 0, 1) / 255])
    assert [row["class"] is None for row in rows] == [False, True, False, False]
    assert rows[1]["note"] == "cannot be read as an image: its content is not an image"
    assert rows[0]["probability"] == pytest.approx(rows[2]["probability"]) == pytest.approx(rows[3]["probability"])
    recipe.saved_data[1]["statistics"] = [[0.1] * 3, [0.9] * 3]
    assert new_data_module(recipe).pipeline.statistics == ((0.1,) * 3, (0.9,) * 3), "of the run, not of what lies here"


def test_a_translator_predicts_sentences_of_text_files(tmp_path: Path):
    data = TranslationDataModule(batch_size=16)
    recipe = Seq2SeqTranslator(**Seq2SeqTranslator.settings_from_data(data), hidden_size=16, beam=2)
    _trained(recipe, data, tmp_path / "a.ckpt", max_steps=1, limit_val_batches=0)
    recipe = Seq2SeqTranslator.load_from_checkpoint(tmp_path / "a.ckpt")
    rows = predict(recipe, ["je suis ici .", "  ", "tu es la ."])
    assert all(row["translation"] for row in rows[::2])
    assert rows[1]["translation"] is None
    assert rows[1]["note"] == "unclear: nothing is left in unicode normalization"
    assert predict(recipe, "je suis ici .")[0] == pytest.approx(rows[0])
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("je suis ici .\n\ntu es la .\n")
    (texts / "b.txt").write_bytes(b"caf\xe9 noir\nje suis ici .\n")
    files = [f"@{texts / name}" for name in ("a.txt", "b.txt")]
    data = TranslationDataModule(predict_inputs=[*files, "tu es la .", "missing.txt"])
    outputs = quiet_trainer().predict(recipe, data, ckpt_path=str(tmp_path / "a.ckpt"), weights_only=True)
    rows = all_rows(recipe, outputs, data)
    assert [row["translation"] is None for row in rows] == [False, True, False, True, False, False, True]
    assert rows[1]["note"] == "blank line"
    assert rows[3]["sentence"] == f"line 1 of {texts / 'b.txt'}"
    assert rows[3]["note"] == "is not in UTF-8; save the file as UTF-8"
    assert "missing.txt" in rows[6]["note"]
