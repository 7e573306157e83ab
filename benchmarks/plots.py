"""A bar chart per section: the median of each row, with whiskers from the smallest to the largest."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "write_plots"]


def draw(section: Section) -> "Figure":
    """One panel for each of the first and the last column that has figures."""
    from matplotlib.figure import Figure

    filled = [
        number
        for number in range(len(section.columns))
        if sum(row[number] is not None for row in section.rows.values()) > 1
    ]
    shown = list(dict.fromkeys((filled[0], filled[-1]))) if filled else []
    figure = Figure(figsize=(11, 1.2 + 0.32 * len(section.rows)), layout="constrained")
    figure.suptitle(section.title)
    for place, number in enumerate(shown, 1):
        axes = figure.add_subplot(1, len(shown), place)
        rows = [(name, row[number]) for name, row in section.rows.items()]
        spreads = [(name, spread) for name, spread in rows if spread is not None]
        medians = [spread.median for _, spread in spreads]
        whiskers = [
            [spread.median - spread.low for _, spread in spreads],
            [spread.high - spread.median for _, spread in spreads],
        ]
        axes.barh([name for name, _ in spreads], medians, xerr=whiskers, color="#4878a8", capsize=3)
        axes.invert_yaxis()
        axes.set_xlabel(section.columns[number].title)
        axes.grid(axis="x", alpha=0.3)
        axes.bar_label(axes.containers[-1], fmt="%.3g", padding=3, fontsize=8)  # type: ignore[arg-type]
        axes.margins(x=0.15)
    return figure


def write_plots(folder: Path, name: str, section: Section) -> Path:
    """Writes ``NAME.png`` into a folder, and the same picture for TensorBoard, which reads that folder."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(section)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=100)
    with SummaryWriter(str(folder)) as writer:
        writer.add_image(f"benchmarks/{name}", np.asarray(canvas.buffer_rgba())[..., :3], dataformats="HWC")
    return path
