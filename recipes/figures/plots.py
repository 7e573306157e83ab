"""Plots of the curves of a run, the confusion matrix, and the attention between two sentences."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter

from recipes.figures.drawing import Box, Color, Dot, Figure, Line, Shape, Text

Points = Sequence[tuple[float, float]]

# A phone shows a plot of this width without shrinking its text.
_WIDTH = 344
_HEIGHT = 208
_LEFT = 50
_RIGHT = 10
_TOP = 30
_BOTTOM = 26
_MAX_POINTS = 300
_MAX_CLASSES = 25
_MAX_TOKENS = 40
_LOG_FROM = 30.0
"""The smallest ratio of the largest to the smallest value for a logarithmic axis."""


def thinned(points: Points, most: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most `most` points: the lowest and the highest point of each of several equal parts, to keep all peaks.

    Example:
        >>> thinned([(0, 1.0), (1, 9.0), (2, 2.0), (3, 0.0), (4, 3.0), (5, 4.0)], most=4)
        [(0, 1.0), (1, 9.0), (3, 0.0), (5, 4.0)]
    """
    if len(points) <= most:
        return list(points)
    number_of_sections = most // 2
    extremes = []
    for section in range(number_of_sections):
        start = section * len(points) // number_of_sections
        stop = (section + 1) * len(points) // number_of_sections
        points_of_section = points[start:stop]
        low = min(points_of_section, key=itemgetter(1))
        high = max(points_of_section, key=itemgetter(1))
        extremes += sorted({low, high})
    return extremes


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers between `low` and `high`, at most ``most + 1``.

    Example:
        >>> ticks(0.0, 0.94), ticks(3, 861)
        ([0.0, 0.2, 0.4, 0.6, 0.8], [200.0, 400.0, 600.0, 800.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two positive numbers; if there are many powers, only these."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        candidates = [factor * 10.0**power for power in powers for factor in factors]
        inside = [value for value in candidates if low * 0.999 <= value <= high * 1.001]
        if len(inside) <= 7 or factors == (1,):
            stride = -(-len(inside) // 7) if inside else 1
            return inside[::stride]
    return []


def short(number: float) -> str:
    """Return a number as text for an axis; positive numbers have at most seven characters.

    Example:
        >>> [short(n) for n in (0, 0.002, 0.25, 12_000, 3_000_000, 0.00015)]
        ['0', '0.002', '0.25', '12k', '3M', '1.5e-4']
    """
    size = abs(number)
    if size >= 1e6:
        return f"{number / 1e6:.4g}M"
    if size >= 1e4:
        return f"{number / 1e3:.4g}k"
    text = f"{number:.4g}"
    if len(text) <= 7 and (size >= 1e-3 or not number):
        return text
    digits, _, power = f"{number:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def curve_plot(title: str, series: Mapping[str, Points], may_be_log: bool = True) -> Figure | None:
    """Plot series of one quantity over updates; return None without a finite value.

    A series of one point is a dot, and a series of few points has a dot at each point.

    Args:
        title: the title of the plot.
        series: (update, value) in the order of updates, by name; the name "validation" has the color of validation.
        may_be_log: whether the axis is logarithmic if all values are positive and the largest is 30 times the smallest.

    Example:
        >>> figure = curve_plot("loss", {"training": [(1, 2.3), (2, 1.1)], "validation": [(2, 1.0)]})
        >>> figure.title, figure.name
        ('loss', 'loss over updates: training from 2.3 to 1.1, validation 1')
    """
    finite = {name: [point for point in points if math.isfinite(point[1])] for name, points in series.items()}
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return None
    values = [y for points in finite.values() for _, y in points]
    updates = [x for points in finite.values() for x, _ in points]
    low = min(values)
    high = max(values)
    is_log = may_be_log and low > 0 and high / low >= _LOG_FROM
    first = min(updates)
    last = max(updates)
    is_single = first == last
    if is_single:  # One epoch: the axis begins with the run.
        first = min(0, first - 1)
    # A minimum height of the axis: nearly equal values of one epoch should look equal.
    margin = ((abs(low) + abs(high)) * 0.1 or 1.0) - (high - low) / 2
    if high == low or (is_single and margin > 0):
        # The axis of a score without a negative value, such as a BLEU of 0, has none either.
        low = low - margin if low < 0 else max(0.0, low - margin)
        high += margin
    inner_width = _WIDTH - _LEFT - _RIGHT
    inner_height = _HEIGHT - _TOP - _BOTTOM

    def x_of(update: float) -> float:
        return _LEFT + inner_width * (update - first) / (last - first)

    def y_of(value: float) -> float:
        share = (value - low) / (high - low)
        if is_log:
            share = math.log(value / low) / math.log(high / low)
        return _TOP + inner_height * (1 - share)

    shapes: list[Shape] = []
    for value in _log_ticks(low, high) if is_log else ticks(low, high):
        y = y_of(value)
        shapes.append(Line([(_LEFT, y), (_WIDTH - _RIGHT, y)], "grid"))
        shapes.append(Text(_LEFT - 6, y + 4, short(value), anchor="end"))
    for update in ticks(first, last):
        if update == int(update):
            shapes.append(Text(x_of(update), _HEIGHT - 8, short(update), anchor="middle"))
    shapes.append(Text(0, 14, title + (", logarithmic" if is_log else ""), 13, color="ink"))
    right = float(_WIDTH - _RIGHT)
    for name in reversed(finite):
        color: Color = "val" if name == "validation" else "train"
        if len(finite) > 1:
            shapes.append(Text(right, 14, name, anchor="end", color=color))
            right -= 7.0 * len(name) + 8
    for name, points in finite.items():
        color = "val" if name == "validation" else "train"
        placed = [(x_of(x), y_of(y)) for x, y in thinned(points)]
        if len(placed) > 1:
            shapes.append(Line(placed, color, 1.6))
        if len(placed) <= 30:
            shapes += [Dot(x, y, color) for x, y in placed]
    spans = []
    for name, points in finite.items():
        begin = short(points[0][1])
        end = short(points[-1][1])
        spans.append(f"{name} {begin}" if len(points) == 1 else f"{name} from {begin} to {end}")
    return Figure(title, _WIDTH, _HEIGHT, shapes, name=f"{title} over updates: {', '.join(spans)}")


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _largest_first(pair: tuple[int, int, int]) -> tuple[int, int, int]:
    count, true, predicted = pair
    return -count, true, predicted


def confusions(counts: Sequence[Sequence[int]], names: Sequence[str], most: int = 5) -> list[str]:
    """Return the largest confusions in words: true class, predicted class, count and share.

    Example:
        >>> confusions([[8, 2], [0, 5]], ["cat", "dog"])
        ['cat taken for dog: 2 times, 20 % of cat']
    """
    pairs = [
        (count, true, predicted)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if count and true != predicted
    ]
    pairs.sort(key=_largest_first)
    sentences = []
    for count, true, predicted in pairs[:most]:
        times = "once" if count == 1 else f"{count:,} times"
        share = 100 * count / sum(counts[true])
        sentences.append(f"{names[true]} taken for {names[predicted]}: {times}, {share:.2g} % of {names[true]}")
    return sentences


def most_confused(counts: Sequence[Sequence[int]], most: int) -> list[int]:
    """Return the classes with the most mistakes, in the order of the data."""
    mistakes = [sum(row) - row[true] for true, row in enumerate(counts)]
    for true, row in enumerate(counts):
        for predicted, count in enumerate(row):
            if count and predicted != true:
                mistakes[predicted] += count
    # A stable sort: among classes with equal counts, the first are kept.
    worst = sorted(range(len(mistakes)), key=mistakes.__getitem__, reverse=True)
    return sorted(worst[:most])


def confusion_plot(counts: Sequence[Sequence[int]], names: Sequence[str], part: str) -> Figure:
    """Plot the confusion matrix: a row for each true class and a column for each predicted class.

    The darkness of a cell is its share of the row. With more than 25 classes, the 25 most confused classes are shown,
    with a note.

    Args:
        counts: counts of shape (classes, classes): true class by predicted class.
        names: the names of the classes.
        part: the evaluated part of the data, such as "test".
    """
    shown = list(range(len(counts)))
    if len(counts) > _MAX_CLASSES:
        shown = most_confused(counts, _MAX_CLASSES)
    labels = [_cut(str(names[number]), 14) for number in shown]
    longest = max(map(len, labels))
    side = max(21, min(44, 300 // len(shown)))
    left = 24 + 6.4 * longest
    rises = longest > 3
    top = 22 + (6.4 * longest if rises else 14)
    shapes: list[Shape] = [
        Text(left, 12, "predicted", 12),
        Text(12, top + side * len(shown) / 2, "true", 12, "middle", rises=True),
    ]
    for column, label in enumerate(labels):
        x = left + side * (column + 0.5)
        if rises:
            shapes.append(Text(x + 4, top - 6, label, rises=True, color="ink"))
        else:
            shapes.append(Text(x, top - 6, label, anchor="middle", color="ink"))
    for row, true in enumerate(shown):
        y = top + side * row
        shapes.append(Text(left - 6, y + side / 2 + 4, labels[row], anchor="end", color="ink"))
        total = sum(counts[true]) or 1
        for column, predicted in enumerate(shown):
            count = counts[true][predicted]
            x = left + side * column
            # The root and the minimum make a mistake of 1 % visible next to a diagonal of 99 %.
            share = max(0.15, math.sqrt(count / total))
            shapes.append(Box(x, y, side - 1, side - 1, "grid", 0.35))
            if not count:
                continue
            shapes.append(Box(x, y, side - 1, side - 1, "train" if true == predicted else "val", share))
            text = str(count) if count < 10_000 else short(round(count, -3))
            size = min(10.0, 1.55 * side / max(2, len(text)))
            color: Color = "paper" if share > 0.6 else "ink"
            shapes.append(Text(x + (side - 1) / 2, y + side / 2 + size / 3, text, size, "middle", color))
    note = "; ".join(confusions(counts, names)) or "no mistake"
    if len(shown) < len(counts):
        note = f"The {len(shown)} of {len(counts):,} classes with most mistakes. The largest confusions: {note}"
    else:
        note = f"The largest confusions: {note}"
    width = left + side * len(shown) + 4
    return Figure(f"Confusion matrix, {part}", width, top + side * len(shown) + 4, shapes, f"{note}.")


def attention_plot(
    weights: Sequence[Sequence[float]], source: Sequence[str], target: Sequence[str], title: str = "Attention"
) -> Figure:
    """Plot attention: a row for each token of the translation, a column for each token of the source.

    Sentences are cut after 40 tokens.

    Args:
        weights: weights of shape (target, source); each row has the sum 1.
        source: the tokens of the source.
        target: the tokens of the translation.
        title: the title of the figure.
    """
    columns = [_cut(token, 12) for token in source[:_MAX_TOKENS]]
    rows = [_cut(token, 12) for token in target[:_MAX_TOKENS]]
    side = 20
    left = 12 + 6.8 * max(map(len, rows))
    top = 12 + 6.8 * max(map(len, columns))
    shapes: list[Shape] = []
    for column, token in enumerate(columns):
        shapes.append(Text(left + side * (column + 0.5) + 4, top - 6, token, rises=True, color="ink"))
    for row, token in enumerate(rows):
        y = top + side * row
        shapes.append(Text(left - 6, y + side / 2 + 4, token, anchor="end", color="ink"))
        for column in range(len(columns)):
            weight = weights[row][column]
            shapes.append(Box(left + side * column, y, side - 1, side - 1, "grid", 0.35))
            if weight >= 0.01:
                shapes.append(Box(left + side * column, y, side - 1, side - 1, "train", weight))
    is_cut = len(columns) < len(source) or len(rows) < len(target)
    note = f"The first {_MAX_TOKENS} tokens of each side." if is_cut else ""
    return Figure(title, left + side * len(columns) + 4, top + side * len(rows) + 4, shapes, note)
