"""Images are shown as the network gets them, with their normalization undone."""

import base64
import io
import re

import pytest
import torch
from PIL import Image

from datamodules.images.augmentation import Normalize
from datamodules.images.mnist import MNISTDataModule
from recipes.figures.drawing import PALETTE
from recipes.figures.images import ImageGrid, displayed
from recipes.mistakes import MistakeImages, is_image_batch, mistakes_grid, most_confident, training_grid
from recipes.mnist import MNISTClassifier
from recipes.runner.report import figures_of
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

NORMALIZE = Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def test_a_normalized_image_is_shown_as_it_was() -> None:
    images = torch.randint(0, 256, (3, 3, 20, 30), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    assert torch.equal(displayed(NORMALIZE(images), NORMALIZE), images)
    assert torch.equal(displayed(images), images)


def test_a_wrong_order_of_channels_is_seen() -> None:
    red = torch.zeros(1, 3, 112, 112, dtype=torch.uint8)
    red[:, 0] = 255
    for channels, color in (([0, 1, 2], (255, 0, 0)), ([2, 1, 0], (0, 0, 255))):
        grid = training_grid(NORMALIZE(red)[:, channels], torch.tensor([0]), ["red"], NORMALIZE)
        image: Image.Image = grid.image()
        found = image.getpixel((60, 60))
        assert isinstance(found, tuple)
        assert all(abs(a - b) < 40 for a, b in zip(found, color, strict=True))


def test_large_images_are_reduced_without_distortion() -> None:
    assert displayed(torch.zeros(2, 3, 300, 600)).shape == (2, 3, 56, 112)
    assert displayed(torch.zeros(2, 1, 1, 2000)).shape == (2, 1, 1, 112)


def test_a_soft_label_is_named_by_its_largest_shares() -> None:
    names = ["cat", "dog", "owl"]
    soft = training_grid(torch.zeros(1, 1, 4, 4), torch.tensor([[0.3, 0.7, 0.0]]), names)
    assert list(soft.captions) == [("dog 70 %", "cat 30 %")]


def test_a_missing_label_is_named() -> None:
    hard = training_grid(torch.zeros(2, 1, 4, 4), torch.tensor([-100, 2]), ["cat", "dog", "owl"])
    assert list(hard.captions) == [("no label",), ("owl",)]
    assert "brightness is stretched" in hard.note


def test_a_group_of_images_is_not_divided_between_rows() -> None:
    images, captions = torch.zeros(20, 1, 4, 4, dtype=torch.uint8), [("a",)] * 20
    for group, columns, fitting in ((5, 8, 10), (5, 7, 5), (5, 2, 5), (3, 8, 9)):
        grouped = ImageGrid("mistakes", images, captions, group=group)
        assert grouped.image(columns).size == ImageGrid("mistakes", images, captions).image(fitting).size
        row, *others = grouped.html().split("</div>")
        assert row.count("<img") == group
        assert len(others) == -(-20 // group) + 1


def test_a_caption_is_cut_to_the_width_of_its_image() -> None:
    images = torch.zeros(2, 1, 96, 96, dtype=torch.uint8)
    image = ImageGrid("training", images, [("W" * 60, "second line"), ("",)]).image(2)
    below, gap = image.crop((8, 104, 104, image.height)), image.crop((104, 0, 112, image.height))
    colors = {color for _, color in below.getcolors(1 << 16) or ()}
    assert {PALETTE["paper"], PALETTE["ink"], PALETTE["faint"]} <= colors
    assert gap.getcolors() == [(gap.width * gap.height, PALETTE["paper"])]


@pytest.mark.parametrize(
    ("side", "group", "kind"), [(64, 1, "png"), (65, 1, "jpeg"), (32, 2, "png"), (33, 2, "jpeg"), (64, 2, "jpeg")]
)
def test_a_page_has_small_images_as_png(side: int, group: int, kind: str) -> None:
    color = torch.tensor([200, 100, 50], dtype=torch.uint8).view(3, 1, 1)
    page = ImageGrid("training", color.expand(2, 3, side, side), [("a",), ("b",)], group=group).html()
    found = re.findall(r'src="data:image/(\w+);base64,([^"]+)"', page)
    assert [name for name, _ in found] == [kind] * 2
    assert ('class="small"' in page) == (side <= 64), "they are magnified"
    for _, data in found:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.size == (side, side)
            pixel = torch.tensor(image.getpixel((5, 5)))
            assert (pixel - color.flatten().int()).abs().max() <= 3


def test_what_is_no_image_has_no_grid() -> None:
    for inputs in (torch.zeros(2, 5), torch.zeros(0, 1, 4, 4), torch.zeros(2, 2, 4, 4), [1, 2]):
        assert not is_image_batch(inputs)


def test_the_most_confident_mistakes_of_all_batches_are_kept() -> None:
    kept = MistakeImages()
    for batch in range(10):
        images = torch.full((8, 1, 4, 4), batch / 10)
        probabilities = torch.arange(8) / 100 + batch / 10
        true, predicted = torch.zeros(8), (torch.arange(8) % 2).float()
        kept.add(images, torch.stack((true, predicted, probabilities), 1))
    shown = most_confident(kept.mistakes(torch.arange(1000, 1080)), rank=0)
    assert shown is not None
    grid = mistakes_grid(*shown, ["a", "b"], (), "test", Normalize([0.0], [1.0]))
    # Every second sample is a mistake; the last ones are the surest.
    assert grid.captions[0] == ("b (97 %)", "is a", "sample 1,079")
    assert grid.captions[23] == ("b (41 %)", "is a", "sample 1,033")
    assert [int(image.max()) for image in grid.images[:5]] == [230, 230, 230, 230, 204]


def _mistakes_of_ranks(world_size: int) -> tuple[list[tuple[str, ...]], bytes]:
    torch.manual_seed(1)
    model = MNISTClassifier(network="classic")
    data = MNISTDataModule(dataset="digits", eval_batch_size=50)
    trainer = quiet_trainer(world_size=world_size)
    trainer.test(model, data, verbose=False)
    grid = figures_of(trainer)["mistakes"]
    assert isinstance(grid, ImageGrid)
    return [tuple(lines) for lines in grid.captions], bytes(grid.images.numpy())


def test_two_ranks_show_the_mistakes_of_one() -> None:
    (alone,) = run_ranks(_mistakes_of_ranks, 1, 1)
    both = run_ranks(_mistakes_of_ranks, 2, 2)
    assert both == [alone, alone]
    captions, images = alone
    assert (len(captions), len(images)) == (24, 24 * 28 * 28)
