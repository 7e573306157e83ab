"""Exports hold the network of the checkpoint: they compute the same, on batches of other sizes too."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from datamodules import UserError
from recipes import MNISTClassifier, Seq2SeqTranslator
from recipes.cli.export import export
from tests.support.plain_recipe import Plain


@pytest.fixture
def saved(tmp_path) -> tuple[MNISTClassifier, Path]:
    """A network that was never trained but has statistics, and its checkpoint."""
    torch.manual_seed(1)
    recipe = MNISTClassifier()
    recipe.train()
    recipe.network(torch.randn(16, 1, 28, 28))
    checkpoint = {"state_dict": recipe.state_dict(), "class_names": [str(i) for i in range(10)], "config": {"lr": 0.1}}
    torch.save(checkpoint, tmp_path / "best.ckpt")
    return recipe.eval(), tmp_path / "best.ckpt"


@pytest.mark.parametrize("kind", ["safetensors", "state-dict", "torchscript", "pt2"])
def test_an_export_computes_what_the_network_does(kind, saved):
    recipe, checkpoint = saved
    path = export(MNISTClassifier(), str(checkpoint), kind).path
    assert path.parent == checkpoint.parent
    inputs = torch.randn(7, 1, 28, 28)
    if kind == "torchscript":
        network = torch.jit.load(str(path))
    elif kind == "pt2":
        network = torch.export.load(str(path)).module()
    else:
        network = MNISTClassifier(network="default").network.eval()
        network.load_state_dict(load_file(path) if kind == "safetensors" else torch.load(path, weights_only=True))
    with torch.no_grad():
        assert torch.allclose(network(inputs), recipe.network(inputs), rtol=1e-4, atol=1e-5)
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(["best.ckpt", path.name])


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


def test_a_translator_exports_its_weights_and_refuses_a_graph_with_the_reason(tmp_path):
    sizes = {"source_vocab_size": 11, "target_vocab_size": 12, "hidden_size": 8, "embedding_size": 8}
    torch.manual_seed(1)
    recipe = Seq2SeqTranslator(**sizes)
    torch.save({"state_dict": recipe.state_dict()}, tmp_path / "best.ckpt")
    path = export(Seq2SeqTranslator(**sizes), str(tmp_path / "best.ckpt"), "safetensors").path
    weights = load_file(path)
    assert weights.keys() == recipe.network.state_dict().keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in recipe.network.state_dict().items())
    for kind in ("torchscript", "onnx", "pt2"):
        with pytest.raises(UserError, match="a search whose length depends on the tokens.*--format safetensors"):
            export(Seq2SeqTranslator(**sizes), str(tmp_path / "best.ckpt"), kind)


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is not None, reason="onnxruntime is installed")
def test_onnx_without_its_packages_says_what_to_install(saved):
    with pytest.raises(UserError, match=r"onnx needs .*onnxruntime.*; run pip install 'lightning-recipes\[onnx\]'"):
        export(MNISTClassifier(), str(saved[1]), "onnx")


@pytest.mark.slow
def test_an_onnx_file_computes_what_the_network_does_wherever_it_is_moved(saved, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    recipe, checkpoint = saved
    path = export(MNISTClassifier(), str(checkpoint), "onnx").path
    path = path.rename(tmp_path / "alone.onnx")
    session, inputs = runtime.InferenceSession(str(path)), torch.randn(7, 1, 28, 28)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    assert torch.allclose(torch.from_numpy(outputs), recipe.network(inputs), rtol=1e-4, atol=1e-4)
