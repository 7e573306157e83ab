"""Exports hold the network of the checkpoint: they compute the same, on batches of other sizes too."""

import json
import logging
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.harness.pictures import write_pictures
from datamodules import ImageFolderDataModule, MNISTDataModule, UserError
from datamodules.images.decoding import crop_pct, evaluation_square
from datamodules.translation.text import Vocabulary
from recipes import MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator, __version__, predict
from recipes.export import export
from recipes.inputs import preprocessing
from recipes.photograph_graph import add_photograph_input
from tests.support.plain_recipe import Plain


@pytest.fixture
def saved(tmp_path) -> tuple[MNISTClassifier, Path]:
    """A network that was never trained but has statistics, and its checkpoint."""
    torch.manual_seed(1)
    recipe = MNISTClassifier()
    recipe.train()
    recipe.network(torch.randn(16, 1, 28, 28))
    data = MNISTDataModule(dataset="digits")
    checkpoint = {"state_dict": recipe.state_dict(), "class_names": [f"digit {i}" for i in range(10)]}
    checkpoint |= {"config": {"lr": 0.1}, "MNISTDataModule": data.state_dict()}
    torch.save(checkpoint | {"datamodule_hyper_parameters": dict(data.hparams)}, tmp_path / "best.ckpt")
    return recipe.eval(), tmp_path / "best.ckpt"


def preprocessed(recipe: MNISTClassifier, checkpoint: Path, images: torch.Tensor) -> torch.Tensor:
    recipe.on_load_checkpoint(torch.load(checkpoint, weights_only=True))
    return preprocessing(recipe)(images)


def run_file(path: Path, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs of a file, with nothing of this package."""
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    values = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip(names, map(torch.from_numpy, values), strict=True))


@pytest.mark.parametrize("kind", ["safetensors", "state-dict"])
def test_exported_weights_are_those_of_the_network(kind: str, saved):
    recipe, checkpoint = saved
    path = export(MNISTClassifier(), str(checkpoint), kind).path
    weights = load_file(path) if kind == "safetensors" else torch.load(path, weights_only=True)["state_dict"]
    network = MNISTClassifier(network="default").network.eval()
    network.load_state_dict(weights)
    inputs = torch.randn(7, 1, 28, 28)
    assert torch.equal(network(inputs), recipe.network(inputs))
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(["best.ckpt", path.name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_graph_makes_probabilities_of_bytes(dtype: torch.dtype, saved):
    recipe, checkpoint = saved
    torch.save(torch.load(checkpoint, weights_only=True) | {"state_dict": recipe.to(dtype).state_dict()}, checkpoint)
    recipe.float()
    path = export(MNISTClassifier(), str(checkpoint), "onnx").path
    images = torch.randint(256, (7, 1, 28, 28), dtype=torch.uint8)
    found = run_file(path, images=images)
    with torch.no_grad():
        logits = recipe.network(preprocessed(recipe, checkpoint, images))
    assert torch.allclose(found["logits"], logits, rtol=1e-4, atol=1e-5)
    assert torch.allclose(found["probabilities"], logits.softmax(1), rtol=1e-4, atol=1e-5)
    for wrong in (images.float() / 255, images[:, :, :14]):
        with pytest.raises(Exception, match="Unexpected input data type|Got invalid dimensions"):
            run_file(path, images=wrong)
    # The folders of the machine that wrote it are nobody's business.
    assert str(Path(__file__).parents[2]).encode() not in path.read_bytes()


LOADED = """
import sys, torch
torch.set_num_threads(1)
images, expected = torch.load("expected.pt")
program = torch.export.load("graph.pt2").module()
with torch.no_grad():
    outputs = [program(batch) for batch in images]
print(all(torch.equal(found[name], value) for found, right in zip(outputs, expected) for name, value in right.items()))
print("recipes" in sys.modules)
"""


def test_a_program_of_torch_has_the_bits_of_the_network(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    recipe, checkpoint = _resnet(tmp_path)
    exported = export(ResNetFineTuner(**recipe.hparams), str(checkpoint), "pt2", str(tmp_path / "graph.pt2"))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert list(exported.inputs) == ["images"]
    generator = torch.Generator().manual_seed(1)
    images = [torch.randint(256, (n, 3, 64, 64), dtype=torch.uint8, generator=generator) for n in (1, 2, 7)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        expected = [recipe.named_outputs(recipe.network(preprocessing(recipe)(batch))) for batch in images]
    torch.set_num_threads(threads)
    torch.save((images, expected), tmp_path / "expected.pt")
    command = [sys.executable, "-I", "-c", LOADED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
    with zipfile.ZipFile(tmp_path / "graph.pt2") as file:
        folder = str(Path(__file__).parents[2]).encode()
        assert not [name for name in file.namelist() if folder in file.read(name)]


def metadata_of(path: Path, kind: str) -> dict[str, Any]:
    """What a file says of itself, read with nothing of this package."""
    if kind == "pt2":
        content = {"metadata.json": ""}
        torch.export.load(str(path), extra_files=content)
        return json.loads(content["metadata.json"])
    if kind == "state-dict":
        return torch.load(path, weights_only=True)
    if kind == "safetensors":
        with safe_open(path, "pt") as file:
            text = file.metadata()
    else:
        text = pytest.importorskip("onnx").load(path).metadata_props
        text = {entry.key: entry.value for entry in text}
    return {
        key: value if key in ("recipe", "version", "layout", "normalization") else json.loads(value)
        for key, value in text.items()
    }


@pytest.mark.parametrize("kind", ["safetensors", "state-dict", "onnx", "pt2"])
def test_an_export_carries_what_rebuilds_the_network(kind: str, saved):
    recipe = MNISTClassifier(label_smoothing=0.25)
    metadata = metadata_of(export(recipe, str(saved[1]), kind).path, kind)
    assert metadata["class_names"] == [f"digit {i}" for i in range(10)]
    info = MNISTDataModule(dataset="digits").info
    assert (metadata["mean"], metadata["std"]) == (list(info.mean), list(info.std))
    assert (metadata["input_size"], metadata["layout"]) == ([1, 28, 28], "NCHW")
    assert (metadata["recipe"], metadata["version"]) == ("mnist", __version__)
    assert metadata["config"] == {"lr": 0.1}
    assert MNISTClassifier(**metadata["hyper_parameters"]).hparams == recipe.hparams
    if kind == "onnx":
        assert metadata["inputs"] == {
            "images": "uint8 of shape (batch, 1, 28, 28): channels first, pixels from 0 to 255"
        }


class Forgetful(MNISTClassifier):
    """Builds another network each time: its export is not what was trained."""

    def build_network(self) -> torch.nn.Module:
        self.scale = getattr(self, "scale", 0) + 1
        network = super().build_network()
        scale = self.scale
        network.register_forward_hook(lambda *call: call[-1] * scale)
        return network


def test_an_export_that_computes_something_else_is_not_written(saved):
    _, checkpoint = saved
    with pytest.raises(UserError, match="outputs of the state-dict file differ from the network's by 1.0e"):
        export(Forgetful(), str(checkpoint), "state-dict")
    assert [file.name for file in checkpoint.parent.iterdir()] == ["best.ckpt"]


def test_without_preprocessing_the_network_takes_its_own_input(tmp_path: Path):
    torch.save({"state_dict": Plain().state_dict()}, tmp_path / "best.ckpt")
    exported = export(Plain(), str(tmp_path / "best.ckpt"), "onnx")
    assert exported.inputs == {"inputs": "float32 of shape (batch, 1, 28, 28), as the network takes it"}
    assert run_file(exported.path, inputs=torch.randn(3, 1, 28, 28))["logits"].shape == (3, 10)
    assert not {"mean", "std"} & metadata_of(exported.path, "onnx").keys()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="this system has no folder that nobody can write to")
def test_outputs_that_cannot_be_written_are_rejected(saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for output, expected in {
        ".": r"output='\.' is a folder; name a file in it",
        "/proc/x.pt": r"/proc/x\.pt cannot be written: No such file or directory; pass another `output`",
    }.items():
        with pytest.raises(UserError, match=expected):
            export(MNISTClassifier(), str(saved[1]), "state-dict", output)


def test_a_translator_is_exported_with_its_vocabularies(tmp_path: Path):
    sizes = {"source_vocab_size": 5, "target_vocab_size": 6, "hidden_size": 8}
    recipe = Seq2SeqTranslator(**sizes)
    recipe.vocabularies, recipe.normalization = (Vocabulary.of(["le"]), Vocabulary.of(["the", "a"])), "tutorial"
    checkpoint: dict[str, Any] = {"state_dict": recipe.state_dict()}
    recipe.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "best.ckpt")
    for kind in ("state-dict", "safetensors"):
        path = export(Seq2SeqTranslator(**sizes), str(tmp_path / "best.ckpt"), kind).path
        metadata = metadata_of(path, kind)
        assert [*metadata["source_vocabulary"][4:], *metadata["target_vocabulary"][4:]] == ["le", "the", "a"]
        assert metadata["normalization"] == "tutorial"
    with pytest.raises(UserError, match="seq2seq cannot be written as onnx: .* pass format='safetensors'"):
        export(Seq2SeqTranslator(**sizes), str(tmp_path / "best.ckpt"), "onnx")


def test_weights_that_are_nan_are_rejected_by_name(saved: tuple[MNISTClassifier, Path]) -> None:
    checkpoint = torch.load(saved[1], weights_only=True)
    checkpoint["state_dict"]["network.head.bias"][3] = torch.nan
    torch.save(checkpoint, saved[1])
    with pytest.raises(UserError, match=r"network.head.bias in .*best.ckpt is NaN: the training diverged"):
        export(MNISTClassifier(), str(saved[1]), "state-dict")
    assert [file.name for file in saved[1].parent.iterdir()] == ["best.ckpt"]


def test_onnx_without_its_packages_says_what_to_install(saved, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])  # Nothing is found there.
    for name in ("onnx", "onnxruntime", "onnxscript"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UserError, match=r"onnx needs .*onnxruntime.*; run pip install -e '.\[onnx\]'"):
        export(MNISTClassifier(), str(saved[1]), "onnx")


# The programs of docs/recipes/resnet-evaluation-export.md, as they stand there


PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "resnet-evaluation-export.md"


def program_of(marker: str) -> str:
    """The block of the page with `marker`."""
    blocks = re.findall(r"```python(?: title=[^\n]*)?\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = (block for block in blocks if marker in block)
    return text


def _resnet(folder: Path, size: int = 64) -> tuple[ResNetFineTuner, Path]:
    """A network with statistics, whose classes depend on the image, and its checkpoint."""
    torch.manual_seed(1)
    options = {"num_classes": 10, "image_size": size, "weights": "none", "arch": "cifarnet"}
    recipe = ResNetFineTuner(**options)
    recipe.network(torch.randn(64, 3, size, size))
    data = ImageFolderDataModule(dataset="digits", image_size=size)
    checkpoint = {"state_dict": recipe.state_dict(), "ImageFolderDataModule": data.state_dict()}
    settings = {"dataset": "digits", "image_size": size}
    torch.save(checkpoint | {"datamodule_hyper_parameters": settings}, folder / "best.ckpt")
    recipe.on_load_checkpoint(torch.load(folder / "best.ckpt", weights_only=True))
    return recipe.eval(), folder / "best.ckpt"


def test_the_program_gives_the_class_of_predict_for_any_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("onnxruntime")
    recipe, checkpoint = _resnet(tmp_path)
    exported = export(ResNetFineTuner(**recipe.hparams), str(checkpoint), "onnx", str(tmp_path / "resnet.onnx"))
    assert exported.inputs == {
        "image": "uint8 of shape (1, height, width, 3): one upright RGB image of any size, pixels from 0 to 255"
    }
    monkeypatch.chdir(tmp_path)
    program = program_of("resnet.onnx")
    paths = write_pictures(tmp_path / "pictures")
    differences = []
    for path, row in zip(paths, predict(recipe, list(map(str, paths))), strict=True):
        names: dict[str, Any] = {}
        exec(program.replace("photo.jpg", str(path)), names)
        probabilities = names["probabilities"][0]
        differences.append(abs(float(probabilities.max()) - row["probability"]))
        if np.diff(np.sort(probabilities)[-2:]) > 0.002:
            assert str(probabilities.argmax()) == row["class"], path.name
    assert max(differences) < 0.001
    Image.fromarray(np.full((40, 40), 4000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match="more than 8 bits"):
        exec(program.replace("photo.jpg", "deep.png"), {})


@pytest.mark.parametrize("size", [48, 96])
def test_the_graph_computes_the_pixels_of_evaluation(size: int):
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    image = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, ["batch", 3, size, size])
    pixels = onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.UINT8, ["batch", 3, size, size])
    identity = onnx.helper.make_node("Identity", ["images"], ["pixels"])
    graph = onnx.helper.make_graph([identity], "network", [image], [pixels])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    add_photograph_input(model, size, crop_pct(size))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    generator = torch.Generator().manual_seed(1)
    differences = torch.zeros(256, dtype=torch.int64)
    for height, width in ((1, 1), (1, 300), (300, 1), (5, 7), (55, 56), (96, 110), (110, 110), (301, 203), (997, 640)):
        photograph = torch.randint(256, (1, height, width, 3), dtype=torch.uint8, generator=generator)
        (found,) = session.run(None, {"image": photograph.numpy()})
        expected = evaluation_square(photograph[0].permute(2, 0, 1), size)
        differences += (torch.from_numpy(found)[0].int() - expected.int()).abs().flatten().bincount(minlength=256)
    # A sum near a tie may be rounded to the other side, since onnxruntime adds in another order.
    assert differences[2:].sum() == 0
    assert differences[1] <= 2e-3 * differences.sum(), differences[:3]


def test_a_batch_of_the_networks_size_is_the_other_graph(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    recipe, checkpoint = _resnet(tmp_path)
    exported = export(ResNetFineTuner(**recipe.hparams), str(checkpoint), "onnx", graph="batch")
    images = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        expected = recipe.network(preprocessing(recipe)(images))
    assert torch.allclose(run_file(exported.path, images=images)["logits"], expected, rtol=1e-3, atol=1e-4)


def test_a_graph_of_an_image_needs_a_recipe_that_crops(saved: tuple[MNISTClassifier, Path]):
    with pytest.raises(UserError, match="graph='image': mnist does not know .*; pass graph='batch'"):
        export(MNISTClassifier(), str(saved[1]), "onnx", graph="image")


@pytest.mark.slow
def test_the_program_of_a_state_dict_builds_the_network(tmp_path: Path):
    options = {"num_classes": 10, "image_size": 64, "weights": "none"}
    recipe = ResNetFineTuner(**options)
    torch.save({"state_dict": recipe.state_dict(), "class_names": [*map(str, range(10))]}, tmp_path / "best.ckpt")
    export(ResNetFineTuner(**options), str(tmp_path / "best.ckpt"), "state-dict", str(tmp_path / "resnet.pt"))
    command = [sys.executable, "-I", "-c", program_of("resnet.pt")]
    subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
