"""The scores of translations in validation and test, over all ranks."""

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from callbacks.lib.exchange import gather
from recipes.recipe import MeanOverTargets
from recipes.text_scores import token_scores

__all__ = ["TranslationScores"]


class TranslationScores(nn.Module):
    """Loss and perplexity of the reference tokens, and BLEU, chrF and exact matches of the translations."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = MeanOverTargets()
        self.texts: list[tuple[str, str]] = []

    def add(self, translations: Sequence[str], references: Sequence[str]) -> None:
        """Add sentences, whose words are separated by spaces."""
        self.texts += zip(translations, references, strict=True)

    def compute(self, strategy: Strategy) -> dict[str, Tensor]:
        """All scores by name, from the sentences of all ranks."""
        loss = self.loss.compute()
        pairs = [pair for of_rank in gather(strategy, self.texts) for pair in of_rank]
        texts = token_scores([translation for translation, _ in pairs], [reference for _, reference in pairs])
        values = {name: torch.tensor(value, device=loss.device) for name, value in texts.items()}
        return {"loss": loss, "perplexity": loss.exp(), **values}

    def reset(self) -> None:
        """Forget all batches."""
        self.loss.reset()
        self.texts = []
