"""``report.html``: all that a run has reached on one page, which refers to no other file."""

import csv
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.figures.drawing import colour_style
from recipes.figures.images import Picture
from recipes.runner.loggers import METRICS
from recipes.runner.results import write_text

_MOST_ROWS = 25
_MOST_TRANSLATIONS = 12
_TILES = 3
_TRANSLATIONS = "test_translations.csv"
_PARTS = ("train", "val", "test")


def _tables(folder: Path) -> dict[str, list[list[str]]]:
    """The first rows of the tables in a folder, such as those of classes and mistakes."""
    tables = {}
    for path in sorted(folder.glob("*.csv")):
        if path.name not in (METRICS, _TRANSLATIONS):
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                tables[path.name] = list(itertools.islice(csv.reader(file), _MOST_ROWS + 1))
    return tables


def _translations(path: Path) -> tuple[list[dict[str, str]], int]:
    """Twelve rows of a table, spread evenly over it since files are often sorted, and how many it has."""
    if not path.is_file():
        return [], 0
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(file))
    shown = min(_MOST_TRANSLATIONS, len(rows))
    return [rows[number * len(rows) // shown] for number in range(shown)], len(rows)


def _words(name: str) -> set[str]:
    return set(name.lower().replace("/", " ").replace("_", " ").replace("-", " ").replace(",", " ").split())


def _is_shown(name: str, value: float, headline: Mapping[str, str]) -> bool:
    """Whether the headline has a score: by its name, or by its value under a name with a word of it."""
    words = _words(name)
    for title, text in headline.items():
        others = _words(title)
        if words == others:
            return True
        parts = {part for part in _PARTS if part in others} - words
        number = text.partition(" (")[0]
        if not parts and (words & others) - {*_PARTS} and number in (f"{value:.2f}", f"{value:.4f}"):
            return True
    return False


def split_scores(
    headline: Mapping[str, str], scores: Mapping[str, float]
) -> tuple[dict[str, tuple[str, str]], dict[str, str], dict[str, str]]:
    """The scores in three groups, each once: tiles with a remark, the rest, and signatures that define scores.

    Those of single classes are left out: they are in a table.

    Example:
        >>> headline = {"val accuracy": "99.00 %", "BLEU": "63.00 (nrefs:1|case:mixed)"}
        >>> split_scores(headline, {"val/accuracy": 0.99, "val/loss": 0.25})
        ({'val accuracy': ('99.00 %', ''), 'BLEU': ('63.00', '')}, {'val/loss': '0.25'}, {'BLEU': 'nrefs:1|case:mixed'})
    """
    tiles: dict[str, tuple[str, str]] = {}
    rest: dict[str, str] = {}
    signatures: dict[str, str] = {}
    for name, text in headline.items():
        value, _, remark = text.partition(" (")
        remark = remark.removesuffix(")")
        if "|" in remark:
            signatures[name] = remark
            remark = ""
        if len(tiles) < _TILES:
            tiles[name] = value, remark
        else:
            rest[name] = f"{value} ({remark})" if remark else value
    for name, score in scores.items():
        if "_class_" not in name and not _is_shown(name, score, headline):
            rest[name] = f"{score:.5g}"
    return tiles, rest, signatures


def write_page(
    path: Path, results: Mapping[str, Any], rows: Mapping[str, str], pictures: Mapping[str, Picture]
) -> Path:
    """Write the page of a run, from its results, its pictures, and the tables in the folder of the page.

    Args:
        results: the entries of ``results.json``.
        rows: further rows for the environment: data, parameters, times and memory.
        pictures: by name; those that begin with "curve_" stand together, as do those that begin with "attention_".

    Raises:
        OSError: the page cannot be written; an earlier one is as it was.
    """
    from jinja2 import Template

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    folder, best, config = path.parent, results["best"], results["config"]
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
    texts = {name: json.dumps(value, ensure_ascii=False, default=str) for name, value in config.items()}
    settings = {name: value if isinstance(value := config[name], str) else text for name, text in texts.items()}
    tiles, scores, signatures = split_scores(results["headline"], results["scores"])
    groups = {group: [p for name, p in pictures.items() if name.startswith(group)] for group in ("curve_", "attention")}
    others = [p for name, p in pictures.items() if not name.startswith(tuple(groups))]
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
        curves=groups["curve_"],
        attention=groups["attention"],
        pictures=others,
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
