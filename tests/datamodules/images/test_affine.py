import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.images.augmentation import RandomAffine, affine_matrices, warp

IDENTITY = torch.tensor([[1.0, 0, 0, 0, 1, 0]])
AUGMENT = RandomAffine(seed=1, shift=2, rotation=10, scale=0.1)


def _images(n: int, side: int = 28) -> torch.Tensor:
    return torch.rand(n, 1, side, side, generator=torch.Generator().manual_seed(0)) * 255


@pytest.mark.parametrize("side", [8, 28])
def test_warp_is_torchs_own_affine_map(side):
    images = _images(20, side)
    matrices = affine_matrices(3, 1, torch.arange(20), shift=3, rotation=40, scale=0.3, size=side)
    grid = F.affine_grid(matrices.view(20, 2, 3), list(images.shape), align_corners=False)
    assert torch.allclose(warp(images, matrices), F.grid_sample(images, grid, align_corners=False), atol=2e-2)


def test_affine_parameters_use_exactly_their_range():
    index = torch.arange(20_000)
    a, _, dx, d, _, dy = affine_matrices(1, 0, index, shift=2, rotation=10, scale=0.1, size=28).double().unbind(1)
    ranges = {
        "pixels right": (-dx * 14, 2),
        "pixels down": (-dy * 14, 2),
        "degrees": (torch.atan2(d, a).rad2deg(), 10),
        "scale": (1 / torch.hypot(a, d) - 1, 0.1),
    }
    for name, (values, limit) in ranges.items():
        assert float(values.abs().max()) <= limit * 1.00001, name
        assert float(values.max()) > limit * 0.999, name
        assert float(values.min()) < -limit * 0.999, name
        assert abs(float(values.mean())) < 5 * limit / math.sqrt(3 * 20_000), name
    names = torch.stack([values for values, _ in ranges.values()])
    off_diagonal = torch.corrcoef(names) - torch.eye(4, dtype=torch.float64)
    assert float(off_diagonal.abs().max()) < 5 / math.sqrt(20_000)


def test_flips_mirror_the_other_half_in_the_next_epoch():
    images, index = _images(500), torch.arange(500)
    even, odd, later = (RandomAffine(1, 0, 0, 0, flip=True)(images, index, epoch) for epoch in (0, 1, 2))
    mirrored = torch.tensor([torch.allclose(a, b.flip(2), atol=0.1) for a, b in zip(even, images)])
    assert 200 < int(mirrored.sum()) < 300
    flips = mirrored.view(-1, 1, 1, 1)
    assert torch.allclose(even, torch.where(flips, images.flip(3), images), atol=0.1)
    assert torch.allclose(odd, torch.where(flips, images, images.flip(3)), atol=0.1)
    assert torch.equal(even, later)
    # Where both are random, an image is mirrored around its own middle, and moved as it would be.
    moved, both = (RandomAffine(1, 2, 0, 0, flip=flip)(images[:20], index[:20], 0) for flip in (False, True))
    assert torch.allclose(both, torch.where(flips[:20], moved.flip(3), moved), atol=0.1)


@settings(max_examples=30)
@given(
    rows=st.lists(st.integers(0, 59_999), min_size=1, max_size=67, unique=True),
    epoch=st.integers(0, 100),
    data=st.data(),
)
def test_a_sample_is_augmented_to_the_same_bits_in_any_batch(rows, epoch, data):
    index = torch.tensor(rows)
    images = _images(len(rows))
    together = AUGMENT(images, index, epoch)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [AUGMENT(images[part], index[part], epoch) for part in (slice(cut), slice(cut, None)) if len(index[part])]
    assert torch.equal(together, torch.cat(parts))
    one = data.draw(st.integers(0, len(rows) - 1))
    assert torch.equal(together[one], AUGMENT(images[one : one + 1], index[one : one + 1], epoch)[0])
    order = torch.randperm(len(rows))
    assert torch.equal(together[order], AUGMENT(images[order], index[order], epoch))
