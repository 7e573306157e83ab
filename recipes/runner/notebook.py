"""Show a run in a notebook: a bar and a table of epochs in one output, which ends with the curves."""

import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from callbacks.lib.pace import batches_left
from callbacks.lib.updates import updates_made
from callbacks.run_progress import RunProgress
from datamodules.lightning import CSVLogger, pl
from recipes.figures.drawing import Figure
from recipes.runner.curves import run_curves

_STYLE = """<style>
.lightning-recipes { --paper: transparent; --ink: currentColor; --faint: currentColor; --grid: rgba(128, 128, 128, .3);
  --train: #3b82f6; --val: #e07b1a; }
.lightning-recipes progress { width: 16rem; }
.lightning-recipes table { margin: .5rem 0; }
.lightning-recipes td, .lightning-recipes th { text-align: right; padding: .1rem .8rem .1rem 0; }
.lightning-recipes svg { max-width: 100%; margin-right: 1.5rem; }
</style>"""


def in_notebook() -> bool:
    """Return whether this program runs in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


def framed(*parts: str) -> str:
    """Return parts of a page in one element, with the style that they need."""
    return f'{_STYLE}<div class="lightning-recipes">{"".join(parts)}</div>'


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table, with the columns of all of them."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{html.escape(str(row.get(name, '')))}</td>" for name in columns)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def plots(figures: Mapping[str, Figure]) -> str:
    """Return figures side by side, as HTML."""
    return "".join(figure.html() for figure in figures.values())


class NotebookProgress(RunProgress):
    """Progress of a run in one output of a notebook: a bar, the line of `RunProgress` and a row for each epoch.

    At the end of training, the curves of the run replace the bar. The bar of an evaluation disappears at its end.

    Runs on: the hooks of `RunProgress`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[dict[str, str]] = []
        self._output: Any = None

    @override
    def _draws(self) -> bool:
        return True

    def _update(self, *parts: str) -> None:
        from IPython.display import HTML, display

        content = HTML(framed(*parts))  # type: ignore[no-untyped-call]
        if self._output is None:
            self._output = display(content, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._output.update(content)

    @override
    def _draw(self, trainer: pl.Trainer, parts: Sequence[tuple[int, str]]) -> None:
        line = html.escape("  ".join(text for _, text in parts if text))
        share = ""
        trains = trainer.state.fn == "fit" and not trainer.sanity_checking
        remaining = batches_left(trainer) if trains else float("inf")
        if remaining < float("inf"):
            share = f' value="{updates_made(trainer) / max(1, updates_made(trainer) + remaining):.3f}"'
        self._update(f"<progress{share}></progress> {line}", table(self._rows))

    @override
    def _end_epoch(self, trainer: pl.Trainer, scores: Mapping[str, float], seconds: float) -> None:
        values = {name: f"{value:.4f}" for name, value in scores.items()}
        self._rows.append({"epoch": str(trainer.current_epoch + 1), **values, "seconds": f"{seconds:.1f}"})
        self._update(table(self._rows))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        figures: dict[str, Figure] = {}
        for logger in trainer.loggers:
            logger.save()  # The curves are drawn from metrics.csv.
            if isinstance(logger, CSVLogger):
                figures = run_curves(Path(logger.log_dir), getattr(pl_module, "monitor", None))
        self._update(table(self._rows), plots(figures))
        self._output = None

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._output is not None and trainer.state.fn != "fit":
            self._update("")
        self._output = None
