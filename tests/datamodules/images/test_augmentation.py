import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from datamodules.errors import UserError
from datamodules.images.augmentation import AUGMENTATIONS, Augmentation, BatchReader, Mixing, centre_square
from datamodules.loading.worker_loaders import BatchRequest

RANDOM = [name for name in AUGMENTATIONS if name != "none"]


def _image(height: int = 90, width: int = 120, seed: int = 0) -> Tensor:
    """Smooth colours, so that scaling keeps them."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    large = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic")
    return large[0].clamp(0, 1).mul(255).to(torch.uint8)


IMAGES = torch.stack([_image(seed=seed) for seed in range(12)])
TARGETS = torch.arange(12) % 3


def _reader(name: str = "standard", mixing: Mixing | None = None, seed: int = 1, size: int = 64) -> BatchReader:
    return BatchReader(IMAGES, TARGETS, Augmentation(name, size, seed), mixing)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("name", RANDOM)
def test_an_image_is_a_function_of_seed_epoch_and_sample(name, size):
    def images(epoch: int, rows: list[int], seed: int = 1) -> Tensor:
        return _reader(name, seed=seed, size=size)[BatchRequest(epoch, rows)].inputs

    together = images(0, [3, 5, 7])
    assert together.shape == (3, 3, size, size)
    assert torch.equal(images(0, [7, 3])[[1, 0]], together[[0, 2]])
    assert not torch.equal(images(1, [3, 5, 7]), together)
    assert not torch.equal(images(0, [3, 5, 7], seed=2), together)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_two_samples_with_the_same_pixels_are_augmented_differently(name):
    reader = BatchReader(IMAGES[:1].expand(2, -1, -1, -1), TARGETS[:2], Augmentation(name, 64, 1))
    first, second = reader[BatchRequest(0, [0, 1])].inputs
    assert torch.equal(first, second) == (name == "none")


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_global_generators_neither_change_nor_matter(name):
    outcomes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
        outcomes.append(_reader(name, Mixing(0.2, 1.0, 3, 1))[BatchRequest(0, [*range(12)], [*range(11, -1, -1)])])
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert (np.random.get_state()[1] == before[2]).all()
    assert torch.equal(outcomes[0].inputs, outcomes[1].inputs)
    assert torch.equal(outcomes[0].targets, outcomes[1].targets)


def test_images_are_made_on_one_thread_as_in_a_worker_and_the_number_is_put_back():
    # Sums in several parts may round differently.
    seen = []

    class Spy(Augmentation):
        def __call__(self, image: Tensor, number: int, epoch: int) -> Tensor:
            seen.append(torch.get_num_threads())
            return super().__call__(image, number, epoch)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        BatchReader(IMAGES, TARGETS, Spy("standard", 64, 1))[BatchRequest(0, [0, 1])]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert seen == [1, 1]


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (500, 2), (17, 23)])
@pytest.mark.parametrize("size", [32, 96])
def test_an_image_of_any_shape_is_scaled_to_the_size(name, shape, size):
    augmentation = Augmentation(name, size, 1)
    with torch.random.fork_rng():
        assert augmentation(_image(*shape), 0, 0).shape == (3, size, size)


@pytest.mark.parametrize(("height", "width"), [(256, 256), (300, 500), (700, 400), (100, 80)])
def test_the_centre_is_what_resizing_and_cropping_keep(height, width):
    image = _image(height, width)
    usual = F.center_crop(F.resize(image, [256], antialias=True), [224])
    assert (centre_square(image, 224).float() - usual.float()).abs().max() < 6


def test_evaluation_of_small_images_keeps_every_pixel():
    image = _image(32, 32)
    assert torch.equal(centre_square(image, 32), image)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("size", [32, 96])
def test_images_are_mirrored_unless_flipping_is_off(name, size):
    ramp = torch.linspace(0, 255, 120).to(torch.uint8).expand(3, 120, 120)

    def mirrored(flip: bool) -> int:
        augmentation = Augmentation(name, size, 1, flip)
        with torch.random.fork_rng():
            images = torch.stack([augmentation(ramp, number, 0) for number in range(40)]).float()
        # RandAugment may also invert the colours above a threshold; the outermost columns tell the direction apart.
        return int((images[..., 0].mean((1, 2)) > images[..., -1].mean((1, 2)) + 10).sum())

    assert 8 <= mirrored(True) <= 32
    assert mirrored(False) <= (10 if name == "randaugment" else 0)


def test_an_unknown_augmentation_is_refused():
    with pytest.raises(UserError, match="augment='heavy': expected one of none, light, standard"):
        Augmentation("heavy", 64, 1)


# Mixing


@given(
    mixup=st.sampled_from([0.0, 0.2, 1.0]),
    cutmix=st.sampled_from([0.0, 0.3, 1.0]),
    number=st.integers(0, 1000),
    epoch=st.integers(0, 3),
)
def test_soft_targets_are_the_shares_of_both_images(mixup, cutmix, number, epoch):
    mixing = Mixing(mixup, cutmix, 3, 1)
    if not mixing:
        return
    light, dark = torch.full((3, 64, 64), 250, dtype=torch.uint8), torch.zeros((3, 64, 64), dtype=torch.uint8)
    image, target = mixing(light, 0, dark, 2, number, epoch)
    assert target.sum() == pytest.approx(1)
    assert target[1] == 0
    assert image.dtype == torch.uint8
    assert float(image.float().mean() / 250) == pytest.approx(float(target[0]), abs=0.003)


def test_mixup_blends_everywhere_and_cutmix_pastes_a_rectangle():
    light, dark = torch.full((3, 64, 64), 250, dtype=torch.uint8), torch.zeros((3, 64, 64), dtype=torch.uint8)
    for number in range(20):
        blended, _ = Mixing(1.0, 0.0, 2, 1)(light, 0, dark, 1, number, 0)
        assert len(blended.unique()) == 1
        pasted, _ = Mixing(0.0, 1.0, 2, 1)(light, 0, dark, 1, number, 0)
        assert set(pasted.unique().tolist()) <= {0, 250}
        rows, columns = (pasted[0] == 0).nonzero().unbind(1)
        if len(rows):
            assert (pasted[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] == 0).all()
    assert light.unique().tolist() == [250]


def test_with_both_on_about_half_of_the_samples_take_each():
    light, dark = torch.full((3, 64, 64), 250, dtype=torch.uint8), torch.zeros((3, 64, 64), dtype=torch.uint8)
    mixing = Mixing(1.0, 1.0, 2, 1)
    blended = sum(len(mixing(light, 0, dark, 1, number, 0)[0].unique()) == 1 for number in range(100))
    assert 30 <= blended <= 70


def test_shares_follow_the_beta_distribution():
    light, dark = torch.full((3, 8, 8), 250, dtype=torch.uint8), torch.zeros((3, 8, 8), dtype=torch.uint8)
    shares = torch.stack([Mixing(0.2, 0, 2, 1)(light, 0, dark, 1, number, 0)[1][0] for number in range(2000)])
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.04)
    assert float(shares.var()) == pytest.approx(0.25 / 1.4, abs=0.02)


def test_an_empty_request_gives_an_empty_batch_of_the_right_shape():
    answer = _reader()[BatchRequest(0, [])]
    assert (answer.inputs.shape, answer.targets.shape) == ((0, 3, 64, 64), (0,))
    answer = _reader(mixing=Mixing(0.2, 0.0, 3, 1))[BatchRequest(0, [], [])]
    assert (answer.inputs.shape, answer.targets.shape) == ((0, 3, 64, 64), (0, 3))
