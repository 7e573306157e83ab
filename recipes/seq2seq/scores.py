"""Scores of translations over all ranks with sacrebleu: BLEU, chrF and exact matches.

sacrebleu adds integer counts of the sentences, so the scores do not depend on the order of the sentences.

Tested in `tests/recipes/seq2seq/test_recipe.py`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from callbacks.lib.ranks import gather
from datamodules.lightning import Strategy
from datamodules.loading.randomness import uniform
from datamodules.translation.data_module import TranslationDataModule
from recipes.evaluation_tables import Headline, ResultTable
from recipes.scores import MeanOverTargets

BleuTokenizer = Literal["13a", "intl", "zh", "char", "none"]
"""sacrebleu's names of tokenizers. 13a is the standard; zh is for Chinese."""


def _bleu(name: str, **options: Any) -> Any:
    """Return sacrebleu's BLEU. The import is here because it takes 0.3 s."""
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=name, force=True, **options)


def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


@functools.cache
def tokenizer(name: str) -> Callable[[str], str]:
    """Return sacrebleu's tokenizer: from a sentence to words separated by spaces."""
    split = _bleu(name).tokenizer

    def tokenize(text: str) -> str:
        tokens: str = split(text.rstrip())
        return tokens

    return tokenize


def token_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return BLEU (Papineni et al., 2002) without smoothing, chrF (Popović, 2015), and the share of exact matches.

    Args:
        hypotheses: translations, words separated by spaces.
        references: the reference translations, in the same number.

    Example:
        >>> scores = token_scores(["the cat sat on the mat"], ["the cat sat on a mat"])
        >>> {name: round(value, 2) for name, value in scores.items()}
        {'bleu': 53.73, 'chrf': 72.08, 'exact_match': 0.0}
    """
    if not hypotheses:
        return {"bleu": 0.0, "chrf": 0.0, "exact_match": 0.0}
    pairs = zip(hypotheses, references, strict=True)
    matches = sum(hypothesis.split() == reference.split() for hypothesis, reference in pairs)
    return {
        "bleu": _bleu("none", smooth_method="none").corpus_score(hypotheses, [references]).score,
        "chrf": _chrf().corpus_score(hypotheses, [references]).score,
        "exact_match": matches / len(hypotheses),
    }


@dataclass(frozen=True)
class StandardScore:
    """A score of detokenized text, comparable to published scores.

    Args:
        title: name in tables, such as BLEU.
        score: value from 0 to 100.
        signature: sacrebleu's signature, which defines the score.
    """

    title: str
    score: float
    signature: str


def standard_scores(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a"
) -> dict[str, StandardScore]:
    """Return BLEU, BLEU in lower case, and chrF of detokenized text.

    Raises:
        ValueError: the number of references differs; sacrebleu would ignore some sentences.
    """
    references = [reference for _, reference in zip(hypotheses, references, strict=True)]
    metrics = {
        "sacrebleu": ("BLEU", _bleu(tokenize)),
        "sacrebleu_lower": ("BLEU, lower case", _bleu(tokenize, lowercase=True)),
        "sacrebleu_chrf": ("chrF", _chrf()),
    }
    scores_by_name = {}
    for name, (title, metric) in metrics.items():
        score = metric.corpus_score(hypotheses, [references]).score
        scores_by_name[name] = StandardScore(title, score, str(metric.get_signature()))
    return scores_by_name


def sentences_to_translate(numbers: Tensor | None, share: float) -> Tensor | None:
    """Return the positions of a random share of a batch, int64 of shape (chosen,); None means all positions.

    Args:
        numbers: the numbers of the sentences, which determine the choice on any number of ranks.
        share: the share of sentences to choose.
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
        """Add sentences whose words are separated by spaces, or by the tokenizer of this name."""
        split = tokenizer(tokenize) if tokenize else str
        self.texts += zip(map(split, translations), map(split, references), strict=True)

    def compute(self, strategy: Strategy) -> dict[str, Tensor]:
        """Return all scores by name, from the sentences of all ranks."""
        loss = self.loss.compute()
        pairs = [pair for pairs_of_rank in gather(self.texts) for pair in pairs_of_rank]
        texts = token_scores([translation for translation, _ in pairs], [reference for _, reference in pairs])
        values = {name: torch.tensor(value, device=loss.device) for name, value in texts.items()}
        return {"loss": loss, "perplexity": loss.exp(), **values}

    def reset(self) -> None:
        """Forget all batches."""
        self.loss.reset()
        self.texts = []


class DetokenizedScores:
    """sacrebleu's scores of the test's translations as text, and the sentences of all ranks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all sentences."""
        self.sentences: list[tuple[int, str, str, str]] = []
        self.found: dict[str, StandardScore] = {}

    def add(self, outputs: Mapping[str, Any], numbers: Tensor | None, data: Any) -> None:
        """Add the result of a step; the data module has the original texts.

        Args:
            outputs: the sources, translations and references of a batch.
            numbers: the numbers of the sentences, of shape (batch,); None: the numbers after the earlier sentences.
            data: the data module.
        """
        sources = outputs["sources"]
        references = outputs["references"]
        if numbers is not None and isinstance(data, TranslationDataModule):
            sources = data.source_texts(numbers)
            references = data.target_texts(numbers)
        first_number = len(self.sentences)
        positions = range(first_number, first_number + len(sources)) if numbers is None else numbers.tolist()
        self.sentences += zip(positions, sources, outputs["translations"], references, strict=True)

    def compute(self, strategy: Strategy, tokenize: str) -> dict[str, float]:
        """Return the scores by name, equal on every rank; an empty dict without sentences."""
        # Sorted by number, because the sentences alternate between ranks.
        self.sentences = sorted(row for rows in gather(self.sentences) for row in rows)
        if self.sentences:
            _, _, translations, references = zip(*self.sentences, strict=True)
            self.found = standard_scores(translations, references, tokenize)
        return {name: standard_score.score for name, standard_score in self.found.items()}

    def tables(self) -> dict[str, ResultTable]:
        """Return the sources, translations and references, in the order of the file.

        Two text files have the translations and the references line by line, in the format of sacrebleu's command.
        """
        columns = "source", "translation", "reference"
        rows = [dict(zip(columns, texts, strict=True)) for _, *texts in self.sentences]
        if not rows:
            return {}
        return {
            "test_translations.csv": ResultTable(columns, rows),
            "test_hypotheses.txt": ResultTable(columns[1:2], rows),
            "test_references.txt": ResultTable(columns[2:], rows),
        }

    def headline(self, scores: Mapping[str, float], beam: int) -> list[Headline]:
        """Return the rows of the closing table, from all logged scores."""
        titles = {
            "val/bleu": ("val BLEU", "greedy, of tokens"),
            "test/bleu": ("test BLEU", f"beam {beam}, of tokens"),
            "test/chrf": ("test chrF", ""),
            "test/perplexity": ("test perplexity", ""),
        }
        rows = [
            Headline(title, name, f"{scores[name]:.2f}", remark)
            for name, (title, remark) in titles.items()
            if name in scores
        ]
        if "test/exact_match" in scores:
            rows.append(Headline("test exact match", "test/exact_match", f"{100 * scores['test/exact_match']:.1f} %"))
        for name, score in self.found.items():
            title = f"sacrebleu {score.title}"
            rows.append(Headline(title, f"test/{name}", f"{score.score:.2f}", signature=score.signature))
        return rows
