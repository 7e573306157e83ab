"""Measures the training of a translator: the recipe, and both forms of PyTorch's tutorial, on the tutorial's pairs.

Speed is the number of target tokens per second in training, with EOS and without padding. Quality is the BLEU of greedy
translations of the same held-out tenth after the same number of epochs.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from benchmarks.contenders.classic_seq2seq import ClassicTranslator, PresentTranslator, Translator
from benchmarks.harness.bare_trainer import bare_trainer, suppress_output
from benchmarks.harness.measurements import (
    Column,
    Goal,
    Options,
    Progress,
    Section,
    Spread,
    Timings,
    alternate,
    pin_threads,
)
from benchmarks.harness.terminal import interruptible
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl
from callbacks.warmup_lr import WarmupLR
from datamodules.loading.sampling import epoch_order
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.loaders import TranslationBatch
from recipes.runner.machine import resolve_precision
from recipes.seq2seq.recipe import Seq2SeqTranslator, rate_of_run
from recipes.seq2seq.scores import token_scores

__all__ = ["run"]

GOAL = 50
# The classic tutorial trains on 75,000 sentences, which are 7 epochs.
EPOCHS = 7
CLASSIC = "classic tutorial, token by token"
PRESENT = "present tutorial, batches of 32"
SMALL = "recipe, batch 32"
DEFAULT = "recipe, batch 64"
FLOAT32 = "recipe, batch 256, float32"


def find_pairs(data_dir: str) -> str | None:
    """Return the path of the tutorial's file, or None."""
    folder = Path(data_dir).expanduser()
    paths = [place / name for place in (folder, folder / "eng-fra") for name in ("eng-fra.txt.zip", "eng-fra.txt")]
    return next((str(place) for place in paths if place.is_file()), None)


def make_data(file: str | None, **options: Any) -> TranslationDataModule:
    """Return the data of the tutorial's 11,445 French-English pairs, a tenth held out, or of the bundled sentences."""
    kept = {"reverse": True, "prefixes": "tutorial", "normalization": "tutorial"} if file else {}
    data = TranslationDataModule(file, **{"max_length": 10, "val_fraction": 0, "subwords": "none", **kept, **options})
    data.setup("fit")
    return data


class _Clock(pl.Callback):
    """Callback that adds up the seconds of the epochs and the target tokens of the batches."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds -= time.perf_counter()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: TranslationBatch, batch_idx: int
    ) -> None:
        self.tokens += int(batch.target_lengths.sum()) - len(batch.target)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds += time.perf_counter()


def fit(
    recipe: Seq2SeqTranslator,
    data: TranslationDataModule,
    precision: str,
    epochs: int,
    batches: int | None,
    *callbacks: pl.Callback,
) -> pl.Trainer:
    """Train as the command line does, without writing files."""
    trainer = bare_trainer(
        [GradientAccumulation(), SeedControl(1), WarmupLR(0, scale="sqrt", base_batch_size=64), *callbacks],
        precision=precision,
        max_epochs=epochs,
        limit_train_batches=batches,
    )
    with interruptible():
        trainer.fit(recipe, data)
    return trainer


def make_recipe(data: TranslationDataModule, hidden: int, epochs: int = EPOCHS) -> Seq2SeqTranslator:
    """Return the recipe with the defaults of a run of `epochs` epochs, but with greedy decoding."""
    settings = Seq2SeqTranslator.settings_from_data(data)
    lr = rate_of_run("rnn", len(data.rows["train"]), epochs)
    return Seq2SeqTranslator(**settings, hidden_size=hidden, beam=1, lr=lr)


def recipe_contender(data: TranslationDataModule, precision: str, hidden: int, batches: int) -> Callable[[], float]:
    """Return a contender for the seconds per target token of the first batches of an epoch, of all lengths."""
    recipe = make_recipe(data, hidden)

    def measure() -> float:
        clock = _Clock()
        fit(recipe, data, precision, 1, batches, clock)
        return clock.seconds / clock.tokens

    return measure


def tutorial_contender(
    translator: Translator, data: TranslationDataModule, sentences: int, parts: int = 100
) -> Callable[[], float]:
    """Return a contender for the seconds per target token, on other sentences in each round."""
    pairs = data.encoded_pairs
    rows = data.rows["train"]
    order = rows[epoch_order(len(rows), 1, 0)]
    turns = iter(range(parts))

    def measure() -> float:
        chosen = order.roll(-next(turns) * sentences)[:sentences]
        tokens = int(pairs.target.lengths[chosen].sum()) - sentences
        start = time.perf_counter()
        translator.train_on(pairs, chosen)
        return (time.perf_counter() - start) / tokens

    return measure


def tutorial_bleu(translator: Translator, data: TranslationDataModule, epochs: int, limit: int | None) -> float:
    """Train for some epochs, and return the BLEU on the held-out part."""
    pairs = data.encoded_pairs
    rows = data.rows["train"]
    held_out = data.rows["test"]
    for epoch in range(epochs):
        translator.train_on(pairs, rows[epoch_order(len(rows), 1, epoch)][:limit])
    predicted = [data.target_vocabulary.decode(tokens) for tokens in translator.translate(pairs, held_out)]
    return token_scores(predicted, data.target_sentences(held_out))["bleu"]


def recipe_bleu(data: TranslationDataModule, precision: str, hidden: int, epochs: int, batches: int | None) -> float:
    """Train the recipe, and return the BLEU on the held-out part."""
    recipe = make_recipe(data, hidden, epochs)
    trainer = fit(recipe, data, precision, epochs, batches)
    return float(trainer.test(recipe, data, verbose=False)[0]["test/bleu"])


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure the speed in turn, and then train each contender to compare the quality."""
    threads = pin_threads(options.threads or 1)
    quick = options.quick
    repeats = options.rounds(3)
    hidden = 32 if quick else 256
    epochs = 1 if quick else EPOCHS
    sentences, batches = (8, 2) if quick else (200, 30)
    file = find_pairs(options.data_dir)
    precision = resolve_precision("auto", "cpu")[0]
    mixed = f"recipe, batch 256, {precision}"
    with suppress_output():
        data = make_data(file)
        small = make_data(file, batch_size=32)
        large = make_data(file, batch_size=256)
        sizes = len(data.source_vocabulary), len(data.target_vocabulary)
        torch.manual_seed(1)
        tutorials: dict[str, Callable[[], Translator]] = {
            CLASSIC: lambda: ClassicTranslator(*sizes, hidden),
            PRESENT: lambda: PresentTranslator(*sizes, hidden),
        }
        contenders = {
            CLASSIC: tutorial_contender(tutorials[CLASSIC](), data, sentences),
            PRESENT: tutorial_contender(tutorials[PRESENT](), data, sentences * 4),
            SMALL: recipe_contender(small, precision, hidden, batches * 4),
            DEFAULT: recipe_contender(data, precision, hidden, batches * 2),
            FLOAT32: recipe_contender(large, "32-true", hidden, batches),
            mixed: recipe_contender(large, precision, hidden, batches),
        }
        timings = alternate(contenders, repeats, progress=progress)
        jobs: dict[str, Callable[[], float]] = {
            SMALL: lambda: recipe_bleu(small, precision, hidden, epochs, 2 if quick else None),
            DEFAULT: lambda: recipe_bleu(data, precision, hidden, epochs, 2 if quick else None),
            PRESENT: lambda: tutorial_bleu(tutorials[PRESENT](), data, epochs, 64 if quick else None),
            CLASSIC: lambda: tutorial_bleu(tutorials[CLASSIC](), data, epochs, 8 if quick else None),
        }
        scores: dict[str, float] = {}
        for name, job in jobs.items():
            torch.manual_seed(1)
            scores[name] = job()
            if progress is not None:
                progress(f"BLEU of {name}", len(scores), len(jobs))
    rows: dict[str, list[Spread | None]] = {
        name: [
            Spread(tuple(1 / seconds for seconds in timings.seconds[name])),
            None if name == CLASSIC else timings.ratio(CLASSIC, name),
            Spread((scores[name],)) if name in scores else None,
        ]
        for name in contenders
    }
    missing = "" if file else ", since there is no eng-fra.txt.zip; pass --data-dir FOLDER"
    train = data.sizes["train"]
    test = data.sizes["test"]
    return Section(
        title="seq2seq: training a translator",
        header={
            "data": f"{data.info.title}{missing}: {train:,} pairs to train on and {test:,} held out",
            "threads": threads,
            "precision": "as the command line chooses it, or as the row is named; the tutorials in float32",
            "networks": f"hidden {hidden}",
            "repeats": f"{timings.rounds} rounds in turn after 1 that does not count; BLEU of one run each, greedy",
        },
        columns=[
            Column("target tokens a second", ",.0f"),
            Column("times faster than the classic", ".1f"),
            Column(f"BLEU after {epochs} epoch{'s' * (epochs > 1)}", ".1f"),
        ],
        rows=rows,
        goals=_goals(timings, mixed, scores),
        notes=["the classic tutorial decodes fewer tokens than are counted: it stops at its own end mark"],
        interrupted=timings.interrupted,
    )


def _goals(timings: Timings, ours: str, scores: dict[str, float]) -> list[Goal]:
    faster = timings.ratio(CLASSIC, ours)
    result = f"{faster.median:.1f} times ({faster.low:.1f} to {faster.high:.1f})"
    return [
        Goal(f"{ours}: at least {GOAL} times faster than the {CLASSIC}", result, faster.median >= GOAL),
        Goal(
            "a better held-out BLEU than the classic tutorial after equally many epochs",
            f"{scores[SMALL]:.1f} in batches of 32, {scores[DEFAULT]:.1f} of 64, against {scores[CLASSIC]:.1f}",
            scores[SMALL] > scores[CLASSIC],
        ),
    ]
