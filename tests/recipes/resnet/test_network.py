"""Networks that `arch` names: how they are built, their layers by name, and how they are trained and saved."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from callbacks.freezing import freeze_layers
from datamodules.errors import UserError
from recipes.resnet import pretrained
from recipes.resnet.feature_cache import head_to_train
from recipes.resnet.layers import last_block_of, layers_of
from recipes.resnet.network import build_network
from recipes.resnet.pretrained import download_weights, published_weights, weights_statistics
from recipes.resnet.recipe import ResNetFineTuner
from recipes.weights import load_initial_weights
from tests.support.ranks import free_port

# Networks of torchvision and timm: side of the images, the last block.
FAMILIES = {
    "convnext_tiny": (64, "features.7"),
    "densenet121": (64, "features.denseblock4"),
    "efficientnet_b0": (64, "features.8"),
    "googlenet": (64, "inception5b"),
    "maxvit_t": (224, "blocks.3"),
    "mobilenet_v3_small": (64, "features.12"),
    "resnet18": (64, "layer4"),
    "shufflenet_v2_x0_5": (64, "conv5"),
    "squeezenet1_1": (64, "features.12"),
    "swin_t": (64, "features.7"),
    "vit_b_32": (64, "encoder.layers.encoder_layer_11"),
    "timm:test_efficientnet": (64, "conv_head"),
    "timm:test_vit": (64, "blocks.5"),
}
QUICK = ("mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "googlenet", "resnet18", "timm:test_vit")
SMALL = dict.fromkeys(("resnet20", "cifarnet", "cifarnet_wide"), (32, "layer3"))


@pytest.mark.parametrize(
    "arch", [*SMALL, *QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK)]
)
def test_layers_are_the_modules_up_to_the_head(arch: str):
    size, block = (SMALL | FAMILIES)[arch]
    if arch.startswith("timm:"):
        pytest.importorskip("timm")
    network = build_network(arch, 3, size)
    state = copy.deepcopy(network.state_dict())
    assert last_block_of(network, torch.zeros(1, 3, size, size)) == block
    assert all(layer.training for layer in network.modules())
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    held = [p for _, modules in layers_of(network) for module in modules for p in module.parameters()]
    assert len(set(held)) == len(held)
    assert {name for name, p in network.named_parameters() if p not in set(held)} <= {
        *("class_token", "encoder.pos_embedding", "cls_token", "pos_embed", "reg_token")
    }
    assert len(layers_of(network)) > 4


@pytest.mark.parametrize("arch", [*SMALL, *QUICK])
def test_a_new_head_begins_about_as_wide_as_a_linear_layer(arch: str):
    if arch.startswith("timm:"):
        pytest.importorskip("timm")
    for classes in (2, 10, 1000):
        network = build_network(arch, classes, FAMILIES.get(arch, (224,))[0])
        layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        linear = [layer for layer in layers if isinstance(layer, nn.Linear) and layer.out_features == classes]
        for head in linear or layers[-1:]:
            assert len(head.weight) == classes, arch
            # The weights of `nn.Linear` deviate by 1 / sqrt(3 inputs).
            assert head.weight.std() <= 2 / (3 * head.weight[0].numel()) ** 0.5, (arch, classes)
            assert head.bias is None or head.bias.abs().max() <= 2 / head.weight[0].numel() ** 0.5, (arch, classes)


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (partial(build_network, "resnet18", 2), ["stem", "layer1", "layer2", "layer3", "layer4", "fc"]),
        (partial(build_network, "resnet20", 2), ["stem", "layer1", "layer2", "layer3", "linear"]),
        (nn.Identity, ["network"]),
    ],
)
def test_layers_have_the_names_of_modules(network: Callable[[], nn.Module], names: list[str]):
    assert [name for name, _ in layers_of(network())] == names


class _Branches(nn.Module):
    """Two ways from the images to the head, a shared layer, a parameter of its own and one that may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.shared = nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.register_buffer("shift", torch.zeros(1, 4, 1, 1))
        self.head = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        both = self.shared(self.first(images) + self.second(images)) * self.scale + self.shift
        return self.head(self.shared(both).mean((2, 3)))


class _Own(ResNetFineTuner):
    def build_network(self) -> nn.Module:
        return _Branches()


def test_build_network_alone_is_enough_for_freezing():
    recipe = _Own(num_classes=2, image_size=16, weights="some.pt", lr=1.0, layer_lr_decay=0.5)
    assert recipe.hparams.freeze_until == "shared"
    groups = recipe.configure_optimizers()["optimizer"].param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, recipe.parameters()))
    assert [group["initial_lr"] for group in groups if group["name"].startswith("head")] == [10.0, 10.0]


class _DropsOut(nn.Module):
    """A network with dropout in its own forward pass, before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.conv(images).mean((2, 3)), training=self.training))


class _Scales(_DropsOut):
    """A network that changes the output of its head."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return 2 * self.head(self.conv(images).mean((2, 3)))


@pytest.mark.parametrize(
    ("build", "until", "head", "reason"),
    [
        (partial(build_network, "mobilenet_v3_small", 2), "classifier.3", "classifier.3", ""),
        (partial(build_network, "mobilenet_v3_small", 2), "classifier", "classifier", ""),
        (_DropsOut, "head", "", "the forward pass differs in training"),
        (_Scales, "head", "", "head does not end the forward pass"),
    ],
)
def test_the_head_is_what_can_train_on_its_inputs(build: Callable[[], nn.Module], until: str, head: str, reason: str):
    network = build()
    freeze_layers(network, until=until)
    assert head_to_train(network, torch.rand(1, 3, 32, 32)) == (head, reason)


def test_a_network_of_your_own_begins_with_new_weights():
    own, given = _Own(num_classes=2), ResNetFineTuner(num_classes=2)
    assert (own.hparams.weights, own.hparams.freeze_until, own.hparams.lr) == ("none", None, 0.001)
    assert (given.hparams.weights, given.hparams.freeze_until) == ("imagenet", "layer4")


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("convnet_tiny", r"no architecture 'convnet_tiny'; did you mean convnext_tiny.*timm:NAME"),
        ("timm:resnet181", r"timm .* has no model 'resnet181'; did you mean timm:resnet18"),
    ],
)
def test_an_unknown_name_is_rejected_with_those_that_are_like_it(arch: str, message: str):
    if arch.startswith("timm:"):
        pytest.importorskip("timm")
    with pytest.raises(UserError, match=message):
        ResNetFineTuner(arch, 2, weights="none")


def test_a_model_of_timm_without_timm_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"needs timm; run pip install -e '.\[timm\]'"):
        ResNetFineTuner("timm:resnet18", 2, weights="none")


@pytest.mark.parametrize("arch", ["googlenet", "inception_v3"])
def test_networks_with_auxiliary_outputs_give_logits(arch: str, tmp_path: Path):
    import torchvision

    published = torchvision.models.get_model(arch, aux_logits=True, init_weights=False).state_dict()
    torch.save(published, tmp_path / "published.pth")
    recipe = ResNetFineTuner(arch, 2, 96, weights=str(tmp_path / "published.pth"), freeze_until="none").train()
    assert load_initial_weights(recipe).new == ["fc.weight", "fc.bias"]
    assert recipe(torch.randn(2, 3, 96, 96)).shape == (2, 2)


def test_a_transformer_is_built_for_the_size_of_the_images(monkeypatch: pytest.MonkeyPatch):
    published = build_network("vit_b_32", 2, 224).state_dict()
    monkeypatch.setattr(pretrained, "imagenet_weights", lambda _: dict(published))
    build_network("vit_b_32", 2, 64).load_state_dict(published_weights("vit_b_32", 64))
    with pytest.raises(UserError, match=r"vit_b_32 .*images of 100 pixels.*another `image_size`"):
        build_network("vit_b_32", 2, 100)


def test_a_size_that_a_network_cannot_take_is_rejected():
    with pytest.raises(UserError, match=r"cannot take images of 16 x 16 pixels .*another `image_size`"):
        ResNetFineTuner("alexnet", 2, image_size=16, weights="some.pt")
    with pytest.raises(UserError, match=r"small_images=True.*shufflenet_v2_x0_5 is none"):
        ResNetFineTuner("shufflenet_v2_x0_5", 2, weights="none", small_images=True)


def test_timm_weights_come_from_the_file_that_an_error_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timm = pytest.importorskip("timm")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    nowhere = f"http://127.0.0.1:{free_port()}/model"
    monkeypatch.setattr(pretrained, "download_weights", lambda _, name: download_weights(nowhere, name=name))
    with pytest.raises(UserError, match=r"download.*refused.*copy it to (\S+), or pass weights='FILE'") as caught:
        published_weights("timm:test_resnet", 64)
    (place,) = (word.rstrip(",") for word in str(caught.value).split() if word.startswith(str(tmp_path)))
    published = timm.create_model("test_resnet").state_dict()
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    save_file(published, place)
    loaded = published_weights("timm:test_resnet", 64)
    assert all(torch.equal(value, published[name]) for name, value in loaded.items())
    assert weights_statistics("timm:test_resnet") == {"pixel_mean": [0.5] * 3, "pixel_std": [0.5] * 3}
