"""The programs of the ResNet's README run as they stand there, beside the exported files and without this package."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ImageFolderDataModule
from recipes import ResNetFineTuner
from recipes.export import export

README = Path(__file__).parents[3] / "recipes" / "resnet" / "README.md"


def run_program(marker: str, folder: Path) -> list[str]:
    """The lines that the block with `marker` prints in a folder, in a process that finds no module of this checkout."""
    blocks = re.findall(r"```python(?: title=[^\n]*)?\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = (block for block in blocks if marker in block)
    command = [sys.executable, "-I", "-c", text]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_photograph_comes_to_an_onnx_file_as_to_predict(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(1)
    options = {"num_classes": 10, "image_size": 64, "weights": "none"}
    recipe = ResNetFineTuner(**options)
    recipe.network(torch.randn(16, 3, 64, 64))  # BatchNorm has statistics then.
    recipe.eval()
    smooth = np.random.default_rng(1).integers(256, size=(6, 9, 3), dtype=np.uint8)
    Image.fromarray(smooth).resize((300, 200), Image.Resampling.BICUBIC).save(tmp_path / "photo.jpg")
    data = ImageFolderDataModule(dataset="digits", image_size=64, predict_inputs=[str(tmp_path / "photo.jpg")])
    checkpoint = {"state_dict": recipe.state_dict(), "ImageFolderDataModule": data.state_dict()}
    settings = {"dataset": "digits", "image_size": 64}
    torch.save(checkpoint | {"datamodule_hyper_parameters": settings}, tmp_path / "best.ckpt")
    for kind, name in (("onnx", "resnet.onnx"), ("state-dict", "resnet.pt")):
        export(ResNetFineTuner(**options), str(tmp_path / "best.ckpt"), kind, str(tmp_path / name))
    name, probability = run_program("resnet.onnx", tmp_path)[0].split()

    data.setup("predict")
    (batch,) = data.predict_dataloader()
    with torch.no_grad():
        expected = recipe.network(data.on_after_batch_transfer(batch, 0)[0]).softmax(1)[0]
    assert expected[int(name)] == pytest.approx(float(probability), rel=0.02)
    run_program("resnet.pt", tmp_path)
