"""Attention of decoder states over the encoder's states, masked over padding."""

from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = [
    "AdditiveAttention",
    "Attention",
    "AttentionName",
    "DotAttention",
    "GeneralAttention",
    "LocationAttention",
    "build_attention",
]

AttentionName = Literal["additive", "general", "dot", "location", "none"]


class Attention(nn.Module):
    """Weighted means of the encoder's states for each query; a subclass defines the score of a query and a state.

    All queries of a sentence are computed at once: with one query it is a decoder's step, with all of them the whole
    sequence in one batched product.
    """

    def keys(self, memory: Tensor) -> Tensor:
        """What depends on the memory alone, computed once a sentence: (batch, source, size) -> (batch, source, any)."""
        return memory

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores of shape (batch, time, source) of queries (batch, time, hidden) with the keys."""
        raise NotImplementedError

    @override
    def forward(self, queries: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted means of the memory, and the weights.

        Args:
            queries: of shape (batch, time, hidden).
            keys: what `keys` returns for the memory.
            memory: of shape (batch, source, size).
            mask: True where the source has a token, of shape (batch, source).

        Returns:
            Contexts of shape (batch, time, size), and weights of shape (batch, time, source): float32 at least, exactly
            0 on padding.
        """
        scores = self.scores(queries, keys)
        # float32 at least: bf16 has too few digits for a softmax.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(2)
        return torch.bmm(weights.to(memory.dtype), memory), weights


class DotAttention(Attention):
    """The inner product of query and state (Luong et al., 2015)."""

    @override
    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.bmm(queries, keys.transpose(1, 2))


class GeneralAttention(DotAttention):
    """The inner product of the query with a linear map of the state (Luong et al., 2015)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)

    @override
    def keys(self, memory: Tensor) -> Tensor:
        keys: Tensor = self.key(memory)
        return keys


class AdditiveAttention(Attention):
    """A small network on the sum of query and state (Bahdanau et al., 2015).

    Over a whole sequence it holds (batch, time, source, hidden) numbers, where the others hold (batch, time, source).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.energy = nn.Linear(hidden_size, 1, bias=False)

    @override
    def keys(self, memory: Tensor) -> Tensor:
        keys: Tensor = self.key(memory)
        return keys

    @override
    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        energies: Tensor = self.energy(torch.tanh(self.query(queries).unsqueeze(2) + keys.unsqueeze(1)))
        return energies.squeeze(3)


class LocationAttention(Attention):
    """A score for each place in the source, from the query alone (Luong et al., 2015, equation 8).

    The tutorial's first decoder weighs places in this way, too; it computes their scores from the token and the state
    before the recurrent layer, in place of the state after it.

    Args:
        positions: places that have a score; the tokens after them get no weight.
    """

    def __init__(self, hidden_size: int, positions: int) -> None:
        super().__init__()
        self.position = nn.Linear(hidden_size, positions)

    @override
    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        scores: Tensor = self.position(queries)
        last, places = self.position.out_features - 1, torch.arange(keys.shape[1], device=keys.device)
        return scores[:, :, places.clamp(max=last)].masked_fill(places > last, -torch.inf)


def build_attention(name: AttentionName, hidden_size: int, positions: int) -> Attention | None:
    """The attention of that name, or None; `positions` is that of `LocationAttention`."""
    match name:
        case "additive":
            return AdditiveAttention(hidden_size)
        case "general":
            return GeneralAttention(hidden_size)
        case "dot":
            return DotAttention()
        case "location":
            return LocationAttention(hidden_size, positions)
        case "none":
            return None
