"""What plots show of numbers: curves without holes, confusions by class, and the same figure as SVG and as an image."""

import re
from itertools import pairwise

import pytest
from PIL import Image

from recipes.figures.drawing import PALETTE, Box, Dot, Figure, Line, Text
from recipes.figures.plots import (
    _log_ticks,
    attention_plot,
    confusion_plot,
    curve_plot,
    most_confused,
    short,
    thinned,
    ticks,
)


def test_thinning_keeps_the_peaks() -> None:
    points = [(float(update), 1.0) for update in range(10_000)]
    points[777] = (777.0, 50.0)
    points[7_777] = (7_777.0, -50.0)
    kept = thinned(points)
    assert len(kept) <= 300
    assert {50.0, -50.0} <= {value for _, value in kept}
    assert kept == sorted(kept)


def test_a_curve_leaves_out_what_is_not_finite() -> None:
    figure = curve_plot("loss", {"training": [(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 1.0)]})
    assert figure is not None
    (line,) = [shape for shape in figure.shapes if isinstance(shape, Line) and shape.color == "train"]
    assert len(line.points) == 2
    assert curve_plot("loss", {"training": [(1, float("nan"))]}) is None


@pytest.mark.parametrize("points", [[(5, 0.25)], [(5, 0.0)], [(5, 0.5), (6, 0.5)], [(1, -2.0), (9, 3e7)]])
def test_a_curve_of_any_few_points_lies_within_its_figure(points: list[tuple[float, float]]) -> None:
    figure = curve_plot("score", {"validation": points})
    assert figure is not None
    dots = [shape for shape in figure.shapes if isinstance(shape, Dot)]
    assert len(dots) == len(points)
    drawn = [(shape.x, shape.y) for shape in figure.shapes if isinstance(shape, (Dot, Text))]
    drawn += [point for shape in figure.shapes if isinstance(shape, Line) for point in shape.points]
    assert all(0 <= x <= figure.width and 0 <= y <= figure.height for x, y in drawn)


def test_the_axis_of_a_constant_score_of_0_begins_at_0() -> None:
    figure = curve_plot("BLEU", {"validation": [(5, 0.0), (9, 0.0)]})
    assert figure is not None
    labels = [float(shape.text) for shape in figure.shapes if isinstance(shape, Text) and shape.anchor == "end"]
    assert min(labels) == 0
    assert max(labels) == 1


def test_a_loss_that_falls_far_has_a_logarithmic_axis() -> None:
    series = {"training": [(1, 2.0), (2, 0.02)]}
    logarithmic, linear = curve_plot("loss", series), curve_plot("loss", series, may_be_log=False)
    assert logarithmic is not None
    assert linear is not None
    assert "logarithmic" in logarithmic.html()
    assert "logarithmic" not in linear.html()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1, 30, [1, 2, 5, 10, 20]),
        (0.02, 2, [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]),
        (1e-3, 1e3, [10.0**power for power in range(-3, 4)]),
        (1e-6, 1e6, [10.0**power for power in range(-6, 7, 2)]),
    ],
)
def test_a_logarithmic_axis_has_few_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert _log_ticks(low, high) == pytest.approx(expected)


def test_large_counts_of_a_confusion_matrix_are_short() -> None:
    figure = confusion_plot([[10_000, 9_999], [0, 1_234_567]], ["a", "b"], "test")
    assert [shape.text for shape in figure.shapes if isinstance(shape, Text)][5:8] == ["10k", "9999", "b"]
    assert figure.shapes[-1].text == "1.235M"  # type: ignore[union-attr]


def test_numbers_of_an_axis_are_short() -> None:
    numbers = {"1M": 1e6, "1000k": 999_999, "10k": 1e4, "9999": 9_999, "0.001": 1e-3, "9.9e-4": 9.9e-4, "-0.5": -0.5}
    assert [short(number) for number in numbers.values()] == list(numbers)
    assert ticks(2.0, 2.0) == [2.0]


def test_a_confusion_matrix_keeps_the_order_of_the_classes() -> None:
    figure = confusion_plot([[9, 0, 1], [0, 5, 0], [4, 0, 6]], ["owl", "cat", "dog"], "test")
    texts = [shape.text for shape in figure.shapes if isinstance(shape, Text)]
    assert texts[2:8] == ["owl", "cat", "dog", "owl", "9", "1"]
    cells = [shape for shape in figure.shapes if isinstance(shape, Box) and shape.color != "grid"]
    assert [(cell.color, round(cell.opacity**2, 6)) for cell in cells] == [
        *(("train", 0.9), ("val", 0.1), ("train", 1.0)),
        *(("val", 0.4), ("train", 0.6)),
    ]
    assert figure.note.startswith("The largest confusions: dog taken for owl: 4 times, 40 % of dog; owl taken for dog")


@pytest.mark.parametrize(("classes", "side"), [(2, 44), (7, 42), (12, 25), (20, 21)])
def test_the_cells_of_few_classes_fill_300_pixels_at_most(classes: int, side: int) -> None:
    figure = confusion_plot([[1] * classes] * classes, [str(number) for number in range(classes)], "test")
    left = sorted({round(shape.x, 6) for shape in figure.shapes if isinstance(shape, Box)})
    assert [round(after - before, 6) for before, after in pairwise(left)] == [side] * (classes - 1)


def test_of_many_classes_the_most_confused_are_shown() -> None:
    counts = [[0] * 1000 for _ in range(1000)]
    for number in range(1000):
        counts[number][number] = 50
    counts[700][30] = 9
    assert {30, 700} <= set(most_confused(counts, 25))
    figure = confusion_plot(counts, [f"c{number}" for number in range(1000)], "test")
    assert "The 25 of 1,000 classes with most mistakes." in figure.note
    assert "c700 taken for c30: 9 times" in figure.note
    assert max(figure.width, figure.height) < 700


def test_long_sentences_have_a_map_of_their_beginning() -> None:
    tokens = [f"w{number}" for number in range(90)]
    figure = attention_plot([[1 / 90] * 90] * 60, tokens, tokens[:60])
    assert max(figure.width, figure.height) < 1000
    assert "first 40 tokens" in figure.note


def test_long_tokens_are_cut_with_an_ellipsis() -> None:
    figure = attention_plot([[0.5, 0.5]], ["a" * 12, "b" * 13], ["c"])
    assert [shape.text for shape in figure.shapes if isinstance(shape, Text)] == ["a" * 12, "b" * 11 + "…", "c"]
    assert not figure.note


def test_an_image_shows_the_shapes_of_its_figure() -> None:
    figure = Figure("boxes", 40, 20, [Box(0, 0, 20, 20, "train"), Box(20, 0, 20, 20, "val", 0.0)])
    image: Image.Image = figure.image()
    assert image.size == (60, 30)
    assert image.getpixel((10, 10)) == PALETTE["train"]
    assert image.getpixel((50, 10)) == PALETTE["paper"]
    assert re.findall(r'fill="var\(--(\w+)\)"', figure.html()) == ["train", "val"]


@pytest.mark.parametrize(
    "values", [(4.3e-5, 2.1e-4), (0.00241, 0.00246), (0.0024105, 0.0024121), (0.97, 0.9999), (2, 9e7)]
)
def test_the_labels_of_an_axis_have_room_beside_it(values: tuple[float, float]) -> None:
    figure = curve_plot("learning rate", {"training": [(1, values[0]), (7, values[1])]})
    assert figure is not None
    labels = [shape for shape in figure.shapes if isinstance(shape, Text) and shape.anchor == "end"]
    assert labels
    # A digit is about 0.55 of the size of the text wide.
    assert all(label.x - 0.55 * label.size * len(label.text) >= 0 for label in labels), [each.text for each in labels]
    grid = [shape for shape in figure.shapes if isinstance(shape, Line) and shape.color == "grid"]
    assert all(label.x < line.points[0][0] for label, line in zip(labels, grid, strict=True))


def test_a_curve_of_one_epoch_begins_with_the_run() -> None:
    figure = curve_plot("loss", {"training": [(6, 1.480)], "validation": [(6, 1.483)]})
    assert figure is not None
    texts = {shape.text for shape in figure.shapes if isinstance(shape, Text)}
    assert {"0", "6", "1.2", "1.6"} <= texts
    first, second = (shape.y for shape in figure.shapes if isinstance(shape, Dot))
    assert abs(first - second) < 2
