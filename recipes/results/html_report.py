"""``report.html``: a finished run on one page, from the files in its folder."""

import csv
import itertools
from pathlib import Path
from typing import Any

from recipes.files import write_text
from recipes.results.curves import METRICS, curve_svg, read_curves
from recipes.results.results_file import Results, read_results
from recipes.results.texts import memory_text, score_text, value_text

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"
_MOST_ROWS = 25
_MOST_CURVES = 8


def _tables(folder: Path) -> dict[str, list[list[str]]]:
    """The first rows of the tables in the folder, such as those of classes, mistakes and translations."""
    tables = {}
    for path in sorted(folder.glob("*.csv")):
        if path.name != METRICS:
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                tables[path.name] = list(itertools.islice(csv.reader(file), _MOST_ROWS + 1))
    return tables


def _environment(results: Results) -> dict[str, str]:
    data: dict[str, Any] = results.get("data", {})
    seconds = results.get("seconds", {})
    sizes = ", ".join(f"{size:,} {part}" for part, size in data.get("sizes", {}).items())
    rows = {
        "data": ": ".join(filter(None, (data.get("name", ""), sizes))),
        "left out": ", ".join(f"{count:,} {reason}" for reason, count in data.get("left_out", {}).items()),
        "parameters": f"{results.get('parameters', 0):,} ({results.get('trainable_parameters', 0):,} trainable)",
        "epochs": f"{results.get('epochs', 0):g}",
        "seconds": ", ".join(f"{value:.1f} {part.replace('_', '-')}" for part, value in seconds.items()),
        "speed": f"{rate:,.0f} samples/s" if (rate := results.get("samples_per_second")) else "",
        "peak memory": memory_text(results.get("peak_memory_bytes", {})),
        "hardware": results.get("hardware", ""),
        "nodes": str(results.get("num_nodes", 1)),
        "host": results.get("host", ""),
        "started": results.get("started_at", ""),
        "ended": results.get("ended_at", ""),
        "stopped early": results.get("stopped_early") or "",
        **results.get("versions", {}),
    }
    return {name: text for name, text in rows.items() if text}


def _page(folder: Path, results: Results) -> str:
    from jinja2 import Template

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    best, config = results.get("best"), results.get("config", {})
    curves = itertools.islice(read_curves(folder).items(), _MOST_CURVES)
    page = Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True).render(
        title=f"{results.get('recipe', folder.resolve().parent.name)}: {folder.resolve().name}",
        command=results.get("command", ""),
        best=f"Scores of {Path(best['checkpoint']).name}, saved after {best['step']:,} updates" if best else "Scores",
        headline=results.get("headline", {}),
        scores={name: score_text(value) for name, value in results["scores"].items() if "_class_" not in name},
        drawings=[curve_svg(title, lines) for title, lines in curves],
        tables=_tables(folder),
        most_rows=_MOST_ROWS,
        changed={name: value_text(config[name]) for name in results.get("changed", ()) if name in config},
        settings={name: value_text(value) for name, value in config.items()},
        environment=_environment(results),
    )
    return str(page)


def write_report(folder: Path) -> Path:
    """Write the page of a finished run into its folder, from results.json, metrics.csv and the tables beside them.

    Raises:
        UserError: the folder has no results.
        OSError: the page cannot be written; an earlier one is as it was.
    """
    path = folder / REPORT
    write_text(path, _page(folder, read_results(folder)))
    return path
