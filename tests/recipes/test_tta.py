"""Test-time augmentation: which views there are, and that an image is scored by their mean probabilities."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from datamodules import ImageFolderDataModule, MNISTDataModule, UserError
from recipes import MNISTClassifier
from recipes.tta import mean_log_probabilities, views
from tests.support.own_training import TrainedClassifier
from tests.support.tables import QUIET, silence

IMAGES = torch.randn(9, 3, 32, 32, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(9) % 4


class Small(TrainedClassifier):
    """Sees where in an image what is, so its views have other logits."""

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 49, 4))


def small(**options: Any) -> Small:
    torch.manual_seed(2)
    return Small(num_classes=4, **options).eval()


def trainer(**options: Any) -> pl.Trainer:
    silence()
    return pl.Trainer(**QUIET | {"enable_progress_bar": False, "enable_checkpointing": False, "devices": 1} | options)


def loader(images: Tensor = IMAGES) -> DataLoader:
    return DataLoader(TensorDataset(images, TARGETS), batch_size=4)


def mean_of(module: Small, images: Tensor, tta: Any) -> Tensor:
    """By definition, in float64."""
    with torch.no_grad():
        return torch.stack([module(view).double().softmax(1) for view in views(images, tta)]).mean(0)


@pytest.mark.parametrize(("size", "shift"), [(32, 1), (64, 2)])
def test_crops_are_small_shifts_in_which_the_margin_is_mirrored(size: int, shift: int):
    images = torch.arange(2.0 * size * size).view(1, 2, size, size)
    centre, *corners = views(images, "crops", flip=False)
    assert centre is images
    assert len(corners) == 4
    down_right, up_left = corners[0], corners[3]
    assert torch.equal(down_right[..., shift:, shift:], images[..., :-shift, :-shift])
    assert torch.equal(up_left[..., :-shift, :-shift], images[..., shift:, shift:])
    assert torch.equal(down_right[..., :shift, shift:], images[..., 1 : shift + 1, :-shift].flip(-2))
    assert all(view.shape == images.shape for view in corners)
    mirrored = [*views(images, "crops", flip=True)]
    assert all(torch.equal(a.flip(-1), b) for a, b in zip(mirrored[::2], mirrored[1::2], strict=True))
    assert len(mirrored) == 10


@pytest.mark.parametrize("tta", ["flip", "crops"])
def test_a_mirrored_image_has_the_probabilities_of_the_image(tta: Any):
    module = small()
    with torch.no_grad():
        plain = [module(images).softmax(1) for images in (IMAGES, IMAGES.flip(-1))]
        augmented = [mean_log_probabilities(module, images, tta).exp() for images in (IMAGES, IMAGES.flip(-1))]
    assert (plain[0] - plain[1]).abs().max() > 0.01
    assert (augmented[0] - augmented[1]).abs().max() < 1e-6
    assert torch.allclose(augmented[0].double(), mean_of(module, IMAGES, tta), atol=1e-6)


def test_a_probability_of_zero_has_a_finite_loss():
    logs = mean_log_probabilities(lambda _: torch.tensor([[0.0, 1000.0]]), IMAGES[:1], "flip")
    assert logs.tolist() == [[-1000, 0]]


@pytest.mark.parametrize("tta", ["flip", "crops"])
def test_the_scores_are_those_of_the_mean_probabilities_and_predict_returns_them(tta: Any):
    module = small(tta=tta)
    expected = mean_of(module, IMAGES, tta)
    for evaluate, part in ((trainer().validate, "val"), (trainer().test, "test")):
        (scores,) = evaluate(module, loader(), verbose=False)
        assert scores[f"{part}/loss"] == pytest.approx(F.nll_loss(expected.log(), TARGETS).item(), rel=1e-6)
        assert scores[f"{part}/accuracy"] == pytest.approx((expected.argmax(1) == TARGETS).float().mean().item())
    outputs: Any = trainer().predict(module, loader())
    found = torch.cat([batch["probabilities"] for batch in outputs])
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert torch.equal(module(IMAGES), small()(IMAGES)), "what is exported has no views"


def test_the_validations_of_a_training_are_without():
    scores = []
    for tta in ("none", "crops"):
        fit = trainer(max_epochs=1)
        module = small(tta=tta)
        fit.fit(module, loader(), loader())
        scores.append(fit.callback_metrics["val/loss"])
        (after,) = fit.validate(module, loader(), verbose=False)
    assert scores[0] == scores[1]
    assert after["val/loss"] != scores[1]


def test_it_is_refused_for_tokens_and_by_an_unknown_name():
    tokens = DataLoader(TensorDataset(torch.ones(4, 7), TARGETS[:4]), 4)
    with pytest.raises(UserError, match=r"tta='crops' needs images .* found \(4, 7\); pass tta='none'"):
        trainer().test(small(tta="crops"), tokens)
    with pytest.raises(UserError, match="tta='flips': expected one of none, flip, crops"):
        small(tta="flips")


def test_digits_are_not_mirrored():
    data = MNISTDataModule("digits", eval_batch_size=360)
    classifier = MNISTClassifier(tta="flip")
    message = "tta='flip' mirrors images, and a mirror image of scikit-learn digits is of no class; pass tta='crops'"
    with pytest.raises(UserError, match=message):
        trainer().test(classifier, data, verbose=False)
    with pytest.raises(UserError, match=message):
        trainer(num_sanity_val_steps=1).fit(classifier, data)
    assert not classifier.trainer.global_step, "its end would be late for an error"
    seen = []
    classifier.tta = "crops"
    classifier.network.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    trainer().test(classifier, data, verbose=False)
    assert len(seen) == 5
    assert not any(torch.equal(seen[0].flip(-1), view) for view in seen)
    kinds = [MNISTDataModule(name) for name in ("mnist", "custom", "fashion-mnist")]
    assert [data.may_flip for data in kinds] == [False, False, True]
    assert [ImageFolderDataModule(name).may_flip for name in ("digits", "folder")] == [False, True]
