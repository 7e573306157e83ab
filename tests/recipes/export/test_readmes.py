"""The programs of the READMEs run as they stand there, beside the exported files and without this package."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ImageFolderDataModule, MNISTDataModule
from recipes import MNISTClassifier, ResNetFineTuner
from recipes.base import Recipe
from recipes.export import export

ROOT = Path(__file__).parents[3]


def program(readme: str, marker: str) -> str:
    """The block of Python in a README that contains `marker`."""
    blocks = re.findall(
        r"```python(?: title=[^\n]*)?\n(.*?)```", (ROOT / readme).read_text(encoding="utf-8"), re.DOTALL
    )
    (found,) = (block for block in blocks if marker in block)
    return found


def run_program(text: str, folder: Path) -> list[str]:
    """The lines that a program prints in a folder, in a process that finds no module of this checkout."""
    command = [sys.executable, "-I", "-c", text]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def saved(recipe: Recipe, data: MNISTDataModule | ImageFolderDataModule, folder: Path) -> str:
    """A checkpoint of a recipe whose BatchNorm has statistics."""
    recipe.train()
    recipe.network(torch.randn(16, *recipe.example_input_array.shape[1:]))
    recipe.eval()
    checkpoint = {"state_dict": recipe.state_dict(), type(data).__qualname__: data.state_dict()}
    torch.save(checkpoint | {"datamodule_hyper_parameters": dict(data.hparams)}, folder / "best.ckpt")
    return str(folder / "best.ckpt")


@pytest.fixture
def digits(tmp_path: Path) -> tuple[str, torch.Tensor]:
    """A checkpoint, and the probabilities of the images in ``images.npy`` and ``images.pt``, of shape (3, 10)."""
    torch.manual_seed(1)
    recipe, data = MNISTClassifier(), MNISTDataModule(dataset="digits")
    checkpoint = saved(recipe, data, tmp_path)
    images = torch.randint(256, (3, 1, 28, 28), dtype=torch.uint8)
    torch.save(images, tmp_path / "images.pt")
    np.save(tmp_path / "images.npy", images.numpy())
    with torch.no_grad():
        probabilities = recipe.network(data.preprocessing()(images)).softmax(1)
    return checkpoint, probabilities


def assert_printed(lines: list[str], probabilities: torch.Tensor) -> None:
    names, values = zip(*(line.split() for line in lines), strict=True)
    assert list(names) == [str(row.argmax().item()) for row in probabilities]
    assert np.allclose(np.array(values, float), probabilities.max(1).values, rtol=1e-4)


def test_a_state_dict_loads_into_a_plain_torch_program(digits, tmp_path: Path, monkeypatch, capsys):
    export(MNISTClassifier(), digits[0], "state-dict", str(tmp_path / "mnist.pt"))
    text = program("recipes/mnist/README.md", "mnist.pt")
    assert re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE) == ["torch", "torch"]
    monkeypatch.chdir(tmp_path)
    exec(text, {})
    assert_printed(capsys.readouterr().out.splitlines(), digits[1])


@pytest.mark.slow
def test_a_photograph_comes_to_an_onnx_file_as_to_predict(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(1)
    options = {"num_classes": 10, "image_size": 64, "weights": "none"}
    recipe = ResNetFineTuner(**options)
    smooth = np.random.default_rng(1).integers(256, size=(6, 9, 3), dtype=np.uint8)
    Image.fromarray(smooth).resize((300, 200), Image.Resampling.BICUBIC).save(tmp_path / "photo.jpg")
    data = ImageFolderDataModule(dataset="digits", image_size=64, predict_inputs=[str(tmp_path / "photo.jpg")])
    checkpoint = saved(recipe, ImageFolderDataModule(dataset="digits", image_size=64), tmp_path)
    export(ResNetFineTuner(**options), checkpoint, "onnx", str(tmp_path / "resnet.onnx"))
    export(ResNetFineTuner(**options), checkpoint, "state-dict", str(tmp_path / "resnet.pt"))
    name, probability = run_program(program("recipes/resnet/README.md", "resnet.onnx"), tmp_path)[0].split()

    data.setup("predict")
    (batch,) = data.predict_dataloader()
    with torch.no_grad():
        expected = recipe.network(data.on_after_batch_transfer(batch, 0)[0]).softmax(1)[0]
    assert expected[int(name)] == pytest.approx(float(probability), rel=0.02)
    run_program(program("recipes/resnet/README.md", "resnet.pt"), tmp_path)
