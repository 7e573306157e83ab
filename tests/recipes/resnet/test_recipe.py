"""The ResNet recipe: its parts in a plain Trainer, and the command line on folders of images."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from datamodules.images.image_folder import ImageFolderDataModule
from recipes.resnet.feature_cache import first_changing_layer
from recipes.resnet.network import build_network, build_resnet
from recipes.resnet.recipe import ResNetFineTuner
from recipes.weights import load_weights, read_weights
from tests.support.command_lines import Typed, type_line
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

SIZE = 32


def draw(folder: Path, count: int, seed: int) -> None:
    """Noisy images whose class is the direction of their stripes."""
    generator = np.random.default_rng(seed)
    for direction, name in enumerate(("across", "down")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            wave = 100 * np.sin(np.arange(40) * 0.8 + generator.uniform(0, 6))
            stripes = np.broadcast_to(wave[:, None] if direction == 0 else wave, (40, 40))
            pixels = 128 + stripes[..., None] + generator.normal(0, 20, (40, 40, 3))
            Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(folder / name / f"{i:03}.png")


def small_network(num_classes: int) -> ResNet:
    """A ResNet with one block in a stage."""
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=num_classes)


class Small(ResNetFineTuner):
    def build_network(self) -> torch.nn.Module:
        return small_network(self.hparams.num_classes)


@pytest.fixture(scope="session")
def stripes(tmp_path_factory) -> Path:
    """A folder with train and val, two classes."""
    folder = tmp_path_factory.mktemp("stripes")
    draw(folder / "train", 12, seed=1)
    draw(folder / "val", 5, seed=2)
    return folder


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory) -> Path:
    """Weights of a ResNet with 7 classes, as somebody else would have saved them."""
    torch.manual_seed(5)
    network = small_network(num_classes=7)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            torch.nn.init.uniform_(module.weight, 0.5, 1.0)
    path = tmp_path_factory.mktemp("weights") / "seven.pt"
    torch.save({"state_dict": {f"module.{k}": v for k, v in network.state_dict().items()}}, path)
    return path


def fit(folder: str, weights: str, world_size: int = 1, **options: Any) -> dict[str, Any]:
    """Weights and validation scores after a short run with a frozen trunk."""
    epochs, batch = options.pop("max_epochs", 2), options.pop("batch_size", 8)
    ckpt, root = options.pop("ckpt_path", None), options.pop("root", None)
    more = options.pop("callbacks", [])
    seeds = SeedControl(seed=1)
    recipe = Small(
        num_classes=2, image_size=SIZE, weights=weights, optimizer="sgd", lr=0.01, schedule="constant", **options
    )
    data = ImageFolderDataModule(
        data_dir=folder, image_size=SIZE, batch_size=batch // world_size, augment="none", num_workers=0
    )
    trainer = quiet_trainer(seeds, *more, world_size=world_size, max_epochs=epochs)
    trainer.fit(recipe, data, ckpt_path=ckpt, weights_only=True)
    if root:
        trainer.save_checkpoint(Path(root) / "last.ckpt")
    scores = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return {"weights": recipe.network.state_dict(), "scores": scores, "cached_head": recipe.cached_head}


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    pairs = [(a["weights"][name].double(), b["weights"][name].double()) for name in a["weights"]]
    return max(float((x - y).abs().max()) for x, y in pairs)


# He et al., 2016, table 6, in millions; exactly, as `akamaster/pytorch_resnet_cifar10` counts them.
@pytest.mark.parametrize(("depth", "parameters"), [(20, 269722), (110, 1727962)])
def test_small_resnets_have_the_papers_number_of_parameters(depth, parameters):
    network = build_network(f"resnet{depth}", num_classes=10)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def _published(lead: str) -> dict[str, torch.Tensor]:
    """A state dict of a ResNet of 20 layers, written down from the names and shapes in published files."""
    state: dict[str, torch.Tensor] = {}

    def layer(name: str, norm: str, *shape: int) -> None:
        state[f"{lead}{name}.weight"] = 0.1 * torch.randn(shape)
        for part in ("weight", "bias", "running_mean", "running_var"):
            state[f"{lead}{norm}.{part}"] = torch.rand(shape[0])
        state[f"{lead}{norm}.num_batches_tracked"] = torch.tensor(7)

    layer("conv1", "bn1", 16, 3, 3, 3)
    for number, width in ((1, 16), (2, 32), (3, 64)):
        for block in range(3):
            at, before = f"layer{number}.{block}", width // 2 if number > 1 and block == 0 else width
            layer(f"{at}.conv1", f"{at}.bn1", width, before, 3, 3)
            layer(f"{at}.conv2", f"{at}.bn2", width, width, 3, 3)
    state[f"{lead}linear.weight"], state[f"{lead}linear.bias"] = torch.randn(10, 64), torch.randn(10)
    return state


def _by_functions(state: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """The logits of such a network, computed from the paper's description."""

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(values, *parts)

    x = norm(F.conv2d(images, state["conv1.weight"], padding=1), "bn1").relu()
    for number in (1, 2, 3):
        for block in range(3):
            at, stride = f"layer{number}.{block}", 2 if number > 1 and block == 0 else 1
            y = norm(F.conv2d(x, state[f"{at}.conv1.weight"], stride=stride, padding=1), f"{at}.bn1").relu()
            y = norm(F.conv2d(y, state[f"{at}.conv2.weight"], padding=1), f"{at}.bn2")
            if stride == 2:
                empty = torch.zeros(len(x), x.shape[1] // 2, *y.shape[2:])
                x = torch.cat((empty, x[:, :, ::2, ::2], empty), dim=1)
            x = (x + y).relu()
    return F.linear(x.mean((2, 3)), state["linear.weight"], state["linear.bias"])


def test_published_weights_of_small_resnets_load_by_name(tmp_path):
    torch.manual_seed(1)
    state, images = _published("module."), torch.randn(2, 3, 32, 32)
    torch.save({"state_dict": state, "best_prec1": 91.7}, tmp_path / "published.th")
    network = build_network("resnet20", num_classes=10).eval()
    report = load_weights(network, read_weights(tmp_path / "published.th"), "published.th")
    assert (report.skipped, report.new) == ({}, [])
    bare = {name.removeprefix("module."): value for name, value in state.items()}
    torch.testing.assert_close(network(images), _by_functions(bare, images), rtol=1e-4, atol=1e-4)


def test_cifarnet_begins_with_uncorrelated_filters():
    network = build_network("cifarnet", num_classes=10).eval()
    filters = network.conv1.weight.detach().flatten(1)
    assert torch.equal(filters[:12], -filters[12:])
    angles = F.normalize(filters[:12]) @ F.normalize(filters[:12]).T
    torch.testing.assert_close(angles, torch.eye(12))
    # Smooth images: what they vary in most is weakened.
    images = F.interpolate(torch.randn(64, 3, 8, 8), (32, 32), mode="bicubic")
    images = (images.mean(1, keepdim=True) * 2 + images * 0.3) / 1.3
    deviations = F.conv2d(images, network.conv1.weight[:12]).std((0, 2, 3))
    assert deviations[0] < 2 * deviations[1] < 20 * deviations[0]
    inputs = torch.randn(2, 24, 16, 16)
    assert torch.equal(network.layer1.conv1(inputs)[:, :24], inputs)
    assert network(images).abs().max() < 1


def test_freezing_follows_from_the_weights():
    new, tuned = ResNetFineTuner(num_classes=2, weights="none"), ResNetFineTuner(num_classes=2, weights="some.pt")
    assert (new.hparams.freeze_until, new.hparams.lr, new.hparams.head_lr_factor) == (None, 0.001, 1.0)
    assert (tuned.hparams.freeze_until, tuned.hparams.lr, tuned.hparams.head_lr_factor) == ("layer4", 0.0003, 10.0)
    assert ResNetFineTuner(num_classes=2, weights="some.pt", freeze_until="none").hparams.freeze_until is None


def test_groups_hold_every_parameter_once():
    recipe = ResNetFineTuner(num_classes=2, weights="some.pt", lr=1.0, layer_lr_decay=0.5, head_lr_factor=10)
    groups = recipe.configure_optimizers()["optimizer"].param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in recipe.parameters())
    rates = {group["name"].split(".")[0]: group["initial_lr"] for group in groups}
    assert rates == {"stem": 1 / 16, "layer1": 1 / 8, "layer2": 1 / 4, "layer3": 1 / 2, "layer4": 1.0, "fc": 10.0}
    assert {g["weight_decay"] for g in groups if g["name"].endswith(".no_decay")} == {0.0}


def test_features_stay_only_with_batch_norm_in_evaluation():
    network = build_resnet("resnet18", num_classes=2).eval()
    for layer in list(network.children())[:-1]:
        layer.requires_grad_(False)
    network.bn1.train()
    assert first_changing_layer(network, "fc") == "bn1"  # Its statistics would move.
    network.bn1.eval()
    assert first_changing_layer(network, "fc") == ""
    network.layer4.requires_grad_(True)
    assert first_changing_layer(network, "fc") == "layer4.0.conv1"


def _cached_and_not(folder: str, weights: str) -> dict[str, Any]:
    phases = {"layer4": "1 epochs", "layer3": "2 epochs"}
    return {
        "head": fit(folder, weights, freeze_until="fc"),
        "head, cached": fit(folder, weights, freeze_until="fc", cache_features=True),
        "phases": fit(folder, weights, freeze_until="fc", unfreeze=phases, max_epochs=3),
        "phases, cached": fit(folder, weights, freeze_until="fc", unfreeze=phases, max_epochs=3, cache_features=True),
    }


@pytest.fixture(scope="module")
def runs(stripes, pretrained) -> dict[str, Any]:
    return run_ranks(_cached_and_not, 1, str(stripes), str(pretrained))[0]


@pytest.mark.parametrize("kind", ["head", "phases"])
def test_cached_features_change_nothing_but_rounding(runs, kind):
    plain, cached = runs[kind], runs[f"{kind}, cached"]
    assert distance(plain, cached) < 1e-5
    assert plain["scores"] == pytest.approx(cached["scores"], abs=1e-4)
    assert cached["cached_head"] == ""


def test_the_frozen_trunk_is_the_file_to_the_bit(runs, pretrained):
    given = torch.load(pretrained, weights_only=True)["state_dict"]
    for name, value in runs["head"]["weights"].items():
        if not name.startswith("fc."):
            assert torch.equal(value, given[f"module.{name}"]), name
    moved = runs["phases, cached"]["weights"]
    assert not torch.equal(moved["layer4.0.conv1.weight"], given["module.layer4.0.conv1.weight"])
    assert not torch.equal(moved["layer3.0.bn1.running_mean"], given["module.layer3.0.bn1.running_mean"])
    assert torch.equal(moved["layer2.0.bn1.running_mean"], given["module.layer2.0.bn1.running_mean"])


def _on_two(folder: str, weights: str) -> dict[str, Any]:
    phases = {"layer4": "1 epochs"}
    return fit(folder, weights, 2, freeze_until="fc", unfreeze=phases, bn="eval", cache_features=True)


def test_two_ranks_with_shared_features_end_as_one(stripes, pretrained):
    ranks = run_ranks(_on_two, 2, str(stripes), str(pretrained))
    assert distance(*ranks) == 0
    alone = fit(str(stripes), str(pretrained), freeze_until="fc", unfreeze={"layer4": "1 epochs"}, bn="eval")
    assert distance(ranks[0], alone) < 1e-5


class Inputs(pl.Callback):
    """Whether each batch of training holds features."""

    def __init__(self) -> None:
        self.cached: list[bool] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert bool(pl_module.cached_head) == (batch[0].dim() == 2)
        self.cached.append(bool(pl_module.cached_head))


def _resumed(folder: str, weights: str, root: str) -> dict[str, Any]:
    options = {"freeze_until": "fc", "unfreeze": {"layer4": "1 epochs"}, "cache_features": True, "max_epochs": 2}
    inputs = [Inputs(), Inputs(), Inputs()]
    saving = pl.callbacks.ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(folder, weights, callbacks=[inputs[0], saving], **options)
    steps = 2, len(inputs[0].cached) // 2 + 1
    # The file of weights may be gone: the checkpoint has its own.
    resumed = [
        fit(folder, "gone.pt", ckpt_path=f"{root}/step={step}.ckpt", callbacks=[seen], **options)
        for step, seen in zip(steps, inputs[1:], strict=True)
    ]
    return {"gaps": [distance(whole, each) for each in resumed], "cached": [each.cached for each in inputs]}


def test_a_run_that_resumes_on_features_ends_the_same(stripes, pretrained, tmp_path):
    found = run_ranks(_resumed, 1, str(stripes), str(pretrained), str(tmp_path))[0]
    assert found["gaps"] == [0, 0]
    whole, *resumed = found["cached"]
    epoch = len(whole) // 2
    assert whole == [True] * epoch + [False] * epoch
    assert [each == whole[-len(each) :] for each in resumed] == [True, True]
    assert [len(each) for each in resumed] == [len(whole) - 2, epoch - 1]


def test_features_need_phases_in_whole_epochs(stripes, pretrained):
    for when in ("3 steps", "50%", "1.5 epochs"):
        with pytest.raises(UserError, match="in whole epochs"):
            fit(str(stripes), str(pretrained), freeze_until="fc", cache_features=True, unfreeze={"layer4": when})


def test_images_are_read_where_layers_before_the_head_train(stripes, pretrained, caplog):
    inputs = Inputs()
    fit(str(stripes), str(pretrained), freeze_until="layer4", cache_features=True, max_epochs=1, callbacks=[inputs])
    assert not any(inputs.cached)
    assert "features are not cached, because layer4 trains before fc" in caplog.text


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_images_come_in_the_precision_of_the_weights(stripes, precision):
    recipe = ResNetFineTuner(num_classes=2, weights="none")
    data = ImageFolderDataModule(data_dir=str(stripes), image_size=SIZE, batch_size=8, mixup=0.2)
    trainer = quiet_trainer(precision=precision)
    trainer.fit(recipe, data)
    assert float(trainer.callback_metrics["val/loss"]) > 0


def type_in(folder: Path, *args: str) -> Typed:
    """In a fresh process: what `python -m recipes.resnet ARGS` ends with and prints, with a smaller network."""
    classes = f"{__name__}:Small", "datamodules:ImageFolderDataModule"
    return run_ranks(type_line, 1, *classes, list(args), str(folder))[0]


def test_predictions_carry_the_names_of_classes_without_the_data(stripes, pretrained, tmp_path):
    args = ["--data-dir", str(stripes), "--weights", str(pretrained), "--image-size", str(SIZE), "--batch-size", "8"]
    args += ["--max-epochs", "4", "--augment", "light", "--name", "first", "--num-workers", "0", "--lr", "0.003"]
    status, _, err = type_in(tmp_path, *args)
    assert status == 0, err
    status, _, err = type_in(
        tmp_path,
        *("predict", "--ckpt", "runs/resnet/first/checkpoints/best.ckpt", "--output", "predictions.json"),
        *("--data-dir", "nowhere"),
        *(str(stripes / "val"), str(stripes / "train" / "down" / "003.png")),
    )
    assert status == 0, err
    rows = json.loads((tmp_path / "predictions.json").read_text())
    assert len(rows) == 11
    assert {row["class"] for row in rows} <= {"across", "down"}
    assert rows[-1]["file"].endswith("down/003.png")
    right = sum(row["class"] in Path(row["file"]).parts for row in rows)
    assert right >= 9


def test_small_photographs_train_a_small_network_from_scratch(stripes, tmp_path):
    folder = tmp_path / "small"
    for file in stripes.rglob("*.png"):
        place = folder / file.relative_to(stripes)
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.open(file).resize((24, 24)).save(place)
    args = ["--data-dir", str(folder), "--max-epochs", "1", "--batch-size", "8", "--arch", "resnet20"]
    status, _, err = type_in(tmp_path, *args, "--name", "small")
    assert status == 0, err
    assert "images of 24 pixels as the files have, augment='light' (shifts and mirroring), pixels normalized" in err
    config = yaml.safe_load((tmp_path / "runs" / "resnet" / "small" / "config.yaml").read_text())
    chosen = {name: config[name] for name in ("image_size", "augment", "weights", "small_images")}
    assert chosen == {"image_size": 24, "augment": "light", "weights": "none", "small_images": True}
    # Another run that begins with its weights normalizes as it did, and the test of its checkpoint, too.
    recipe = ResNetFineTuner("resnet20", 2, weights=str(tmp_path / "runs/resnet/small/checkpoints/best.ckpt"))
    assert recipe.settings_for_data() == {name: config[name] for name in ("pixel_mean", "pixel_std")}
    assert config["pixel_mean"] != [0.485, 0.456, 0.406]


IMAGENET = {"pixel_mean": [0.485, 0.456, 0.406], "pixel_std": [0.229, 0.224, 0.225]}
HALF = {"pixel_mean": [0.5] * 3, "pixel_std": [0.5] * 3}


@pytest.mark.parametrize(
    ("arch", "small_images", "weights", "config", "expected"),
    [
        ("resnet18", False, "imagenet", None, IMAGENET),
        ("resnet18", False, "none", None, {}),
        ("resnet18", False, "FILE", None, IMAGENET),
        ("timm:test_vit", False, "FILE", None, HALF),
        # What a run has saved beside its weights.
        ("timm:test_vit", False, "FILE", {"augment": "none"} | IMAGENET, IMAGENET),
        ("resnet20", False, "FILE", {"augment": "none"} | HALF, HALF),
        # Files for small images are not ImageNet's.
        ("resnet20", False, "FILE", None, {}),
        ("resnet18", True, "FILE", None, {}),
    ],
)
def test_pixels_are_normalized_as_the_weights_expect(tmp_path, arch, small_images, weights, config, expected):
    if arch.startswith("timm:"):
        pytest.importorskip("timm")
    torch.save({"model": {"a": torch.ones(1)}, "config": config}, tmp_path / "a.pt")
    weights = weights.replace("FILE", str(tmp_path / "a.pt"))
    recipe = ResNetFineTuner(arch, 2, 64, weights, small_images, freeze_until="none")
    assert recipe.settings_for_data() == expected


def test_augmented_images_are_not_cached_as_features(stripes, pretrained, tmp_path):
    args = ["--data-dir", str(stripes), "--weights", str(pretrained), "--image-size", str(SIZE), "--cache-features"]
    status, _, err = type_in(tmp_path, *args)
    assert status == 2
    assert "pass --augment none" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"augment": "light"}, "in every epoch, and these are augmented; pass augment='none', or leave"),
        ({"augment": "none", "mixup": 0.2}, "in every epoch, and these are augmented; pass mixup=0, or leave"),
        (None, "in every epoch, and the data does not number its samples; pass an ImageFolderDataModule, or leave"),
    ],
)
def test_features_are_cached_of_images_that_stay_the_same(stripes, data, reason):
    recipe = ResNetFineTuner(num_classes=2, weights="none", image_size=SIZE, cache_features=True, freeze_until="fc")
    images = TensorDataset(torch.zeros(2, 3, SIZE, SIZE), torch.tensor([0, 1]))
    loaders = {"train_dataloaders": DataLoader(images)}
    if data is not None:
        loaders = {"datamodule": ImageFolderDataModule(data_dir=str(stripes), image_size=SIZE, **data)}
    with pytest.raises(UserError, match=reason):
        quiet_trainer().fit(recipe, **loaders)


def test_mirror_images_count_in_test_or_predict_alone():
    torch.manual_seed(1)
    recipe = Small(num_classes=2, image_size=SIZE, weights="none", tta=True).eval()
    images = torch.randn(6, 3, SIZE, SIZE)
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    with torch.no_grad():
        alone = recipe(images).softmax(1)
        mean = (alone + recipe(images.flip(3)).softmax(1)) / 2
        predicted = recipe.predict_step(images, 0)["probabilities"]
    torch.testing.assert_close(predicted, mean)
    loader = DataLoader(TensorDataset(images, labels), batch_size=6)
    trainer = quiet_trainer()
    (test,) = trainer.test(recipe, loader, verbose=False)
    (validation,) = trainer.validate(recipe, loader, verbose=False)
    assert test["test/loss"] == pytest.approx(float(F.nll_loss(mean.log(), labels)), rel=1e-5)
    assert validation["val/loss"] == pytest.approx(float(F.nll_loss(alone.log(), labels)), rel=1e-5)
    assert abs(test["test/loss"] - validation["val/loss"]) > 1e-4
