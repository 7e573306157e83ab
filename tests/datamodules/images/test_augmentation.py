import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

from datamodules.images.augmentation import (
    AUGMENTATIONS,
    BatchAugmentation,
    Mixing,
    Normalize,
    _beta_quantiles,
    adjust_colors,
    shift_and_flip,
)
from datamodules.images.decoding import Crop, center_square, crop_box, resized
from datamodules.images.file_pipeline import BatchReader
from datamodules.loading.worker_loaders import BatchRequest

RANDOM = [name for name in AUGMENTATIONS if name != "none"]
PLAIN = Normalize([0.0] * 3, [1 / 255] * 3)
"""Bytes to floats from 0 to 255."""


def _image(height: int = 90, width: int = 120, seed: int = 0) -> Tensor:
    """Smooth colors, so that scaling keeps them."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    large = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic")
    return large[0].clamp(0, 1).mul(255).to(torch.uint8)


IMAGES = torch.stack([_image(seed=seed) for seed in range(12)])
TARGETS = torch.arange(12) % 3


def _augmented(name: str, rows: list[int], epoch: int = 0, seed: int = 1, size: int = 64, flip: bool = True) -> Tensor:
    """What the network gets of some images."""
    batch = BatchReader(IMAGES, TARGETS, Crop(name, size, seed))[BatchRequest(epoch, rows)]
    return BatchAugmentation(name, size, seed, flip, lambda _: PLAIN)(batch.inputs, batch.rows, epoch)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("name", RANDOM)
def test_batch_mates_change_no_bit_of_an_augmented_image(name, size):
    together = _augmented(name, [3, 5, 7], size=size)
    assert together.shape == (3, 3, size, size)
    assert torch.equal(_augmented(name, [7, 3], size=size)[[1, 0]], together[[0, 2]])
    assert torch.equal(_augmented(name, [5], size=size)[0], together[1])
    assert not torch.equal(_augmented(name, [3, 5, 7], epoch=1, size=size), together)
    assert not torch.equal(_augmented(name, [3, 5, 7], seed=2, size=size), together)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_global_generators_neither_change_nor_matter(name):
    outcomes = []
    mixing = Mixing(0.2, 1.0, 3, 1)
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
        images = _augmented(name, [*range(12)])
        outcomes.append(mixing(images, TARGETS, images.roll(1, 0), TARGETS.roll(1), torch.arange(12), 0))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert (np.random.get_state()[1] == before[2]).all()
    assert all(torch.equal(first, second) for first, second in zip(*outcomes))


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 700), (17, 23)])
@pytest.mark.parametrize("size", [32, 96])
def test_an_image_of_any_shape_is_scaled_to_the_size(name, shape, size):
    crop = Crop(name, size, 1)
    assert crop(_image(*shape), *crop.draws([0], 0)).shape == (3, size, size)


@pytest.mark.parametrize(("height", "width"), [(300, 500), (100, 80)])
def test_the_center_is_what_a_center_crop_keeps(height, width):
    image = _image(height, width)
    usual = F.center_crop(F.resize(image, [256], antialias=True), [224])
    assert (center_square(image, 224).float() - usual.float()).abs().max() < 6


def test_evaluation_of_small_images_keeps_every_pixel():
    image = _image(32, 32)
    assert torch.equal(center_square(image, 32), image)


def test_crop_boxes_are_distributed_as_random_resized_crop():
    draws = torch.rand(4000, 22, generator=torch.Generator().manual_seed(1)).tolist()
    boxes = torch.tensor([crop_box(375, 500, 0.25, one) for one in draws]).double()
    top, left, height, width = boxes.unbind(1)
    assert ((top >= 0) & (left >= 0) & (top + height <= 375) & (left + width <= 500)).all()
    area, ratio = height * width / (375 * 500), width / height
    torch.manual_seed(1)
    image = torch.zeros(3, 375, 500)
    usual = torch.tensor(
        [RandomResizedCrop.get_params(image, [0.25, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    ).double()
    for mine, theirs in ((area, usual[:, 2] * usual[:, 3] / (375 * 500)), (ratio, usual[:, 3] / usual[:, 2])):
        assert float(mine.mean()) == pytest.approx(float(theirs.mean()), abs=0.015)
        assert float(mine.std()) == pytest.approx(float(theirs.std()), abs=0.01)
    assert float((top / (375 - height).clamp(min=1)).mean()) == pytest.approx(0.5, abs=0.03)


def test_shifts_fill_the_border_with_black():
    images = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3).expand(25, 3, 3, 3)
    shifts = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    moved = shift_and_flip(images, shifts, None, most=2)
    assert torch.equal(moved[12], images[12])
    assert moved[0, 0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert moved[24, 0].tolist() == [[9, 0, 0], [0, 0, 0], [0, 0, 0]]
    both = shift_and_flip(images, shifts, torch.ones(25, dtype=torch.bool), most=2)
    assert torch.equal(both, moved.flip(3))


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("size", [32, 96])
def test_an_image_is_mirrored_in_one_of_two_epochs(name, size):
    ramp = torch.linspace(0, 255, size).to(torch.uint8).expand(40, 3, size, size)

    def mirrored(epoch: int, flip: bool) -> Tensor:
        images = BatchAugmentation(name, size, 1, flip, lambda _: PLAIN)(ramp, torch.arange(40), epoch)
        left, right = (images[..., part].mean((1, 2, 3)) for part in (slice(8, 16), slice(-16, -8)))
        return left > right

    first, second = mirrored(0, True), mirrored(1, True)
    assert 10 <= int(first.sum()) <= 30
    assert torch.equal(first, ~second)
    assert torch.equal(first, mirrored(2, True))
    assert not mirrored(0, False).any()


def test_colors_are_those_of_torchvisions_operations_normalized():
    images = (IMAGES // 2 + 60).contiguous()  # So that no operation leaves the range of bytes.
    factors = torch.empty(12, 3).uniform_(0.85, 1.15, generator=torch.Generator().manual_seed(1))
    normalize = Normalize((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    found = adjust_colors(images, factors, normalize)
    for image, (brightness, contrast, saturation), mine in zip(images, factors.tolist(), found):
        usual = F.adjust_brightness(image.float() / 255, brightness)
        usual = F.adjust_saturation(F.adjust_contrast(usual, contrast), saturation)
        assert torch.allclose(mine, F.normalize(usual, normalize.mean, normalize.std), atol=2e-3)
    unchanged = adjust_colors(IMAGES, torch.ones(12, 3), normalize)
    assert torch.allclose(unchanged, normalize(IMAGES), atol=1e-5)
    assert torch.equal(adjust_colors(images[4:5], factors[4:5], normalize)[0], found[4])


@given(top=st.integers(0, 20), height=st.integers(1, 60), width=st.integers(1, 90), size=st.integers(1, 70))
def test_scaling_ignores_the_memory_layout(top: int, height: int, width: int, size: int):
    decoded = torch.randint(0, 256, (90, 100, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    part = decoded.permute(2, 0, 1)[:, top : top + height, 5 : 5 + width]
    planes = part.contiguous()
    usual = torch.nn.functional.interpolate(planes[None], (size, size + 3), mode="bilinear", antialias=True)[0]
    assert torch.equal(resized(part, size, size + 3), usual)
    assert torch.equal(resized(planes, size, size + 3), usual)


# Mixing


def _mixed(mixup: float, cutmix: float, numbers: list[int], classes: int = 2, epoch: int = 0) -> tuple[Tensor, Tensor]:
    """Light images of class 0, mixed with dark ones of the last class."""
    light, labels = torch.full((len(numbers), 3, 64, 64), 250.0), torch.zeros(len(numbers), dtype=torch.int64)
    mixing = Mixing(mixup, cutmix, classes, 1)
    return mixing(light, labels, torch.zeros_like(light), labels + classes - 1, torch.tensor(numbers), epoch)


@given(
    mixup=st.sampled_from([0.0, 0.2, 1.0]),
    cutmix=st.sampled_from([0.0, 0.3, 1.0]),
    number=st.integers(0, 1000),
    epoch=st.integers(0, 3),
)
def test_soft_targets_are_the_shares_of_both_images(mixup, cutmix, number, epoch):
    if not (mixup or cutmix):
        return
    (image, *_), (target, *_) = _mixed(mixup, cutmix, [number, 7, 9], 3, epoch)
    assert target.sum() == pytest.approx(1)
    assert target[1] == 0
    assert float(image.mean() / 250) == pytest.approx(float(target[0]), abs=1e-4)
    alone = _mixed(mixup, cutmix, [number], 3, epoch)
    assert torch.equal(alone[0][0], image)
    assert torch.equal(alone[1][0], target)


def test_mixup_blends_everywhere():
    blended, _ = _mixed(1.0, 0.0, [*range(20)])
    assert all(len(image.unique()) == 1 for image in blended)


def test_cutmix_pastes_a_rectangle():
    pasted, _ = _mixed(0.0, 1.0, [*range(20)])
    assert set(pasted.unique().tolist()) == {0, 250}
    for image in pasted:
        rows, columns = (image[0] == 0).nonzero().unbind(1)
        if len(rows):
            assert (image[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] == 0).all()


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_shares_follow_the_beta_distribution(alpha):
    shares = _mixed(alpha, 0.0, [*range(2000)])[1][:, 0]
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.04)
    assert float(shares.var()) == pytest.approx(0.25 / (2 * alpha + 1), abs=0.02)


@pytest.mark.parametrize("alpha", [0.001, 0.2, 1.0, 1.5, 8.0, 1000.0])
def test_quantiles_are_those_of_scipy(alpha):
    levels = torch.linspace(0, 1, 4097).double().numpy()
    expected = torch.from_numpy(beta.ppf(levels, alpha, alpha))
    found = _beta_quantiles(alpha, torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-300)
    # What an image is mixed with.
    assert torch.equal(found.float(), expected.float())


def test_an_empty_request_gives_an_empty_batch():
    for name in AUGMENTATIONS:
        batch = BatchReader(IMAGES, TARGETS, Crop(name, 64, 1))[BatchRequest(0, [])]
        assert (batch.inputs.shape, batch.targets.shape) == ((0, 3, 64, 64), (0,))
        images = _augmented(name, [])
        mixed, soft = Mixing(0.2, 1.0, 3, 1)(images, batch.targets, images, batch.targets, batch.rows, 0)
        assert (mixed.shape, soft.shape) == ((0, 3, 64, 64), (0, 3))


def test_shifts_reach_an_eighth_of_the_side_in_all_directions():
    point = torch.zeros(4000, 3, 32, 32, dtype=torch.uint8)
    point[:, :, 16, 16] = 1
    moved = BatchAugmentation("light", 32, 1, False, lambda _: PLAIN)(point, torch.arange(4000), 0)
    places = moved[:, 0].nonzero()[:, 1:] - 16
    assert places.amin(0).tolist() == [-4, -4]
    assert places.amax(0).tolist() == [4, 4]
    assert places.double().mean(0).abs().max() < 0.15  # Its standard error is 0.04.


def test_brightness_varies_by_a_fifth_both_ways():
    gray = torch.full((4000, 3, 64, 64), 100, dtype=torch.uint8)
    shown = BatchAugmentation("standard", 64, 1, False, lambda _: PLAIN)(gray, torch.arange(4000), 0)[:, 0, 0, 0]
    assert float(shown.min()) == pytest.approx(80, abs=0.1)
    assert float(shown.max()) == pytest.approx(120, abs=0.1)
    assert float(shown.mean()) == pytest.approx(100, abs=1)
