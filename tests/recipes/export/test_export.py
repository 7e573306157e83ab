"""Exports hold the network of the checkpoint: they compute the same, on batches of other sizes too."""

import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from datamodules import MNISTDataModule, UserError
from recipes import MNISTClassifier, Seq2SeqTranslator, __version__
from recipes.export.exporter import export
from recipes.graphs import Graph
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
    return recipe.preprocessing()(images)


def run_file(path: Path, kind: str, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs of a file, with nothing of this package."""
    with torch.no_grad():
        if kind == "torchscript":
            return torch.jit.load(str(path))(images)
        return torch.export.load(str(path)).module()(images)


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


@pytest.mark.parametrize("kind", ["torchscript", "pt2"])
def test_a_graph_makes_probabilities_of_bytes_and_refuses_floats_and_other_sizes(kind: str, saved):
    recipe, checkpoint = saved
    path = export(MNISTClassifier(), str(checkpoint), kind).path
    images = torch.randint(256, (7, 1, 28, 28), dtype=torch.uint8)
    found = run_file(path, kind, images)
    with torch.no_grad():
        logits = recipe.network(preprocessed(recipe, checkpoint, images))
    assert torch.allclose(found["logits"], logits, rtol=1e-4, atol=1e-5)
    assert torch.allclose(found["probabilities"], logits.softmax(1), rtol=1e-4, atol=1e-5)
    for wrong in (images / 255, images[:, :, :14]):
        with pytest.raises((RuntimeError, AssertionError)):
            run_file(path, kind, wrong)


@pytest.mark.parametrize("kind", ["torchscript", "pt2"])
def test_without_preprocessing_a_graph_takes_normalised_images(kind: str, saved):
    recipe, checkpoint = saved
    exported = export(MNISTClassifier(), str(checkpoint), kind, include_preprocessing=False)
    assert exported.inputs == {
        "normalised_images": "float32 of shape (batch, 1, 28, 28): channels first, (pixels / 255 - mean) / std"
    }
    inputs = torch.randn(7, 1, 28, 28)
    with torch.no_grad():
        assert torch.allclose(run_file(exported.path, kind, inputs)["logits"], recipe.network(inputs), 1e-4, 1e-5)


def metadata_of(path: Path, kind: str) -> dict[str, Any]:
    """What a file says of itself, read with nothing of this package."""
    if kind == "state-dict":
        return torch.load(path, weights_only=True)
    if kind == "safetensors":
        with safe_open(path, "pt") as file:
            text = file.metadata()
    elif kind == "onnx":
        text = pytest.importorskip("onnx").load(path).metadata_props
        text = {entry.key: entry.value for entry in text}
    else:
        files = {"metadata.json": ""}
        loaders = {"torchscript": (torch.jit.load, "_extra_files"), "pt2": (torch.export.load, "extra_files")}
        load, name = loaders[kind]
        load(str(path), **{name: files})
        return json.loads(files["metadata.json"])
    return {key: value if key in ("recipe", "version", "layout") else json.loads(value) for key, value in text.items()}


@pytest.mark.parametrize("kind", ["safetensors", "state-dict", "torchscript", "pt2"])
def test_an_export_carries_preprocessing_class_names_and_what_rebuilds_the_network(kind: str, saved):
    recipe = MNISTClassifier(label_smoothing=0.25)
    metadata = metadata_of(export(recipe, str(saved[1]), kind).path, kind)
    assert metadata["class_names"] == [f"digit {i}" for i in range(10)]
    info = MNISTDataModule(dataset="digits").info
    assert (metadata["mean"], metadata["std"]) == ([info.mean], [info.std])
    assert (metadata["input_size"], metadata["layout"]) == ([1, 28, 28], "NCHW")
    assert (metadata["recipe"], metadata["version"]) == ("mnist", __version__)
    assert metadata["config"] == {"lr": 0.1}
    assert MNISTClassifier(**metadata["hyper_parameters"]).hparams == recipe.hparams
    if kind in ("torchscript", "pt2"):
        assert metadata["inputs"] == {
            "images": "uint8 of shape (batch, 1, 28, 28): channels first, pixels from 0 to 255"
        }


class TouchesFile:
    """Its unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["safetensors", "torchscript"])
def test_a_checkpoint_that_would_run_code_is_not_exported_and_runs_none(kind: str, saved, tmp_path: Path):
    checkpoint = torch.load(saved[1], weights_only=True)
    checkpoint["config"]["lr"] = TouchesFile(tmp_path / "ran")
    torch.save(checkpoint, saved[1])
    with pytest.raises(UserError, match=r"best\.ckpt holds code \(getattr\) and not only weights"):
        export(MNISTClassifier(), str(saved[1]), kind)
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]


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


def test_weights_in_another_type_of_numbers_keep_it(tmp_path):
    recipe = Plain().double()
    torch.save({"state_dict": recipe.state_dict()}, tmp_path / "best.ckpt")
    path = export(Plain(), str(tmp_path / "best.ckpt"), "safetensors", str(tmp_path / "out.safetensors")).path
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float64}


def test_the_input_of_a_network_without_known_preprocessing_is_what_it_takes(tmp_path: Path):
    torch.save({"state_dict": Plain().state_dict()}, tmp_path / "best.ckpt")
    exported = export(Plain(), str(tmp_path / "best.ckpt"), "torchscript")
    assert exported.inputs == {"inputs": "float32 of shape (batch, 1, 28, 28), as the network takes it"}
    assert run_file(exported.path, "torchscript", torch.randn(3, 1, 28, 28))["logits"].shape == (3, 10)
    assert not {"mean", "std"} & metadata_of(exported.path, "torchscript").keys()


@pytest.mark.parametrize("kind", ["state-dict", "torchscript"])
def test_an_output_that_is_a_folder_is_refused(kind: str, saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--output \. is a folder; name a file in it"):
        export(MNISTClassifier(), str(saved[1]), kind, ".")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="this system has no folder that nobody can write to")
@pytest.mark.parametrize("kind", ["state-dict", "torchscript"])
def test_an_output_that_cannot_be_written_is_named(kind: str, saved):
    with pytest.raises(UserError, match=r"/proc/x\.pt cannot be written: No such file or directory; pass another --o"):
        export(MNISTClassifier(), str(saved[1]), kind, "/proc/x.pt")


class SometimesNaN(MNISTClassifier):
    """A network that, built anew, returns NaN for single images."""

    builds = 0

    def build_network(self) -> nn.Module:
        network = super().build_network()
        self.builds += 1
        if self.builds > 1:
            network.register_forward_hook(lambda *call: call[-1] * (1 if len(call[-1]) > 1 else torch.nan))
        return network


def test_outputs_that_are_nan_for_one_batch_are_refused(saved):
    with pytest.raises(UserError, match="differ from the network's by nan"):
        export(SometimesNaN(), str(saved[1]), "state-dict")


SIZES = {"source_vocab_size": 11, "target_vocab_size": 12, "hidden_size": 8}


class ChangingStep(nn.Module):
    """Returns something else each time."""

    calls = 0

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"logits": inputs[1] + self.calls}


class ChangingTranslator(Seq2SeqTranslator):
    """The step of its decoder cannot be exported."""

    def graphs(self, include_preprocessing: bool = True) -> list[Graph]:
        encoder, decoder = super().graphs(include_preprocessing)
        return [encoder, replace(decoder, module=ChangingStep())]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "torchscript"),
        ({"cell": "lstm", "num_layers": 2, "input_feeding": True}, "torchscript"),
        ({"network": "transformer", "num_layers": 2}, "torchscript"),
        ({"network": "transformer", "num_layers": 2}, "pt2"),
        ({}, "pt2"),
        ({"cell": "lstm", "num_layers": 2, "input_feeding": True}, "pt2"),
    ],
    ids=str,
)
def test_a_translator_is_exported_as_an_encoder_and_a_step_of_the_decoder(options: dict, kind: str, tmp_path: Path):
    recipe = Seq2SeqTranslator(**SIZES, **options)
    torch.save({"state_dict": recipe.state_dict()}, tmp_path / "best.ckpt")
    folder = export(Seq2SeqTranslator(**SIZES, **options), str(tmp_path / "best.ckpt"), kind).path
    ending = ".pt2" if kind == "pt2" else ".torchscript.pt"
    names = [f"decoder{ending}", f"encoder{ending}", "metadata.json"]
    assert (folder.name, sorted(file.name for file in folder.iterdir())) == (f"best-{kind}", names)
    files = [str(folder / f"{name}{ending}") for name in ("encoder", "decoder")]
    encoder, decoder = (torch.export.load(f).module() if kind == "pt2" else torch.jit.load(f) for f in files)
    source, lengths, target = (
        torch.tensor([[4, 5, 6, 2], [7, 2, 0, 0]]),
        torch.tensor([4, 2]),
        torch.tensor([[1, 5], [1, 9]]),
    )
    with torch.no_grad():
        encoded = encoder(source)
        state, logits = encoded.pop("state"), []
        for tokens in target.unbind(1):
            step = decoder(tokens, state, *encoded.values())
            state = step["next_state"]
            logits.append(step["logits"])
        following = torch.cat((target, torch.tensor([[2], [2]])), 1)
        expected = recipe.eval().network(source, lengths, following, torch.arange(4))
    assert torch.allclose(torch.stack(logits, 1).flatten(0, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_recurrent_encoder_in_pt2_takes_any_batch_and_length(cell: str, tmp_path: Path):
    recipe = Seq2SeqTranslator(**SIZES, cell=cell).eval()
    torch.save({"state_dict": recipe.state_dict()}, tmp_path / "best.ckpt")
    folder = export(Seq2SeqTranslator(**SIZES, cell=cell), str(tmp_path / "best.ckpt"), "pt2").path
    encoder, expected = torch.export.load(str(folder / "encoder.pt2")).module(), recipe.graphs()[0].module
    with torch.no_grad():
        for batch, length in [(1, 1), (1, 2), (5, 1), (2, 3), (3, 40)]:
            source = torch.randint(4, 11, (batch, length))
            source[-1, (length + 1) // 2 :] = 0
            found = encoder(source)
            for name, value in expected(source).items():
                torch.testing.assert_close(found[name], value, msg=f"{name}, {batch} x {length}")


def test_recurrent_layers_that_torch_fixes_to_one_length_are_refused_and_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.save({"state_dict": Seq2SeqTranslator(**SIZES).state_dict()}, tmp_path / "best.ckpt")

    def write() -> Path:
        return export(Seq2SeqTranslator(**SIZES), str(tmp_path / "best.ckpt"), "pt2").path

    shutil.rmtree(write())
    with monkeypatch.context() as patch:
        patch.setattr("recipes.export.graph_files._loops_of_any_length", nullcontext)
        with pytest.raises(UserError, match="unrolls recurrent layers for one length; pass --format onnx"):
            write()
    assert [file.name for file in tmp_path.iterdir()] == ["best.ckpt"]
    assert write().is_dir()  # After torch has traced the layers in its own way.


def test_of_an_export_of_several_files_all_are_written_or_none(tmp_path: Path):
    torch.save({"state_dict": Seq2SeqTranslator(**SIZES).state_dict()}, tmp_path / "best.ckpt")
    with pytest.raises(UserError, match="cannot write the decoder as torchscript"):
        export(ChangingTranslator(**SIZES), str(tmp_path / "best.ckpt"), "torchscript")
    assert [file.name for file in tmp_path.iterdir()] == ["best.ckpt"]


@pytest.mark.parametrize("kind", ["state-dict", "torchscript"])
def test_weights_that_are_nan_are_refused_by_name(kind: str, saved: tuple[MNISTClassifier, Path]) -> None:
    checkpoint = torch.load(saved[1], weights_only=True)
    checkpoint["state_dict"]["network.head.bias"][3] = torch.nan
    torch.save(checkpoint, saved[1])
    with pytest.raises(UserError, match=r"network.head.bias in .*best.ckpt is NaN: the training diverged"):
        export(MNISTClassifier(), str(saved[1]), kind)
    assert [file.name for file in saved[1].parent.iterdir()] == ["best.ckpt"]


def test_onnx_without_its_packages_says_what_to_install(saved, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])  # Nothing is found there.
    for name in ("onnx", "onnxruntime", "onnxscript"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UserError, match=r"onnx needs .*onnxruntime.*; run pip install 'lightning-recipes\[onnx\]'"):
        export(MNISTClassifier(), str(saved[1]), "onnx")
