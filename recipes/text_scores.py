"""BLEU and chrF of translations from integer counts, with bootstrap intervals.

The numbers are sacrebleu's (tests compare them). Its tokenisers are used; its scores are not, since they keep all
resamples of a test set in memory at once. Nothing here needs torch.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from datamodules.errors import UserError

__all__ = [
    "CHARACTER_ORDER",
    "TRANSLATIONS",
    "WORD_ORDER",
    "BleuTokenizer",
    "Estimate",
    "Metric",
    "bleu",
    "character_counts",
    "check_tokenizer",
    "chrf",
    "standard_metrics",
    "tokenizer",
    "word_counts",
]

WORD_ORDER, CHARACTER_ORDER = 4, 6

TRANSLATIONS = "test_translations.csv"
"""The file in a run's folder with the columns source, translation and reference: the sentences of its test."""

BleuTokenizer = Literal["13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"]
"""sacrebleu's names. 13a is the standard one; zh, ja-mecab and ko-mecab are for Chinese, Japanese and Korean."""

_RESAMPLES, _SEED = 1000, 12345  # sacrebleu's.


def _overlaps(hypothesis: Sequence[str], reference: Sequence[str], order: int) -> list[int]:
    """For n-grams of 1 to `order` units: those in both, in the hypothesis, in the reference."""
    counts = []
    for n in range(1, order + 1):
        ours, theirs = (Counter(zip(*(units[i:] for i in range(n)), strict=False)) for units in (hypothesis, reference))
        counts += [(ours & theirs).total(), ours.total(), theirs.total()]
    return counts


def word_counts(hypothesis: str, reference: str) -> list[int]:
    """Counts of a sentence for `bleu`, whose words are separated by spaces.

    Example:
        >>> word_counts("a b", "a c")[:6]  # one word in both, of two and two; no pair
        [1, 2, 2, 0, 1, 1]
    """
    return _overlaps(hypothesis.split(), reference.split(), WORD_ORDER)


def character_counts(hypothesis: str, reference: str) -> list[int]:
    """Counts of a sentence for `chrf`: of its characters without spaces."""
    counts = _overlaps("".join(hypothesis.split()), "".join(reference.split()), CHARACTER_ORDER)
    # n-grams longer than the reference are not counted, as in sacrebleu.
    for n in range(0, len(counts), 3):
        if not counts[n + 2]:
            counts[n + 1] = 0
    return counts


def bleu(counts: Sequence[int], smooth: bool = False) -> float:
    """BLEU between 0 and 100 (Papineni et al., 2002).

    Args:
        counts: sums of `word_counts`.
        smooth: halve the precision again for each order without a match (exp, as sacrebleu does by default).
    """
    matches, ours, theirs = (counts[i::3] for i in range(3))
    if not any(matches) or not all(ours) or not (smooth or all(matches)):
        return 0.0
    factor, total = 1, 0.0
    for matched, count in zip(matches, ours, strict=True):
        factor *= 1 if matched else 2
        total += math.log(matched / count if matched else 1 / (factor * count))
    return 100 * math.exp(min(0.0, 1 - theirs[0] / ours[0]) + total / WORD_ORDER)


def chrf(counts: Sequence[int], beta: float = 2.0) -> float:
    """chrF between 0 and 100 (Popović, 2015): the F-score of the mean precision and recall over n-grams of 1 to 6.

    Args:
        counts: sums of `character_counts`.
    """
    # Corpora of sentences shorter than n characters have no n-grams.
    orders = [counts[i : i + 3] for i in range(0, len(counts), 3) if counts[i + 1] and counts[i + 2]]
    if not any(matches for matches, _, _ in orders):
        return 0.0
    precision = sum(matches / ours for matches, ours, _ in orders) / len(orders)
    recall = sum(matches / theirs for matches, _, theirs in orders) / len(orders)
    return 100 * (1 + beta**2) * precision * recall / (beta**2 * precision + recall)


def _sacrebleu(name: str, lowercase: bool = False) -> Any:
    if name not in get_args(BleuTokenizer):
        raise UserError(f"no tokeniser {name!r}; expected one of {', '.join(get_args(BleuTokenizer))}")
    from sacrebleu.metrics.bleu import BLEU

    try:
        return BLEU(tokenize=name, lowercase=lowercase)
    except RuntimeError as error:
        language = name.removesuffix("-mecab")
        raise UserError(
            f"bleu_tokenize={name} needs MeCab; install it with: pip install 'sacrebleu[{language}]'"
        ) from error


def check_tokenizer(name: str) -> None:
    """Refuse a name that there is not, or a tokeniser whose library is not installed."""
    if name != "13a":  # sacrebleu, whose import takes 0.3 s, is needed by tests only.
        tokenizer(name)


@functools.cache
def tokenizer(name: str, lowercase: bool = False) -> Callable[[str], str]:
    """sacrebleu's tokeniser of a sentence: words separated by spaces.

    Raises:
        UserError: there is none of this name, or what it needs is not installed.
    """
    split = _sacrebleu(name).tokenizer
    return lambda text: split((text.lower() if lowercase else text).rstrip())


@dataclass(frozen=True)
class Metric:
    """A score of a corpus.

    Args:
        title: for people, such as BLEU.
        count: integers of a hypothesis and its reference.
        score: the score of the sums of these over the corpus.
        signature: what defines the score, in sacrebleu's form.
    """

    title: str
    count: Callable[[str, str], list[int]]
    score: Callable[[Sequence[int]], float]
    signature: str


def standard_metrics(tokenize: str = "13a") -> dict[str, Metric]:
    """BLEU, BLEU in lower case, and chrF of detokenised text, as published figures are computed.

    Raises:
        UserError: see `tokenizer`.
    """
    from sacrebleu.metrics.chrf import CHRF

    def signature(metric: Any) -> str:
        metric.corpus_score(["a"], [["a"]])  # Before, the number of references is unknown.
        found = metric.get_signature()
        found.update("bs", _RESAMPLES)
        found.update("seed", _SEED)
        return str(found)

    def bleu_of(lowercase: bool) -> Metric:
        split = tokenizer(tokenize, lowercase)
        return Metric(
            "BLEU, lower case" if lowercase else "BLEU",
            lambda hypothesis, reference: word_counts(split(hypothesis), split(reference)),
            functools.partial(bleu, smooth=True),
            signature(_sacrebleu(tokenize, lowercase)),
        )

    return {
        "sacrebleu": bleu_of(lowercase=False),
        "sacrebleu_lower": bleu_of(lowercase=True),
        "sacrebleu_chrf": Metric("chrF", character_counts, chrf, signature(CHRF())),
    }


@dataclass(frozen=True)
class Estimate:
    """A score of a test set and its uncertainty.

    Args:
        score: of all sentences.
        interval: half the width of the interval that holds 95 % of the resamples' scores (Koehn, 2004).
    """

    score: float
    interval: float

    @classmethod
    def of(cls, metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> "Estimate":
        """Score translations.

        Args:
            hypotheses: at least one.
            references: as many.
        """
        counts = np.array([metric.count(*pair) for pair in zip(hypotheses, references, strict=True)], dtype=np.int64)
        generator, size = np.random.default_rng(_SEED), len(counts)
        draws = (np.bincount(generator.integers(size, size=size), minlength=size) for _ in range(_RESAMPLES))
        ordered = sorted(metric.score((draw @ counts).tolist()) for draw in draws)
        cut = _RESAMPLES // 40
        return cls(metric.score(counts.sum(0).tolist()), float(ordered[-1 - cut] - ordered[cut]) / 2)
