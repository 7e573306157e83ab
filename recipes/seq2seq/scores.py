"""Corpus BLEU, chrF and exact match from integer counts, whose sums over batches and ranks are exact.

The numbers are sacrebleu's (a test compares them). sacrebleu itself computes BLEU from summed counts
(`BLEU.compute_bleu`), but chrF only from a whole corpus, and importing it takes 0.3 s. torchmetrics adds every n-gram
to a tensor separately, which takes longer than translating, and its chrF leaves out the references of sentences
without any match.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from recipes.recipe import MeanOverTargets

__all__ = ["TextScores", "TranslationScores", "bleu", "chrf", "text_counts"]

_WORD_ORDER, _CHARACTER_ORDER = 4, 6


def _overlaps(hypothesis: Sequence[str], reference: Sequence[str], order: int) -> list[int]:
    """For n-grams of 1 to `order` units: those in both, in the hypothesis, in the reference."""
    counts = []
    for n in range(1, order + 1):
        ours, theirs = (Counter(zip(*(units[i:] for i in range(n)), strict=False)) for units in (hypothesis, reference))
        counts += [(ours & theirs).total(), ours.total(), theirs.total()]
    return counts


def text_counts(hypothesis: str, reference: str) -> list[int]:
    """Counts of one sentence: n-grams of words and of characters without spaces, exact matches, sentences.

    Example:
        >>> text_counts("a b", "a c")[:6]  # one word in both, of two and two; no pair
        [1, 2, 2, 0, 1, 1]
    """
    words = hypothesis.split(), reference.split()
    characters = "".join(words[0]), "".join(words[1])
    overlaps = _overlaps(*words, _WORD_ORDER) + _overlaps(*characters, _CHARACTER_ORDER)
    return [*overlaps, int(words[0] == words[1]), 1]


def bleu(counts: Tensor) -> Tensor:
    """BLEU between 0 and 100 (Papineni et al., 2002) without smoothing, from word counts of shape (4, 3)."""
    matches, ours, theirs = counts.double().unbind(1)
    if matches.min() == 0:
        return matches.new_zeros(())
    brevity = torch.clamp(1 - theirs[0] / ours[0], max=0.0)
    return 100 * torch.exp(brevity + (matches / ours).log().mean())


def chrf(counts: Tensor, beta: float = 2.0) -> Tensor:
    """chrF between 0 and 100 (Popović, 2015): the F-score of the mean precision and recall over n-grams of 1 to 6.

    Args:
        counts: of characters, of shape (6, 3).
    """
    counts = counts.double()
    # Sentences shorter than n characters have no n-grams.
    matches, ours, theirs = counts[(counts[:, 1:] > 0).all(1)].unbind(1)
    if matches.sum() == 0:
        return matches.new_zeros(())
    precision, recall = (matches / ours).mean(), (matches / theirs).mean()
    return 100 * (1 + beta**2) * precision * recall / (beta**2 * precision + recall)


class TextScores(Metric):
    """BLEU, chrF and the share of exact matches of a corpus with one reference a sentence, over all ranks.

    Example:
        >>> scores = TextScores()
        >>> scores.update(["the cat sat on the mat"], ["the cat sat on a mat"])
        >>> {name: round(float(value), 2) for name, value in scores.compute().items()}
        {'bleu': 53.73, 'chrf': 72.08, 'exact_match': 0.0}
    """

    full_state_update = False
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        size = 3 * (_WORD_ORDER + _CHARACTER_ORDER) + 2
        self.add_state("counts", torch.zeros(size, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, hypotheses: Sequence[str], references: Sequence[str]) -> None:
        """Add sentences, whose words are separated by spaces."""
        rows = [text_counts(*pair) for pair in zip(hypotheses, references, strict=True)]
        if rows:
            self.counts += torch.tensor(rows).sum(0).to(self.counts.device, non_blocking=True)

    @override
    def compute(self) -> dict[str, Tensor]:
        # A few numbers, on the CPU: a Mac's GPU has no float64.
        counts = self.counts.cpu()
        n_grams = counts[:-2].view(-1, 3)
        return {
            "bleu": bleu(n_grams[:_WORD_ORDER]).float(),
            "chrf": chrf(n_grams[_WORD_ORDER:]).float(),
            "exact_match": counts[-2] / counts[-1].clamp(min=1),
        }


class TranslationScores(nn.Module):
    """Loss and perplexity of the reference tokens, and BLEU, chrF and exact matches of the translations."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = MeanOverTargets()
        self.texts = TextScores()

    def compute(self) -> dict[str, Tensor]:
        """All scores by name."""
        loss = self.loss.compute()
        texts = {name: value.to(loss.device) for name, value in self.texts.compute().items()}
        return {"loss": loss, "perplexity": loss.exp(), **texts}

    def reset(self) -> None:
        """Forget all batches."""
        self.loss.reset()
        self.texts.reset()
