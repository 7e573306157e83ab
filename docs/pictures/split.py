"""Draws `split.svg`: ``PYTHONPATH=. python docs/pictures/split.py``.

The figures are those of the test that the picture is about: final weights of runs that are cut into processes and
micro-batches, against a loop in plain torch.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from tests.end_to_end.test_split_table import SPLITS, measure


def main() -> None:
    """Train, and draw."""
    errors = measure()
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "split", "font.size": 11}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 2.9), sharey=True, layout="constrained")
    splits = SPLITS[1:]
    for axes, task, title in (
        (left, "CNN with BatchNorm", "images, network with BatchNorm"),
        (right, "token model", "sentences of unequal length"),
    ):
        rows = [errors[task, *split, torch.float64] for split in splits]
        for label, values, colour in (
            ("stock Lightning", [stock for _, stock in rows], "#c0392b"),
            ("lightning-recipes", [ours for ours, _ in rows], "#2471a3"),
        ):
            axes.plot(range(len(splits)), values, "o", color=colour, markersize=8, label=label)
        axes.axhspan(1e-17, 1e-14, color="#2471a3", alpha=0.08)
        axes.set(yscale="log", ylim=(1e-17, 10), title=title, xlabel="processes x micro-batches")
        axes.set_xticks(range(len(splits)), [f"{world} x {parts}" for world, parts in splits])
        axes.grid(axis="y", alpha=0.3)
        axes.set_xlim(-0.5, len(splits) - 0.5)
    left.set_ylabel("largest error of a\nfinal weight (float64)")
    right.legend(loc="center right", framealpha=1)
    right.text(-0.4, 2e-15, "rounding", color="#2471a3", fontsize=9)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
