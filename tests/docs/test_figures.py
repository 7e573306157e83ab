"""A figure in the README or on a page is that of `benchmarks/results/`: each stands in one file, and pages quote it.

A row of `SPEED` and `ACCURACY` says where a figure is measured and by which words pages quote it. Every place in which
these words stand has to have the measured figure, so that two pages cannot contradict each other.
"""

# ruff: noqa: E501 - a row is a line
import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = {
    path.relative_to(ROOT).as_posix(): re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
    for pattern in ("README.md", "docs/**/*.md", "recipes/*/README.md", "benchmarks/README.md")
    for path in sorted(ROOT.glob(pattern))
}
EPYC, H100 = "epyc-2026-11-28.json", "h100-2026-11-27.json"

RANGE = r"\*{0,2}(?P<median>[\d.]+)(?: times)?(?: its time| fewer| less| more)? \((?P<min>[\d.]+)(?:\.\.| to )(?P<max>[\d.]+)"
"""A median with its range, as tables write it."""

SPEED = [
    (EPYC, "training_loop", "default, recipe, not augmented", "times plain loop", 2, r"default network, all features on \| [^|]*\| " + RANGE),
    (EPYC, "training_loop", "default, recipe, not augmented", "times plain loop", 2, r"step of the default network \| [^|]*\| " + RANGE),
    (EPYC, "training_loop", "tiny, recipe, not augmented", "times plain loop", 2, r"step of a tiny network, all features on \| [^|]*\| " + RANGE),
    (EPYC, "training_loop", "tiny, recipe, not augmented", "times plain loop", 2, r"tiny network within 1.15 times a plain loop, all features on \| " + RANGE),
    (EPYC, "training_loop", "tiny, bare Trainer", "times plain loop", 2, r"tiny network[^|]*\|[^|]*\| [^|]*; a bare Trainer (?:takes )?(?P<median>[\d.]+)"),
    (EPYC, "training_loop", "tiny, fastai", "times plain loop", 2, r"a bare Trainer [\d.]+, fastai (?P<median>[\d.]+)"),
    (EPYC, "time_to_accuracy", "recipe", "times less, first step", 1, r"99 % on MNIST's test set[^|]*\| [^|]*\| (?:3.5 \([\d.]+\), )?" + RANGE),
    (EPYC, "time_to_accuracy", "classic example", "seconds from the first step", 1, r"PyTorch's example, rewritten: " + RANGE),
    (EPYC, "fine_tuning", "an epoch, only the head, cached features", "times faster", 0, r"epochs? of the head (?:on cached features \| [^|]*\| [\d. ()s]+, |r[ua]n )(?P<median>\d+) times"),
    (EPYC, "input_pipeline", "MNISTDataModule, augmented", "times faster than torchvision", 1, r"torchvision's, not augmented: [^|]*\| [^,]*, (?P<median>[\d.]+) times less"),
    (EPYC, "images", "later epochs, from the cache", "times faster than ImageFolder", 2, r"in later epochs \| [^|]*\| [^|]*, (?P<median>[\d.]+) times more"),
    (EPYC, "decoding", "recurrent, recipe", "times faster", 1, r"sentences a second, beam of 5 \| [^|]*\| [^,]*, " + RANGE),
    (EPYC, "scaling", "2 processes", "% of as many side by side", 0, r"ResNet-18 with (?P<median>\d+) % of the samples"),
    (EPYC, "scaling", "2 processes", "the same, plain loop", 0, r"a plain DDP loop has (?P<median>\d+) %"),
    (H100, "resnet50", "recipe", "times plain loop", 2, r"a step of ResNet-50 on one H100 \| [^|]*\| " + RANGE),
    (H100, "resnet50", "recipe", "times plain loop", 2, r"\| ResNet-50, all layers, 128 images of 224 px \| [^|]*\| [^|]*\| " + RANGE),
]  # fmt: skip

ACCURACY = [
    ("MNIST, recipes.mnist, seeds 1 to 3", 2, r"(?P<found>[\d.]+) % (?:accuracy )?on (?:MNIST's|the) test set \(mean of 3 seeds\)"),
    ("MNIST, recipes.mnist, seeds 1 to 3", 2, r"\(mean (?P<found>99[\d.]+)\)"),
    ("CIFAR-10 as JPEG files, cifarnet, seeds 1 to 3", 0, r"CIFAR-10 as JPEG files: (?P<found>[\d.]+) %"),
    ("Multi30k, German to English, recurrent, one seed", 1, r"German to English: (?P<found>[\d.]+) BLEU"),
    ("Multi30k, German to English, recurrent, one seed", 2, r"one seed \| [\d.]+ ± [\d.]+ BLEU \(13a\), (?P<found>[\d.]+) lower-cased"),
]  # fmt: skip


def occurrences(pattern: str) -> list[tuple[str, re.Match[str]]]:
    found = [(page, match) for page, text in PAGES.items() for match in re.finditer(pattern, text)]
    assert found, f"no page has the words {pattern!r}: remove the row"
    return found


@pytest.mark.parametrize("row", SPEED, ids=lambda row: row[-1][:50])
def test_a_speed_on_a_page_is_the_measured_one(row: tuple[str, str, str, str, int, str]) -> None:
    file, section, name, column, digits, pattern = row
    measured: dict[str, Any] = json.loads((RESULTS / file).read_text())["sections"][section]["rows"][name][column]
    for page, match in occurrences(pattern):
        for part, text in match.groupdict().items():
            assert abs(float(text) - measured[part]) <= 0.51 * 10**-digits, f"{page}: {match[0]}"


@pytest.mark.parametrize("row", ACCURACY, ids=lambda row: row[-1][:50])
def test_an_accuracy_on_a_page_is_the_measured_one(row: tuple[str, int, str]) -> None:
    name, digits, pattern = row
    measured = mean(json.loads((RESULTS / "accuracy.json").read_text())[name]["values"])
    for page, match in occurrences(pattern):
        assert match["found"] == f"{measured:.{digits}f}", f"{page}: {match[0]}"
