"""Training a translator: the recipe against both forms of PyTorch's tutorial, on the tutorial's own pairs.

Speed is target tokens a second in training, the end mark of each sentence counted, padding not. Quality is the BLEU of
greedy translations of the same held-out tenth after equally many epochs. The rows on all pairs show what sorting by
length saves: the same batches filled at random are mostly padding.
"""

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
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
from callbacks.lib.memory import peak_memory
from callbacks.seed_control import SeedControl
from callbacks.warmup_lr import WarmupLR
from datamodules.loading.sampling import epoch_order
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.packed_sentences import TranslationBatch
from recipes.launch.precision import resolve_precision
from recipes.seq2seq.recipe import Seq2SeqTranslator
from recipes.seq2seq.recurrent import Seq2SeqNet
from recipes.text_scores import token_scores

__all__ = ["run"]

GOAL = 50
# The classic tutorial trains on 75,000 sentences, which are 7 epochs.
EPOCHS = 7
CLASSIC, PRESENT = "classic tutorial, token by token", "present tutorial, batches of 32"
SMALL, DEFAULT, FLOAT32 = "recipe, batch 32", "recipe, batch 64", "recipe, batch 256, float32"
SORTED, RANDOM = "recipe, all pairs, sorted", "recipe, all pairs, random"


def find_pairs(data_dir: str) -> str | None:
    """The tutorial's file, if it is there."""
    folder = Path(data_dir).expanduser()
    places = [place / name for place in (folder, folder / "eng-fra") for name in ("eng-fra.txt.zip", "eng-fra.txt")]
    return next((str(place) for place in places if place.is_file()), None)


def make_data(file: str | None, **options: Any) -> TranslationDataModule:
    """The tutorial's 11,445 pairs, French to English, a tenth held out; without the file the bundled sentences."""
    kept = {"reverse": True, "prefixes": "tutorial", "normalisation": "tutorial"} if file else {}
    data = TranslationDataModule(file, **{"max_length": 10, "val_fraction": 0, "subwords": "none", **kept, **options})
    data.setup("fit")
    return data


class _Clock(pl.Callback):
    """Seconds of the batches of a run, and the target tokens in them."""

    def __init__(self) -> None:
        self.seconds, self.tokens = 0.0, 0

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
    """Train as the command line does, and write no files."""
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
    """The recipe with the defaults of a run of so many epochs, but greedy."""
    settings = Seq2SeqTranslator.settings_from_data(data)
    lr = Seq2SeqTranslator.rate_of_run(len(data.rows["train"]), epochs, {})
    return Seq2SeqTranslator(**settings, hidden_size=hidden, beam=1, lr=lr)


def training_flops(recipe: Seq2SeqTranslator, data: TranslationDataModule) -> float:
    """Floating-point operations of the matrix products behind a target token, forward and backward: 6 for a weight."""
    network, pairs, rows = recipe.network, data.encoded_pairs, data.rows["train"]
    assert isinstance(network, Seq2SeqNet)
    sources = float(pairs.source.lengths[rows].sum()) / float((pairs.target.lengths[rows] - 1).sum())
    sides = {network.encoder: sources, network.decoder: 1.0, network.combine: 1.0, network.output: 1.0}
    return 6 * sum(times * p.numel() for part, times in sides.items() for p in part.parameters() if p.dim() > 1)


def matrix_product_rate(dtype: torch.dtype, tokens: int, hidden: int, vocabulary: int) -> float:
    """Operations a second of the largest matrix product, that of the output layer, in the best of 20 turns."""
    left, right = torch.randn(tokens, hidden).to(dtype), torch.randn(hidden, vocabulary).to(dtype)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - start)
    return 2 * tokens * hidden * vocabulary / best


def recipe_contender(
    data: TranslationDataModule, precision: str, hidden: int, batches: int, peaks: list[float]
) -> Callable[[], float]:
    """Seconds a target token of the first batches of an epoch, of all lengths; notes the memory after each."""
    recipe = make_recipe(data, hidden)

    def measure() -> float:
        clock = _Clock()
        fit(recipe, data, precision, 1, batches, clock)
        peaks.append(peak_memory(torch.device("cpu")) / 1e9)
        return clock.seconds / clock.tokens

    return measure


def tutorial_contender(
    translator: Translator, data: TranslationDataModule, sentences: int, parts: int = 100
) -> Callable[[], float]:
    """Seconds a target token of some sentences, others in each round."""
    pairs, rows = data.encoded_pairs, data.rows["train"]
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
    """BLEU on the held-out part after training for some epochs."""
    pairs, rows, held_out = data.encoded_pairs, data.rows["train"], data.rows["test"]
    for epoch in range(epochs):
        translator.train_on(pairs, rows[epoch_order(len(rows), 1, epoch)][:limit])
    predicted = [data.target_vocabulary.decode(tokens) for tokens in translator.translate(pairs, held_out)]
    return token_scores(predicted, data.target_sentences(held_out))["bleu"]


def recipe_bleu(data: TranslationDataModule, precision: str, hidden: int, epochs: int, batches: int | None) -> float:
    """The same of the recipe, as it is."""
    recipe = make_recipe(data, hidden, epochs)
    trainer = fit(recipe, data, precision, epochs, batches)
    return float(trainer.test(recipe, data, verbose=False)[0]["test/bleu"])


def _megabytes(*tensors: Tensor) -> float:
    return sum(tensor.nbytes for tensor in tensors) / 1e6


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measures speed in turn, then trains each to compare quality."""
    threads = pin_threads(options.threads or 1)
    quick = options.quick
    repeats, hidden, epochs = options.repeats or (1 if quick else 3), 32 if quick else 256, 1 if quick else EPOCHS
    sentences, batches = (8, 2) if quick else (200, 30)
    file, precision = find_pairs(options.data_dir), resolve_precision("auto", "cpu")[0]
    mixed = f"recipe, batch 256, {precision}"
    with suppress_output():
        data, small, large = make_data(file), make_data(file, batch_size=32), make_data(file, batch_size=256)
        everything = {
            name: make_data(file, batch_size=256, bucket=bucket, max_length=20, prefixes=None, normalisation="unicode")
            for name, bucket in ((SORTED, True), (RANDOM, False))
        }
        sizes = len(data.source_vocabulary), len(data.target_vocabulary)
        torch.manual_seed(1)
        tutorials: dict[str, Callable[[], Translator]] = {
            CLASSIC: lambda: ClassicTranslator(*sizes, hidden),
            PRESENT: lambda: PresentTranslator(*sizes, hidden),
        }
        peaks: dict[str, list[float]] = defaultdict(list)
        recipes = {
            SMALL: (small, precision, batches * 4),
            DEFAULT: (data, precision, batches * 2),
            FLOAT32: (large, "32-true", batches),
            mixed: (large, precision, batches),
            **{name: (pairs, precision, batches) for name, pairs in everything.items()},
        }
        contenders = {
            CLASSIC: tutorial_contender(tutorials[CLASSIC](), data, sentences),
            PRESENT: tutorial_contender(tutorials[PRESENT](), data, sentences * 4),
            **{name: recipe_contender(d, p, hidden, n, peaks[name]) for name, (d, p, n) in recipes.items()},
        }
        timings = alternate(contenders, repeats, progress=progress)
        scores: dict[str, float] = {}
        jobs: dict[str, Callable[[], float]] = {
            SMALL: lambda: recipe_bleu(small, precision, hidden, epochs, 2 if quick else None),
            DEFAULT: lambda: recipe_bleu(data, precision, hidden, epochs, 2 if quick else None),
            PRESENT: lambda: tutorial_bleu(tutorials[PRESENT](), data, epochs, 64 if quick else None),
            CLASSIC: lambda: tutorial_bleu(tutorials[CLASSIC](), data, epochs, 8 if quick else None),
        }
        for name, job in jobs.items():
            torch.manual_seed(1)
            gc.collect()
            scores[name] = job()
            if progress is not None:
                progress(f"BLEU of {name}", len(scores), len(jobs))
    flops = training_flops(make_recipe(data, hidden), data)
    padding = {name: pairs.train_dataloader().padding_share for name, pairs in everything.items()}
    rows: dict[str, list[Spread | None]] = {}
    for name in contenders:
        rows[name] = [
            Spread(tuple(1 / seconds for seconds in timings.seconds[name])),
            None if name in (CLASSIC, *everything) else timings.ratio(CLASSIC, name),
            Spread((scores[name],)) if name in scores else None,
            Spread((100 * padding[name],)) if name in padding else None,
        ]
    return Section(
        title="seq2seq: training a translator",
        header=_header(data, everything[SORTED], file, threads, timings, hidden),
        columns=[
            Column("target tokens a second", ",.0f"),
            Column("times faster than the classic", ".1f"),
            Column(f"BLEU after {epochs} epoch{'s' * (epochs > 1)}", ".1f"),
            Column("padding, %", ".1f"),
        ],
        rows=rows,
        goals=_goals(timings, mixed, scores),
        ours=[name for name in rows if name.startswith("recipe")],
        notes=[
            _limit(timings, flops, hidden, len(data.target_vocabulary)),
            *_notes(everything[SORTED], timings, peaks, quick),
        ],
        interrupted=timings.interrupted,
    )


def _header(
    data: TranslationDataModule,
    everything: TranslationDataModule,
    file: str | None,
    threads: str,
    timings: Timings,
    hidden: int,
) -> dict[str, str]:
    missing = "" if file else ", since there is no eng-fra.txt.zip; pass --data-dir FOLDER"
    return {
        "data": f"{data.info.title}{missing}: {data.info.kept:,} pairs, {data.sizes['train']:,} to train on and "
        f"{data.sizes['test']:,} held out; all pairs: {everything.info.kept:,} of up to 19 tokens",
        "threads": threads,
        "precision": "as the command line chooses it, or as the row is named; the tutorials in float32",
        "networks": f"hidden {hidden}",
        "repeats": f"{timings.rounds} rounds in turn after 1 that does not count; BLEU of one run each, greedy",
    }


def _goals(timings: Timings, ours: str, scores: dict[str, float]) -> list[Goal]:
    faster = timings.ratio(CLASSIC, ours)
    found = f"{faster.median:.1f} times ({faster.low:.1f} to {faster.high:.1f})"
    better = scores[SMALL] > scores[CLASSIC]
    return [
        Goal(f"{ours}: at least {GOAL} times faster than the {CLASSIC}", found, faster.median >= GOAL),
        Goal(
            "a better held-out BLEU than the classic tutorial after equally many epochs",
            f"{scores[SMALL]:.1f} in batches of 32, {scores[DEFAULT]:.1f} of 64, against {scores[CLASSIC]:.1f}",
            better,
        ),
    ]


def _limit(timings: Timings, flops: float, hidden: int, vocabulary: int) -> str:
    """What the goal asks of the arithmetic, and what a matrix product reaches."""
    wanted = GOAL * flops / timings.spread(CLASSIC).median / 1e9
    reached = [
        f"{matrix_product_rate(dtype, 2048, hidden, vocabulary) / 1e9:,.0f} in {name}"
        for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bf16"))
    ]
    return (
        f"a target token takes {flops / 1e6:.1f} million operations of matrix products, so {GOAL} times the classic's "
        f"speed are {wanted:,.0f} GFLOP/s; the output layer's product alone reaches {' and '.join(reached)}"
    )


def _notes(
    everything: TranslationDataModule, timings: Timings, peaks: dict[str, list[float]], quick: bool
) -> list[str]:
    pairs, rows = everything.encoded_pairs, everything.rows["train"]
    packed = _megabytes(*(tensor for side in (pairs.source, pairs.target) for tensor in (side.tokens, side.offsets)))
    tokens = int(pairs.target.lengths[rows].sum()) - len(rows)
    minutes = {name: tokens * timings.spread(name).median / 60 for name in (SORTED, RANDOM)}
    notes = [
        f"all pairs: an epoch of {len(rows):,} pairs and {tokens:,} target tokens takes {minutes[SORTED]:.1f} minutes "
        f"sorted, {minutes[RANDOM]:.1f} at random; both sides take {packed:.0f} MB in memory, and the process had "
        # In the first round, which does not count, the sorted batches came first.
        f"{peaks[SORTED][0]:.1f} GB at most with sorted batches, {peaks[RANDOM][0]:.1f} GB with random ones",
        "the classic tutorial decodes fewer tokens than are counted: without teacher forcing it stops at its end mark",
    ]
    return [*notes, "smaller networks and few sentences: of no meaning"] if quick else notes
