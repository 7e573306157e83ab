import hashlib
import logging
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from datamodules.errors import UserError
from recipes.resnet import ResNetFineTuner, pretrained
from recipes.resnet.pretrained import download_weights
from recipes.weights import load_initial_weights, load_weights, read_weights
from tests.support.own_training import TrainedRecipe


class Net(nn.Module):
    """A ResNet in miniature: a convolution, a norm and a head."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, classes)


class Wrapped(nn.Module):
    """A network as an attribute of another module."""

    def __init__(self, name: str, network: nn.Module) -> None:
        super().__init__()
        self.add_module(name, network)


def _random(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator))
            else:
                value.fill_(7)
    return module


def _state(classes: int = 2, seed: int = 0) -> dict[str, Tensor]:
    return dict(_random(Net(classes), seed).state_dict())


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].cpu(), value), name


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("save", [save_file, torch.save])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".bin"])
def test_a_state_dict_comes_back_as_it_was_saved(tmp_path: Path, suffix: str, save: Any):
    path = tmp_path / f"net{suffix}"
    save(_state(), path)
    _assert_equal(read_weights(path), _state())
    _assert_equal(read_weights(str(path)), _state())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"state": {0: torch.ones(2)}}},
        lambda state: {"model": state, "optimizer": {}},
        lambda state: {**state, "_extra_state": None, "version": 3},
        lambda state: {"student": state, "optimizer": {"state": {"fc.weight": state}}, "epoch": torch.tensor(3)},
    ],
)
def test_the_tensors_are_found_under_any_key(tmp_path: Path, wrap: Any):
    torch.save(wrap(_state()), tmp_path / "a.pt")
    _assert_equal(read_weights(tmp_path / "a.pt"), _state())


def test_of_several_state_dicts_only_a_checkpoints_own_is_taken(tmp_path: Path):
    file, several = tmp_path / "a.pt", {"state_dict": _state(), "current_model_state": _state(seed=1)}
    torch.save(several | {"pytorch-lightning_version": "2.6.6"}, file)
    _assert_equal(read_weights(file), _state())
    torch.save(several, file)
    with pytest.raises(UserError, match=r"a\.pt holds several state dicts, state_dict, current_model_state; pass"):
        read_weights(file)


@pytest.mark.parametrize("save", [save_file, torch.save, partial(torch.save, _use_new_zipfile_serialization=False)])
def test_what_is_no_complete_file_is_rejected(tmp_path: Path, save: Any):
    save({"a": torch.rand(9_000)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for content in (whole[: len(whole) // 2], b"<html>Sign in</html>", b""):
        (tmp_path / "a.pt").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.pt is damaged, or neither torch.save\(\) nor safetensors wrote it"):
            read_weights(tmp_path / "a.pt")
    with pytest.raises(UserError, match="there is no file .*; pass weights='FILE' or weights='none'"):
        read_weights(tmp_path)


@pytest.mark.parametrize("content", [{"epoch": 3, "optimizer": {"state": {0: torch.ones(2)}}}, [torch.ones(2)]])
def test_a_file_without_named_tensors_is_rejected(tmp_path: Path, content: Any):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a\.pt holds no tensors by name; pass a file with the state_dict"):
        read_weights(tmp_path / "a.pt")


class Runs:
    """Its unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_would_run_code_is_rejected(tmp_path: Path, zipped: bool):
    options = {"_use_new_zipfile_serialization": zipped}
    torch.save({"state_dict": _state(), "x": Runs(tmp_path / "ran")}, tmp_path / "a.pt", **options)
    with pytest.raises(UserError, match=r"a\.pt holds code \((\S*Path\S*|getattr)\) and not only weights"):
        read_weights(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.module._orig_mod.net.backbone."])
@pytest.mark.parametrize("inside", ["", "network", "model"])
def test_wrappers_on_either_side_do_not_matter(prefix: str, inside: str):
    network = Net()
    module = Wrapped(inside, network) if inside else network
    report = load_weights(module, {prefix + name: value for name, value in _state().items()}, "a.pt")
    _assert_equal(_copy(network), _state())
    assert (report.skipped, report.new) == ({}, [])


def _layers(*layers: nn.Module) -> nn.Module:
    return Wrapped("layers", nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("file", "module", "foreign", "skip"),
    [
        # A deeper network, in a part that was loaded or in one of its own; and a file of a shallower one.
        (_layers(Net(), Net()), _layers(Net()), "layers.1.conv1.weight is not in the network", "layers.1.*"),
        (nn.Sequential(Net(), Net()), nn.Sequential(Net()), "1.conv1.weight is not in the network", "1"),
        (_layers(Net()), _layers(Net(), nn.Linear(3, 2)), "layers.1.weight is not in the file", "layers.1"),
        # A layer for other inputs is no head for other classes.
        (_layers(Net(), nn.Linear(4, 2)), _layers(Net(), nn.Linear(3, 2)), r"\(2, 4\) instead of \(2, 3\)", "layers.1"),
        # Parameters without the statistics of BatchNorm.
        (dict(Net().named_parameters()), Net(), "bn1.running_mean is not in the file", "bn1"),
    ],
)
def test_tensors_beyond_a_head_are_rejected_unless_left_out(file, module, foreign, skip):
    before, state = _copy(module), file if isinstance(file, dict) else file.state_dict()
    with pytest.raises(UserError, match=rf"another network: .*{foreign}.* as in weights_skip="):
        load_weights(module, state, "a.pt")
    _assert_equal(_copy(module), before)
    assert load_weights(module, state, "a.pt", weights_skip=skip).loaded


@pytest.mark.parametrize(
    "head", [{"head.weight": torch.ones(9, 4), "head.bias": torch.ones(9)}, {"fc.0.weight": torch.ones(2, 2)}]
)
def test_a_head_of_another_name_or_of_several_layers_is_left_out(head: dict[str, Tensor]):
    trunk = {name: value for name, value in _state().items() if not name.startswith("fc.")}
    assert load_weights(Net(), trunk | head, "a.pt").new == ["fc.weight", "fc.bias"]


def test_another_head_keeps_its_values():
    network = Net(classes=2)
    before = _copy(network)
    report = load_weights(network, _state(classes=1000), "big.pt")
    assert report.line() == (
        "weights from big.pt: 5 loaded, 2 skipped (fc.weight (1000, 4) instead of (2, 4), "
        "fc.bias (1000,) instead of (2,)), 2 new (fc.weight, fc.bias)"
    )
    after = _copy(network)
    for name, value in _state(classes=1000).items():
        assert torch.equal(after[name], before[name] if name.startswith("fc") else value), name


def test_counters_of_batch_norm_neither_count_nor_show():
    state = {name: value for name, value in _state().items() if not name.endswith("num_batches_tracked")}
    network = Net()
    report = load_weights(network, state, "a.pt", exact=True)
    assert (report.skipped, report.new, len(report.loaded)) == ({}, [], 7)
    assert network.bn1.num_batches_tracked == 0
    extra = {"weight": torch.ones(2, 4), "n.num_batches_tracked": torch.ones(())}
    assert load_weights(nn.Linear(4, 2), extra, "a.pt").skipped == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_are_converted_to_the_modules_precision(dtype: torch.dtype):
    linear = nn.Linear(2, 2)
    value = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    load_weights(linear, {"weight": value.to(dtype), "bias": torch.ones(2, dtype=dtype)}, "a.pt")
    assert linear.weight.dtype == torch.float32
    assert torch.equal(linear.weight, value)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"conv1.weight": torch.ones(4, 1, 3, 3)}, r"1 tensors match, and 4 do not: bn1.weight is not in the file, "),
        ({"layers.0.weight": torch.ones(4)}, r"0 tensors match, and 8 do not: layers.0.weight is not in the network, "),
        ({"conv1.weight": torch.ones(4, 1, 3, 3, dtype=torch.int8)}, "int8 instead of float32"),
    ],
)
def test_too_few_matches_are_rejected_without_a_change(state: dict[str, Tensor], message: str):
    network = Net()
    before = _copy(network)
    with pytest.raises(UserError, match=message):
        load_weights(network, state, "a.pt")
    _assert_equal(_copy(network), before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_rejected_by_name(value: float):
    state = _state()
    state["bn1.running_var"][1] = value
    state["fc.weight"][0, 0] = value
    network = Net()
    before = _copy(network)
    with pytest.raises(UserError, match=r"weights from a\.pt: bn1\.running_var has NaN or infinite values"):
        load_weights(network, state, "a.pt")
    _assert_equal(_copy(network), before)


class _NetRecipe(TrainedRecipe):
    """A recipe that trains `Net`."""

    def build_network(self) -> nn.Module:
        return Net()


def test_a_loaded_file_is_reported_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    torch.save({"state_dict": {f"network.{k}": v for k, v in _state(3).items()}}, tmp_path / "a.ckpt")
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        report = load_initial_weights(_NetRecipe(weights=str(tmp_path / "a.ckpt")))
    assert report is not None
    assert caplog.messages == [report.line()]
    assert report.line().startswith(f"weights from {tmp_path / 'a.ckpt'}: 5 loaded, 2 skipped (fc.weight (3, 4) ")
    with pytest.raises(UserError, match=r"5 tensors match, and 2 do not: fc.weight \(3, 4\)"):
        load_initial_weights(_NetRecipe(weights=str(tmp_path / "a.ckpt")), exact=True)


def test_layers_that_are_skipped_by_name_keep_their_values():
    network, before = Net(), _copy(Net())
    network.load_state_dict(before)
    report = load_weights(network, _state(), "a.pt", weights_skip=["network.fc", "*.bias"])
    assert report.loaded == ["conv1.weight", "bn1.weight", "bn1.running_mean", "bn1.running_var"]
    assert (report.not_chosen, report.new) == (["bn1.bias", "fc.weight", "fc.bias"], [])
    _assert_equal(_copy(network), _state() | {name: before[name] for name in report.not_chosen})
    for skip, message in (("head", "'conv1', 'bn1', 'fc', 'conv1.weight'"), ("*", "leaves no tensor")):
        with pytest.raises(UserError, match=re.escape(message)):
            load_weights(network, _state(), "a.pt", weights_skip=skip)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path / "hub" / "checkpoints"


def _published(state: dict[str, Tensor], folder: Path) -> Path:
    """A file whose name has the first digits of its digest, as torchvision's."""
    torch.save(state, folder / "net.pth", _use_new_zipfile_serialization=False)
    digest = hashlib.sha256((folder / "net.pth").read_bytes()).hexdigest()[:8]
    return (folder / "net.pth").rename(folder / f"net-{digest}.pth")


def test_weights_are_downloaded_once(cache, tmp_path, capfd):
    published = _published(_state(1000), tmp_path)
    path = download_weights(published.as_uri())
    _assert_equal(read_weights(path), _state(1000))
    assert list(cache.iterdir()) == [path] == [cache / published.name]
    published.unlink()
    assert download_weights(published.as_uri()) == path
    # Standard output is for results.
    assert capfd.readouterr().out == ""
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=r"net-\w+\.pth is damaged: its SHA-256 .*; delete it"):
        download_weights(published.as_uri())


def test_a_failed_download_says_what_to_pass(cache: Path, tmp_path: Path):
    (tmp_path / "net-00000000.pth").write_bytes(b"?")
    message = rf"could not download net-0+\.pth .*its SHA256 is .*, expected 0+\); download it .*{cache}.*, or pass "
    with pytest.raises(UserError, match=message):
        download_weights((tmp_path / "net-00000000.pth").as_uri())


def test_imagenet_is_torchvisions_newest_weights(cache, tmp_path, monkeypatch, caplog):
    from torchvision.models import ResNet18_Weights, resnet18

    source = _random(resnet18())
    url = _published(dict(source.state_dict()), tmp_path).as_uri()
    monkeypatch.setattr(ResNet18_Weights.DEFAULT.value, "url", url)
    recipe = ResNetFineTuner(num_classes=2)
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        report = load_initial_weights(recipe)
    assert report is not None
    assert report.line() == (
        "weights from ImageNet (resnet18): 100 loaded, 2 skipped (fc.weight (1000, 512) instead of (2, 512), "
        "fc.bias (1000,) instead of (2,)), 2 new (fc.weight, fc.bias)"
    )
    assert caplog.messages == [f"downloading {url}", report.line()]
    expected = {k: v for k, v in _copy(source).items() if not k.startswith("fc.")}
    _assert_equal({k: v for k, v in _copy(recipe.network).items() if not k.startswith("fc.")}, expected)


def test_published_densenets_have_the_names_of_todays_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.save(
        {f"features.denseblock1.denselayer1.{part}.2.weight": torch.ones(3) for part in ("norm", "conv")},
        tmp_path / "a",
    )
    monkeypatch.setattr(pretrained, "download_weights", lambda _: tmp_path / "a")
    names = {f"features.denseblock1.denselayer1.{part}2.weight" for part in ("norm", "conv")}
    assert pretrained.imagenet_weights("densenet121").keys() == names
