"""BLEU on Multi30k, German to English, after equally long training: the recipe and both forms of PyTorch's tutorial.

The recipe runs as a user starts it, in processes of its own: an epoch to see how long one takes, then as many as fit
into the time. The tutorial's networks train on words until the time is up. All translate test_2016_flickr, and
sacrebleu compares the texts, lower-cased, with its standard tokenisation (13a).
"""

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders.classic_seq2seq import ClassicTranslator, PresentTranslator, Translator
from benchmarks.harness.bare_trainer import suppress_output
from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, available_cores
from benchmarks.harness.processes import run_module
from datamodules.loading.sampling import epoch_order
from datamodules.translation.bundled_corpus import bundled_pairs
from datamodules.translation.data_module import TranslationDataModule

__all__ = ["find_multi30k", "multi30k_texts", "run"]

MINUTES = 40.0
RECURRENT, TRANSFORMER = "recipe, recurrent", "recipe, Transformer"
CLASSIC, PRESENT = "classic tutorial, token by token", "present tutorial, batches of 32"
FLAGS = {RECURRENT: (), TRANSFORMER: ("--network", "transformer")}
"""The flags of each row of the recipe: what differs from the defaults."""
GOALS = {RECURRENT: 36, TRANSFORMER: 38}
_TINY = ("--hidden-size", "32", "--vocab-size", "400")
_BUNDLED = "the bundled sentences; pass --data-dir FOLDER with multi30k in it"
_PARTS = ("train", "val", "test_2016_flickr")
# The tutorials fill each sentence up to a length.
_LONGEST = 50


def find_multi30k(data_dir: str) -> Path | None:
    """The folder of Multi30k's files, train.de.gz to test_2016_flickr.en.gz, if it is there."""
    for folder in (Path(data_dir).expanduser(), Path(data_dir).expanduser() / "multi30k"):
        if all((folder / f"{part}.{side}.gz").is_file() for part in _PARTS for side in ("de", "en")):
            return folder
    return None


def _texts(source: Path | None, part: str) -> tuple[str, str]:
    """Both sides of a part; without Multi30k some of the bundled sentences."""
    if source is not None:
        de, en = (gzip.decompress((source / f"{part}.{side}.gz").read_bytes()).decode() for side in ("de", "en"))
        return de, en
    pairs, start = bundled_pairs(), {"train": 0, "val": 2000, "test_2016_flickr": 2100}[part]
    chosen = pairs[start : start + (2000 if part == "train" else 100)]
    return "".join(f"{pair[0]}\n" for pair in chosen), "".join(f"{pair[1]}\n" for pair in chosen)


def multi30k_texts(data_dir: str, part: str, count: int) -> tuple[str, tuple[list[str], list[str]]]:
    """What the sentences are, and the first ones of a part: sources and targets."""
    source = find_multi30k(data_dir)
    sides = tuple(text.splitlines()[:count] for text in _texts(source, part))
    return "Multi30k" if source else _BUNDLED, (sides[0], sides[1])


def _write_texts(source: Path | None, folder: Path) -> None:
    """The six files as plain text."""
    for part in _PARTS:
        for side, text in zip(("de", "en"), _texts(source, part), strict=True):
            (folder / f"{part}.{side}").write_text(text, encoding="utf-8")


def lower_cased_bleu(translations: Sequence[str], files: Path) -> float:
    """sacrebleu's BLEU of the test set's translations, lower-cased, in its standard tokenisation."""
    from sacrebleu.metrics.bleu import BLEU

    references = (files / "test_2016_flickr.en").read_text(encoding="utf-8").splitlines()
    return float(BLEU(lowercase=True).corpus_score(list(translations), [references]).score)


def recipe_commands(flags: Sequence[str], files: Path, runs: Path, epochs: int) -> tuple[list[str], list[str]]:
    """The commands that train, and that translate the test set into translations.json."""
    sides = [f"--{part}-file" for part in ("source", "target", "val-source", "val-target")]
    names = ("train.de", "train.en", "val.de", "val.en")
    given = [text for side, name in zip(sides, names) for text in (side, str(files / name))]
    fit = [*given, "--test-fraction", "0", "--max-epochs", str(epochs), *flags]
    fit += ["--run-dir", str(runs), "--name", f"{epochs}-epochs", "--logger", "none"]
    checkpoint = runs / "seq2seq" / f"{epochs}-epochs" / "checkpoints" / "best.ckpt"
    output = ["--output", str(runs / "translations.json")]
    return fit, ["predict", "--ckpt", str(checkpoint), f"@{files / 'test_2016_flickr.de'}", *output]


def _recipe_bleu(flags: Sequence[str], files: Path, runs: Path, minutes: float, quick: bool) -> list[float]:
    """Minutes of training, epochs and BLEU of a run that takes the given time at most."""

    def seconds(epochs: int) -> float:
        run_module("recipes.seq2seq", *recipe_commands(flags, files, runs, epochs)[0])
        results = json.loads((runs / "seq2seq" / f"{epochs}-epochs" / "results.json").read_text(encoding="utf-8"))
        return float(results["seconds"]["train"])

    epochs, trained = 1, seconds(1)
    if not quick:
        # The first epoch includes what happens once.
        epochs = max(2, int(60 * minutes / trained))
        trained = seconds(epochs)
    run_module("recipes.seq2seq", *recipe_commands(flags, files, runs, epochs)[1])
    rows: list[dict[str, Any]] = json.loads((runs / "translations.json").read_text(encoding="utf-8"))
    return [trained / 60, epochs, lower_cased_bleu([row["translation"] or "" for row in rows], files)]


def _parts_of(rows: Tensor) -> Iterator[Tensor]:
    """Endless parts of 1,024 sentences, in a new order in each epoch."""
    epoch = 0
    while True:
        yield from rows[epoch_order(len(rows), 1, epoch)].split(1024)
        epoch += 1


def _tutorial_bleu(kind: Callable[..., Translator], files: Path, hidden: int, minutes: float) -> list[float]:
    """The same of a tutorial's network, on words."""
    with suppress_output():
        data = TranslationDataModule(
            source_file=str(files / "train.de"),
            target_file=str(files / "train.en"),
            test_source_file=str(files / "test_2016_flickr.de"),
            test_target_file=str(files / "test_2016_flickr.en"),
            max_length=_LONGEST,
            subwords="none",
            val_fraction=0,
        )
        data.setup("fit")
    torch.manual_seed(1)
    translator = kind(len(data.source_vocabulary), len(data.target_vocabulary), hidden, max_length=_LONGEST)
    rows, held_out = data.rows["train"], data.rows["test"]
    start, seen = time.perf_counter(), 0
    for part in _parts_of(rows):
        translator.train_on(data.encoded_pairs, part)
        seen += len(part)
        if (elapsed := (time.perf_counter() - start) / 60) >= minutes:
            break
    texts = [data.target_vocabulary.decode(tokens) for tokens in translator.translate(data.encoded_pairs, held_out)]
    return [elapsed, seen / len(rows), lower_cased_bleu(texts, files)]


def run(options: Options, progress: Progress | None = None) -> Section:
    """Trains each for the given minutes."""
    quick = options.quick
    minutes = 0.02 if quick else options.minutes or MINUTES
    cores = options.threads or available_cores()
    torch.set_num_threads(cores)
    source = find_multi30k(options.data_dir)
    rows: dict[str, list[Spread | None]] = {}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as name:
        files = Path(name)
        _write_texts(source, files)
        jobs: dict[str, Callable[[], list[float]]] = {}
        for row, flags in list(FLAGS.items())[: 1 if quick else None]:
            flags = (*flags, *(_TINY if quick else ()))
            jobs[row] = partial(_recipe_bleu, flags, files, files / row, minutes, quick)
        for row, kind in ((PRESENT, PresentTranslator), (CLASSIC, ClassicTranslator)):
            jobs[row] = partial(_tutorial_bleu, kind, files, 16 if quick else 256, minutes)
        for row, job in jobs.items():
            rows[row] = [Spread((value,)) for value in job()]
            if progress is not None:
                progress(row, len(rows), len(jobs))
    bleu = {row: spreads[2].median for row, spreads in rows.items() if spreads[2] is not None}
    best = max(bleu[CLASSIC], bleu[PRESENT])
    return Section(
        title="multi30k: German to English, test_2016_flickr",
        header={
            "data": "Multi30k" if source else _BUNDLED,
            "threads": f"{cores} of torch",
            "precision": "as the command line chooses it for the recipe, float32 for the tutorials",
            "time": f"{minutes:g} minutes of training each, validation apart",
            "flags": "; ".join(f"{row}: {' '.join(flags) or 'none'}" for row, flags in FLAGS.items()),
        },
        columns=[
            Column("minutes of training", ".1f"),
            Column("epochs", ".1f"),
            Column("BLEU, 13a, lower-cased", ".2f"),
        ],
        rows=rows,
        goals=[
            Goal(f"{row}: at least {least}, and above the tutorials", f"{bleu[row]:.2f}", bleu[row] >= max(least, best))
            for row, least in GOALS.items()
            if row in bleu
        ],
        ours=[row for row in FLAGS if row in rows],
        notes=["smaller networks and few sentences: of no meaning"] if quick else [],
    )
