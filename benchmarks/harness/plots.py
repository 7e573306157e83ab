"""A plot per section: each row's median as a dot, with a line from the smallest to the largest."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.measurements import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["draw", "write_plots"]

OURS, OTHERS = "tab:orange", "tab:blue"
_TOO_FAR = 12.0
"""From this ratio of the largest to the smallest on, a linear axis would press the small ones together."""


def _plain_ticks(axis: "Axis") -> None:
    """Plain numbers on a logarithmic axis, few enough that they do not run into each other."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_data_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high < 1e4 * low else (1.0,)))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(NullFormatter())


def _dots(axes: "Axes", section: Section, number: int, names: bool) -> None:
    column, found = section.columns[number], []
    for place, (name, row) in enumerate(section.rows.items()):
        if (spread := row[number]) is None:
            continue
        found.append(spread)
        colour = OURS if name in section.ours else OTHERS
        axes.plot([spread.low, spread.high], [place, place], color=colour, linewidth=2, alpha=0.5)
        axes.plot(spread.median, place, "o", color=colour)
        label = f"{spread.median:{column.form}}"
        axes.annotate(label, (spread.median, place), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    medians = [spread.median for spread in found]
    if min(medians) > 0 and max(medians) > _TOO_FAR * min(medians):
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    else:
        axes.set_xlim(left=min(0.0, *(spread.low for spread in found)))
    axes.margins(x=0.08)
    axes.set_yticks(range(len(section.rows)), list(section.rows) if names else [""] * len(section.rows))
    axes.set_ylim(len(section.rows) - 0.5, -0.8)
    axes.set_xlabel(column.title)
    axes.grid(alpha=0.3)


def draw(section: Section) -> "Figure":
    """A panel for the first and one for the last column of most rows."""
    from matplotlib.figure import Figure

    counts = [sum(row[number] is not None for row in section.rows.values()) for number in range(len(section.columns))]
    filled = [number for number, count in enumerate(counts) if count > max(1, len(section.rows) / 2 - 1)]
    shown = list(dict.fromkeys((filled[0], filled[-1]))) if filled else []
    figure = Figure(figsize=(11, 1.2 + 0.42 * len(section.rows)), layout="constrained")
    figure.suptitle(section.title)
    for place, number in enumerate(shown, 1):
        _dots(figure.add_subplot(1, len(shown), place), section, number, names=place == 1)
    return figure


def write_plots(folder: Path, name: str, section: Section) -> Path:
    """Writes ``NAME.png`` into a folder, and the same plot for TensorBoard, which reads that folder."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(section)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=100)
    with SummaryWriter(str(folder)) as writer:
        writer.add_image(f"benchmarks/{name}", pixels[..., :3], dataformats="HWC")
    return path
