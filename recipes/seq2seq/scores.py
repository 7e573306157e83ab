"""The scores of translations in validation and test, over all ranks: BLEU, chrF and exact matches, by sacrebleu.

sacrebleu adds integer counts of sentences, so the scores do not depend on the order of the sentences.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from callbacks.lib.exchange import gather
from datamodules.loading.randomness import uniform
from datamodules.translation.data_module import TranslationDataModule
from recipes.scores import MeanOverTargets
from recipes.tables import Table

BleuTokenizer = Literal["13a", "intl", "zh", "char", "none"]
"""sacrebleu's names. 13a is the standard one; zh is for Chinese."""


def _bleu(name: str, **options: Any) -> Any:
    """sacrebleu's BLEU, which takes 0.3 s to import."""
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=name, force=True, **options)


def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


@functools.cache
def tokenizer(name: str) -> Callable[[str], str]:
    """sacrebleu's tokeniser of a sentence: words separated by spaces."""
    split = _bleu(name).tokenizer
    return lambda text: split(text.rstrip())


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


def sentences_to_translate(numbers: Tensor | None, share: float) -> Tensor | None:
    """The places of a random share of the sentences of a batch, int64 of shape (chosen,); None stands for all.

    Args:
        numbers: of the sentences, by which they are chosen: so the choice is the same on any number of ranks.
    """
    if numbers is None or share >= 1:
        return None
    draws = uniform(0, "validated sentences", 0, numbers).squeeze(1)
    return (draws < share).nonzero().squeeze(1)


class TranslationScores(nn.Module):
    """Loss and perplexity of the reference tokens, and BLEU, chrF and exact matches of the translations."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = MeanOverTargets()
        self.texts: list[tuple[str, str]] = []

    def add(self, translations: Sequence[str], references: Sequence[str], tokenize: str | None = None) -> None:
        """Add sentences whose words are separated by spaces, or by the tokeniser of this name."""
        split = tokenizer(tokenize) if tokenize else str
        self.texts += zip(map(split, translations), map(split, references), strict=True)

    def compute(self, strategy: Strategy) -> dict[str, Tensor]:
        """All scores by name, from the sentences of all ranks."""
        loss = self.loss.compute()
        pairs = [pair for of_rank in gather(self.texts) for pair in of_rank]
        texts = token_scores([translation for translation, _ in pairs], [reference for _, reference in pairs])
        values = {name: torch.tensor(value, device=loss.device) for name, value in texts.items()}
        return {"loss": loss, "perplexity": loss.exp(), **values}

    def reset(self) -> None:
        """Forget all batches."""
        self.loss.reset()
        self.texts = []


class DetokenisedScores:
    """sacrebleu's scores of the test's translations as text, with the sentences that they are over, of all ranks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all sentences."""
        self.sentences: list[tuple[int, str, str, str]] = []
        self.found: dict[str, StandardScore] = {}

    def add(self, found: Mapping[str, Any], numbers: Tensor | None, data: Any) -> None:
        """Add what a step returned: its sources, translations and references, as they were written where known.

        Args:
            numbers: of the sentences, of shape (batch,); None continues those before.
            data: the data module.
        """
        sources, references, last = found["sources"], found["references"], len(self.sentences)
        if numbers is not None and isinstance(data, TranslationDataModule):
            sources, references = data.source_texts(numbers), data.target_texts(numbers)
        places = range(last, last + len(sources)) if numbers is None else numbers.tolist()
        self.sentences += zip(places, sources, found["translations"], references, strict=True)

    def compute(self, strategy: Strategy, tokenize: str) -> dict[str, float]:
        """The scores by name, which every rank computes from the sentences of all of them; none without sentences."""
        self.sentences = sorted(row for rows in gather(self.sentences) for row in rows)
        if self.sentences:
            _, _, translations, references = zip(*self.sentences, strict=True)
            self.found = standard_scores(translations, references, tokenize)
        return {name: each.score for name, each in self.found.items()}

    def tables(self) -> dict[str, Table]:
        """The sources, translations and references, in the order of the file.

        The translations and the references by themselves, too, line by line: sacrebleu's command takes these.
        """
        columns = "source", "translation", "reference"
        rows = [dict(zip(columns, texts, strict=True)) for _, *texts in self.sentences]
        if not rows:
            return {}
        return {
            "test_translations.csv": Table(columns, rows),
            "test_hypotheses.txt": Table(columns[1:2], rows),
            "test_references.txt": Table(columns[2:], rows),
        }

    def headline(self, scores: Mapping[str, float], beam: int) -> dict[str, str]:
        """The rows of the final table, from all logged scores."""
        rows = {}
        for part, how in (("val", "greedy, of tokens"), ("test", f"beam {beam}, of tokens")):
            if f"{part}/bleu" in scores:
                rows[f"{part} BLEU"] = f"{scores[f'{part}/bleu']:.2f} ({how})"
        shown = {"test chrF": "test/chrf", "test perplexity": "test/perplexity"}
        rows |= {title: f"{scores[name]:.2f}" for title, name in shown.items() if name in scores}
        if "test/exact_match" in scores:
            rows["test exact match"] = f"{100 * scores['test/exact_match']:.1f} %"
        standard = self.found.values()
        return rows | {f"sacrebleu {each.title}": f"{each.score:.2f} ({each.signature})" for each in standard}
