"""What explains mistakes: Grad-CAM and the nearest training images, the same on any number of devices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from datamodules import ImageFolderDataModule
from recipes import ResNetFineTuner, fit
from recipes.figures.images import ImageGrid
from recipes.mistakes import MAX_IMAGES
from recipes.resnet import explanation
from recipes.resnet.explanation import evenly_spaced, features_before_head, grad_cam, map_before_pooling, overlay
from recipes.resnet.network import build_network
from recipes.runner.report import RunResult, figures_of
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

SIDE = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise of two classes, which cannot be learned; each third image to validate is one to train on of the other."""
    place = tmp_path_factory.mktemp("noise")
    draws = np.random.default_rng(1)
    for number in range(70):
        for name, other in (("a", "b"), ("b", "a")):
            image = Image.fromarray(draws.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
            copies = [place / "train" / name / f"{name}{number:02}.png"]
            if number % 3 == 0:
                copies.append(place / "val" / other / f"{other}{number:02}.png")
            for path in copies:
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
    return place


def _network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = (nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    return nn.Sequential(*layers).eval()


def test_grad_cam_of_pooled_channels_is_the_class_activation_map() -> None:
    network = _network()
    images = torch.randn(5, 3, 9, 9)
    classes = torch.tensor([0, 1, 2, 3, 0])
    # Zhou et al. (2016): the weights of the head are the gradients, up to the factor that the maximum removes.
    maps = network[:2](images)
    expected = (network[4].weight[classes][:, :, None, None] * maps).sum(1).relu()
    expected = expected / expected.amax((1, 2), keepdim=True).clamp(min=1e-12)
    assert map_before_pooling(network, images[:1]) == "1"
    found = grad_cam(network, "1", images, classes)
    assert torch.allclose(found, expected.detach(), atol=1e-5)
    assert found.max() == 1
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_channel_weighs_as_the_mean_of_its_gradient() -> None:
    torch.manual_seed(1)
    # Without pooling the gradients of a channel differ from position to position: they are the weights of the head.
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 49, 4)).eval()
    images = torch.randn(3, 3, 9, 9)
    classes = torch.tensor([3, 1, 2])
    weights = network[3].weight[classes].view(3, 6, 7, 7).mean((2, 3), keepdim=True)
    expected = (weights * network[:2](images)).sum(1).relu()
    expected = expected / expected.amax((1, 2), keepdim=True).clamp(min=1e-12)
    assert torch.allclose(grad_cam(network, "1", images, classes), expected.detach(), atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "side", "layer"),
    [
        ("resnet18", 64, "layer4"),
        ("resnet20", 32, "layer3"),
        ("cifarnet", 32, "layer3"),
        ("densenet121", 64, "features"),
        ("mobilenet_v3_small", 64, "features"),
        ("swin_t", 64, "permute"),
        ("timm:resnet18", 64, "layer4"),
        ("timm:convnext_atto", 64, "norm_pre"),
        ("timm:swin_tiny_patch4_window7_224", 224, ""),
        ("vit_b_16", 32, ""),
    ],
)
def test_the_last_map_before_pooling_is_found(arch: str, side: int, layer: str) -> None:
    if arch.startswith("timm:"):
        pytest.importorskip("timm")
    network = build_network(arch, 3, side).eval()
    images = torch.rand(1, 3, side, side)
    state = torch.random.get_rng_state()
    assert map_before_pooling(network, images) == layer
    assert features_before_head(network, images).norm().item() == pytest.approx(1)
    if layer:
        heat = grad_cam(network, layer, images, torch.tensor([1]))
        assert heat.ndim == 3
        assert heat.isfinite().all()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_overlay_is_gray_where_the_map_is_zero() -> None:
    images = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    heat = torch.zeros(1, 8, 8)
    heat[0, :, 4:] = 1
    drawn = overlay(images, heat)
    assert torch.equal(drawn[0, 0, :, :4], drawn[0, 2, :, :4])
    assert (drawn[0, 0, :, 4:] >= drawn[0, 2, :, 4:] + 100).all()


def _explained(world_size: int, place: Path) -> tuple[list[Any], bytes, str]:
    """The captions, images and note of the mistakes of a network with new weights."""
    torch.manual_seed(1)
    data = ImageFolderDataModule(data_dir=str(place), image_size=SIDE, num_workers=0, eval_batch_size=16)
    model = ResNetFineTuner(arch="resnet20", num_classes=2, image_size=SIDE, weights="none", explain_mistakes=True)
    data.setup("fit")
    state = torch.random.get_rng_state()
    trainer = quiet_trainer(world_size=world_size)
    trainer.validate(model, data, verbose=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    grid = figures_of(trainer)["mistakes"]
    assert isinstance(grid, ImageGrid)
    return list(grid.captions), bytes(grid.images.numpy()), grid.note


def test_two_ranks_explain_the_mistakes_as_one(folder: Path) -> None:
    (alone,) = run_ranks(_explained, 1, 1, folder)
    assert run_ranks(_explained, 2, 2, folder) == [alone, alone]
    assert len(alone[0]) == 5 * MAX_IMAGES


def test_the_nearest_image_of_a_copy_is_the_copy(folder: Path) -> None:
    captions, _, note = _explained(1, folder)
    for mistake, cam, *nearest in (captions[start : start + 5] for start in range(0, len(captions), 5)):
        assert cam == ("Grad-CAM", f"of {mistake[0].partition(' ')[0]}")
        # The image to validate bears the name of the other class.
        swapped = {"a": "b", "b": "a"}[mistake[2][0]]
        assert nearest[0] == (swapped, "cosine 1.00", swapped + mistake[2][1:])
        cosines = [float(lines[1].removeprefix("cosine ")) for lines in nearest]
        assert cosines == sorted(cosines, reverse=True)
    assert "the nearest of the 140 training images" in note


def test_few_training_images_are_spread_evenly() -> None:
    assert evenly_spaced(140, 140).tolist() == list(range(140))
    assert evenly_spaced(50_000, 2_000).diff().unique().tolist() == [25]


def _result(folder: Path, run_dir: Path, epochs: int, explain: bool | None) -> RunResult:
    return fit(
        ResNetFineTuner,
        data=folder,
        arch="resnet20",
        weights="none",
        max_epochs=epochs,
        explain_mistakes=explain,
        run_dir=run_dir,
        logger="none",
        threads=1,
        verbose=False,
    )


def test_a_run_has_the_same_weights_with_explained_mistakes(folder: Path, tmp_path: Path) -> None:
    with_images = _result(folder, tmp_path / "with", 1, explain=True)
    without = _result(folder, tmp_path / "without", 1, explain=False)
    assert with_images.weights_sha256 == without.weights_sha256
    assert with_images.scores == without.scores
    groups = [result.figures["mistakes"].group for result in (with_images, without)]
    assert groups == [5, 1]


@pytest.mark.parametrize(("epochs", "group"), [(1, 1), (2, 5)])
def test_mistakes_are_explained_in_a_run_that_is_long_enough(folder, tmp_path, monkeypatch, epochs, group) -> None:
    monkeypatch.setattr(explanation, "_SHARE_OF_RUN", 0.45)  # At 3 % such a run has 25 epochs.
    grid = _result(folder, tmp_path, epochs, explain=None).figures["mistakes"]
    assert grid.group == group
    assert ("over 3 % of the run: explain_mistakes=True shows them" in grid.note) == (group == 1)
