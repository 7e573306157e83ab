"""BLEU, chrF and exact matches of translations, by sacrebleu; nothing here needs torch.

sacrebleu adds integer counts of sentences, so the scores do not depend on the order of the sentences.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from datamodules.errors import UserError

__all__ = [
    "TRANSLATIONS",
    "BleuTokenizer",
    "StandardScore",
    "check_tokenizer",
    "standard_scores",
    "token_scores",
    "tokenizer",
]

TRANSLATIONS = "test_translations.csv"
"""The file in a run's folder with the columns source, translation and reference: the sentences of its test."""

BleuTokenizer = Literal["13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"]
"""sacrebleu's names. 13a is the standard one; zh, ja-mecab and ko-mecab are for Chinese, Japanese and Korean."""


def _bleu(name: str, **options: Any) -> Any:
    """sacrebleu's BLEU, which takes 0.3 s to import."""
    if name not in get_args(BleuTokenizer):
        raise UserError(f"no tokeniser {name!r}; expected one of {', '.join(get_args(BleuTokenizer))}")
    from sacrebleu.metrics.bleu import BLEU

    try:
        return BLEU(tokenize=name, force=True, **options)
    except RuntimeError as error:
        language = name.removesuffix("-mecab")
        raise UserError(
            f"bleu_tokenize={name} needs MeCab; install it with: pip install 'sacrebleu[{language}]'"
        ) from error


def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


@functools.cache
def tokenizer(name: str) -> Callable[[str], str]:
    """sacrebleu's tokeniser of a sentence: words separated by spaces.

    Raises:
        UserError: there is none of this name, or what it needs is not installed.
    """
    split = _bleu(name).tokenizer
    return lambda text: split(text.rstrip())


def check_tokenizer(name: str) -> None:
    """Refuse a name that there is not, or a tokeniser whose library is not installed."""
    if name != "13a":
        tokenizer(name)


def token_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU (Papineni et al., 2002) without smoothing, chrF (Popović, 2015), and the share of exact matches.

    Args:
        hypotheses: words separated by spaces.
        references: as many.

    Example:
        >>> scores = token_scores(["the cat sat on the mat"], ["the cat sat on a mat"])
        >>> {name: round(value, 2) for name, value in scores.items()}
        {'bleu': 53.73, 'chrf': 72.08, 'exact_match': 0.0}
    """
    if not hypotheses:
        return {"bleu": 0.0, "chrf": 0.0, "exact_match": 0.0}
    matches = sum(one.split() == other.split() for one, other in zip(hypotheses, references, strict=True))
    return {
        "bleu": _bleu("none", smooth_method="none").corpus_score(hypotheses, [references]).score,
        "chrf": _chrf().corpus_score(hypotheses, [references]).score,
        "exact_match": matches / len(hypotheses),
    }


@dataclass(frozen=True)
class StandardScore:
    """A score of detokenised text, as published figures are computed.

    Args:
        title: for people, such as BLEU.
        score: from 0 to 100.
        signature: what defines the score, in sacrebleu's form.
    """

    title: str
    score: float
    signature: str


def standard_scores(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a"
) -> dict[str, StandardScore]:
    """BLEU, BLEU in lower case, and chrF of text as it is written.

    Raises:
        UserError: see `tokenizer`.
        ValueError: there are not as many references, of which sacrebleu would leave some out.
    """
    references = [reference for _, reference in zip(hypotheses, references, strict=True)]
    metrics = {
        "sacrebleu": ("BLEU", _bleu(tokenize)),
        "sacrebleu_lower": ("BLEU, lower case", _bleu(tokenize, lowercase=True)),
        "sacrebleu_chrf": ("chrF", _chrf()),
    }
    found = {}
    for name, (title, metric) in metrics.items():
        score = metric.corpus_score(hypotheses, [references]).score
        found[name] = StandardScore(title, score, str(metric.get_signature()))
    return found
