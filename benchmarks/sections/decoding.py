"""Measures beam search: that of the recipe, over whole batches, and a plain loop, sentence by sentence.

Both run the same network, encode each sentence once and keep the state of the decoder. The plain loop has the
hypotheses of a sentence in Python lists, and runs the decoder on all of them at once. The networks have random weights,
so the length of each translation is limited to that of the reference (`limits`).
"""

import gzip
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, alternate, pin_threads
from datamodules.translation.parallel_corpus import bundled_pairs
from datamodules.translation.text import EOS, PAD, SOS, Vocabulary
from recipes.runner.machine import resolve_precision
from recipes.seq2seq.decoding import beam_search, length_penalty
from recipes.seq2seq.network import Seq2SeqNet, TranslationNetwork
from recipes.seq2seq.transformer import TransformerNet

__all__ = ["run"]

BEAM = 5
ALPHA = 0.6
AT_ONCE = 64
GOAL = 5
NETWORKS: dict[str, Callable[..., TranslationNetwork]] = {"recurrent": Seq2SeqNet, "Transformer": TransformerNet}


def multi30k_texts(data_dir: str, part: str, count: int) -> tuple[str, list[list[str]]]:
    """Return a title and the first German and English sentences of a part of Multi30k, or bundled ones."""
    for folder in (Path(data_dir).expanduser(), Path(data_dir).expanduser() / "multi30k"):
        files = [folder / f"{part}.{side}.gz" for side in ("de", "en")]
        if all(file.is_file() for file in files):
            return "Multi30k", [gzip.decompress(file.read_bytes()).decode().splitlines()[:count] for file in files]
    pairs = bundled_pairs()[2100 : 2100 + min(count, 100)]
    title = "the bundled sentences; pass --data-dir FOLDER with multi30k in it"
    return title, [[pair[side] for pair in pairs] for side in (0, 1)]


@torch.no_grad()
def plain_search(network: TranslationNetwork, source: Tensor, limit: int) -> list[int]:
    """Return the best translation of a sentence, of shape (source,), by beam search with Python lists."""
    encoded, state = network.encode(source.unsqueeze(0), torch.tensor([len(source)]))
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    places = BEAM
    for length in range(1, limit + 1):
        last = torch.tensor([tokens[-1] if tokens else SOS for _, tokens in running])
        readouts, state = network.step(last, state, encoded.select(torch.zeros_like(last)))
        scores = network.logits(readouts).float().index_fill(1, torch.tensor([PAD, SOS]), -torch.inf).log_softmax(1)
        if length == limit:
            scores = scores.index_fill(1, torch.tensor([*range(EOS), *range(EOS + 1, scores.shape[1])]), -torch.inf)
        candidates = []
        for row, (total, tokens) in enumerate(running):
            values, numbers = scores[row].topk(min(places, scores.shape[1]))
            for value, number in zip(values.tolist(), numbers.tolist(), strict=True):
                candidates.append((total + value, row, [*tokens, number]))
        candidates.sort(key=lambda candidate: -candidate[0])
        rows = []
        running = []
        for total, row, tokens in candidates[:places]:
            if total == -torch.inf:
                continue
            if tokens[-1] == EOS:
                finished.append((total / float(length_penalty(torch.tensor(length), ALPHA)), tokens))
                places -= 1
            else:
                running.append((total, tokens))
                rows.append(row)
        if not running:
            break
        state = network.select(state, torch.tensor(rows))
    return max(finished, key=lambda pair: pair[0])[1]


def _plainly(network: TranslationNetwork, sources: list[Tensor], limits: list[int]) -> list[list[int]]:
    return [plain_search(network, source, limit) for source, limit in zip(sources, limits, strict=True)]


def _in_batches(network: TranslationNetwork, sources: list[Tensor], limits: list[int]) -> list[list[int]]:
    """Translate as the recipe does, in batches of sentences of similar length."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    translations: list[list[int]] = [[] for _ in sources]
    for start in range(0, len(order), AT_ONCE):
        chosen = order[start : start + AT_ONCE]
        source = nn.utils.rnn.pad_sequence([sources[i] for i in chosen], batch_first=True, padding_value=PAD)
        lengths = torch.tensor([len(sources[i]) for i in chosen])
        tokens = beam_search(
            network, source, lengths, BEAM, alpha=ALPHA, limits=torch.tensor([limits[i] for i in chosen])
        ).tokens
        for i, row in zip(chosen, tokens[:, 0].tolist(), strict=True):
            translations[i] = [token for token in row if token != PAD]
    return translations


def _seconds(
    search: Callable[..., Any],
    network: TranslationNetwork,
    sources: list[Tensor],
    limits: list[int],
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """Return the seconds per sentence."""
    start = time.perf_counter()
    with precision():
        search(network, sources, limits)
    return (time.perf_counter() - start) / len(sources)


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure both searches in turn, and count the translations that differ."""
    threads = pin_threads(options.threads or 1)
    count, plain, hidden = (32, 8, 32) if options.quick else (1000, 100, 256)
    title, texts = multi30k_texts(options.data_dir, "test_2016_flickr", count)
    vocabularies = [Vocabulary.of(sorted({word for line in side for word in line.split()})) for side in texts]
    sources, targets = (
        [torch.tensor([*(vocabulary.spell(word)[0] for word in line.split()), EOS]) for line in side]
        for vocabulary, side in zip(vocabularies, texts, strict=True)
    )
    limits = [len(target) for target in targets]
    chosen = resolve_precision("auto", "cpu")[0]
    mixed = partial(torch.autocast, "cpu", torch.bfloat16) if chosen == "bf16-mixed" else nullcontext
    contenders: dict[str, Callable[[], float]] = {}
    differ: dict[str, float] = {}
    for name, kind in NETWORKS.items():
        torch.manual_seed(1)
        network = kind(8000, 8000, hidden_size=hidden).eval()
        both = [search(network, sources[:plain], limits[:plain]) for search in (_in_batches, _plainly)]
        differ[name] = 100 * sum(a != b for a, b in zip(*both, strict=True)) / plain
        contenders[f"{name}, plain loop"] = partial(_seconds, _plainly, network, sources[:plain], limits[:plain])
        contenders[f"{name}, recipe"] = partial(_seconds, _in_batches, network, sources, limits, mixed)
    timings = alternate(contenders, options.rounds(5), progress=progress)
    rows: dict[str, list[Spread | None]] = {}
    for name in NETWORKS:
        loop = f"{name}, plain loop"
        ours = f"{name}, recipe"
        for row in (loop, ours):
            speed = Spread(tuple(1 / seconds for seconds in timings.seconds[row]))
            faster = timings.ratio(loop, row) if row == ours else None
            rows[row] = [speed, faster, Spread((differ[name],)) if row == ours else None]
    ratios = {name: timings.ratio(f"{name}, plain loop", f"{name}, recipe").median for name in NETWORKS}
    ratio_text = ", ".join(f"{ratio:.1f} ({name})" for name, ratio in ratios.items())
    return Section(
        title=f"decoding: {count:,} sentences with a beam of {BEAM}",
        header={
            "data": f"{title}; the plain loop translates the first {plain}",
            "threads": threads,
            "precision": f"{chosen} for the recipe, as its command line chooses it; float32 for the plain loop",
            "networks": f"hidden {hidden}, 8,000 tokens on each side, batches of {AT_ONCE} sentences of like length",
            "repeats": f"{timings.rounds} rounds in turn after 1 that does not count",
        },
        columns=[
            Column("sentences a second", ",.0f"),
            Column("times faster", ".1f"),
            Column("other outputs in float32, %", ".0f"),
        ],
        rows=rows,
        goals=[Goal(f"at least {GOAL} times faster than the plain loop", ratio_text, min(ratios.values()) >= GOAL)],
        notes=["other outputs: rounding decides between hypotheses of nearly equal scores, as of random weights"],
        interrupted=timings.interrupted,
    )
