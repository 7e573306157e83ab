"""Write ``report.html``: the results of a run on one page that needs no other file."""

import csv
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.figures.drawing import colour_style
from recipes.figures.images import Picture
from recipes.runner.loggers import METRICS
from recipes.runner.results import write_text
from recipes.tables import Headline

_MOST_ROWS = 25
_MOST_TRANSLATIONS = 12
_TILES = 3
_TRANSLATIONS = "test_translations.csv"


def _tables(folder: Path) -> dict[str, list[list[str]]]:
    """Return the first rows of the tables in a folder, such as those of classes and mistakes."""
    tables = {}
    for path in sorted(folder.glob("*.csv")):
        if path.name not in (METRICS, _TRANSLATIONS):
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                tables[path.name] = list(itertools.islice(csv.reader(file), _MOST_ROWS + 1))
    return tables


def _translations(path: Path) -> tuple[list[dict[str, str]], int]:
    """Return at most twelve rows of a table, spread evenly since files are often sorted, and its number of rows."""
    if not path.is_file():
        return [], 0
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(file))
    shown = min(_MOST_TRANSLATIONS, len(rows))
    return [rows[number * len(rows) // shown] for number in range(shown)], len(rows)


def split_scores(
    headline: Sequence[Headline], scores: Mapping[str, float]
) -> tuple[list[Headline], dict[str, str], dict[str, str]]:
    """Split the scores into three groups: tiles, further scores, and signatures of metrics.

    The scores of single classes are left out, since a table has them.

    Example:
        >>> headline = [Headline("val accuracy", "val/accuracy", "99.00 %")]
        >>> split_scores(headline, {"val/accuracy": 0.99, "val/loss": 0.25})[1]
        {'val/loss': '0.25'}
    """
    further = {}
    for row in headline[_TILES:]:
        further[row.title] = row._replace(signature="").text
    shown = {row.score for row in headline}
    for name, score in scores.items():
        if "_class_" not in name and name not in shown:
            further[name] = f"{score:.5g}"
    signatures = {row.title: row.signature for row in headline if row.signature}
    return list(headline[:_TILES]), further, signatures


def write_page(
    path: Path,
    results: Mapping[str, Any],
    headline: Sequence[Headline],
    rows: Mapping[str, str],
    pictures: Mapping[str, Picture],
) -> Path:
    """Write the page of a run, from its results, its pictures, and the tables in the folder of the page.

    Args:
        results: the entries of ``results.json``.
        headline: the main scores.
        rows: further rows for the environment: data, parameters, times and memory.
        pictures: pictures by name; those of "curve_" form a group, and so do those of "attention_".

    Raises:
        OSError: the page cannot be written; an earlier page is unchanged.
    """
    from jinja2 import Template

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    folder = path.parent
    best = results["best"]
    left_out = results["data"]["left_out"]
    environment = {
        **rows,
        "left out": ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()),
        "epochs": str(results["epochs"]),
        "hardware": results["hardware"],
        "nodes": str(results["num_nodes"]),
        "host": results["host"],
        "started": results["started_at"],
        "ended": results["ended_at"],
        **results["versions"],
    }
    settings = {}
    for name, value in results["config"].items():
        settings[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    tiles, scores, signatures = split_scores(headline, results["scores"])
    curves = [picture for name, picture in pictures.items() if name.startswith("curve_")]
    attention = [picture for name, picture in pictures.items() if name.startswith("attention")]
    other_pictures = [picture for name, picture in pictures.items() if not name.startswith(("curve_", "attention"))]
    translations, number_of_translations = _translations(folder / _TRANSLATIONS)
    page = Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True).render(
        colours=colour_style(),
        title=f"{results['recipe']}: {folder.resolve().name}",
        state=results["stopped_early"],
        command=results["command"],
        best=f"of {Path(best['checkpoint']).name}, saved after {best['step']:,} updates" if best else "",
        tiles=tiles,
        scores=scores,
        signatures=signatures,
        curves=curves,
        attention=attention,
        pictures=other_pictures,
        translations=translations,
        number_of_translations=number_of_translations,
        translations_file=_TRANSLATIONS,
        tables=_tables(folder),
        most_rows=_MOST_ROWS,
        settings=settings,
        environment={name: text for name, text in environment.items() if text},
    )
    write_text(path, page)
    return path
