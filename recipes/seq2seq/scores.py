"""Corpus BLEU, chrF and exact match from integer counts, whose sums over batches and ranks are exact.

torchmetrics adds every n-gram to a tensor separately, which takes longer than translating, and its chrF leaves out the
references of sentences without any match.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from recipes.recipe import MeanOverTargets
from recipes.text_scores import CHARACTER_ORDER, WORD_ORDER, bleu, character_counts, chrf, word_counts

__all__ = ["TextScores", "TranslationScores"]


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
        size = 3 * (WORD_ORDER + CHARACTER_ORDER) + 2
        self.add_state("counts", torch.zeros(size, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, hypotheses: Sequence[str], references: Sequence[str]) -> None:
        """Add sentences, whose words are separated by spaces."""
        rows = [
            [*word_counts(*pair), *character_counts(*pair), int(pair[0].split() == pair[1].split()), 1]
            for pair in zip(hypotheses, references, strict=True)
        ]
        if rows:
            self.counts += torch.tensor(rows).sum(0).to(self.counts.device, non_blocking=True)

    @override
    def compute(self) -> dict[str, Tensor]:
        counts: list[int] = self.counts.tolist()
        words, characters = counts[: 3 * WORD_ORDER], counts[3 * WORD_ORDER : -2]
        values = {"bleu": bleu(words), "chrf": chrf(characters), "exact_match": counts[-2] / max(1, counts[-1])}
        return {name: torch.tensor(value) for name, value in values.items()}


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
