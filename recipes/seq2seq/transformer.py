"""Transformer (Vaswani et al., 2017) whose layers normalize their inputs (pre-norm; Xiong et al., 2020).

Whole sequences and single tokens are decoded by the same layers. A step attends to the keys and values of earlier
tokens in the state, of shape (batch, time, 2 x layers x width).

Tested in `tests/recipes/seq2seq/test_network.py`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from datamodules.errors import UserError, spelled
from recipes.dropout import Dropout

from .network import Encoded, TranslationNetwork, position_mask

_MAX_WEIGHTS = 512 * 512  # Longer sentences use torch's attention, which does not keep the weights in memory.


def sinusoids(start: int, time: int, like: Tensor) -> Tensor:
    """Return the encodings of positions beginning with `start`, of shape (time, width), in the type of `like`."""
    half = (like.shape[-1] + 1) // 2
    rates = torch.exp(torch.arange(half, device=like.device) * (-math.log(10_000) / half))
    angles = torch.arange(start, start + time, device=like.device).unsqueeze(1) * rates
    return torch.cat((angles.sin(), angles.cos()), 1)[:, : like.shape[-1]].to(like.dtype)


class _Heads:
    """Scaled dot-product attention in several heads, on tensors of shape (batch, time, width)."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def split(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (batch, heads, time, width of a head)."""
        batch, time, width = x.shape
        return x.view(batch, time, self.heads, width // self.heads).transpose(1, 2)

    def weights(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Return the attention weights over the source, a mean over the heads, of shape (batch, time, source)."""
        queries = self.split(queries)
        keys = self.split(keys)
        return self._weights(queries, keys, mask[:, None, None, :], causal=False).mean(1)

    def _weights(self, queries: Tensor, keys: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[3])
        # float32 at least: bf16 has too few digits for a softmax.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if causal:
            mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(3)

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Return weighted means of the values; `mask` is True for tokens, of shape (batch, source)."""
        queries, keys, values = map(self.split, (queries, keys, values))
        mask = None if mask is None else mask[:, None, None, :]
        if queries.is_cpu and queries.dtype == torch.bfloat16 and queries.shape[2] * keys.shape[2] <= _MAX_WEIGHTS:
            # torch's attention takes 7 times as long for a sentence, forward and backward.
            means = self._weights(queries, keys, mask, causal).to(values.dtype) @ values
        else:
            means = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal)
        return means.transpose(1, 2).flatten(2)


class _Layer(nn.Module):
    """The common part of encoder and decoder layers: self-attention and a feed-forward network on residual paths."""

    def __init__(self, width: int, heads: int, feedforward_size: int, dropout: float) -> None:
        super().__init__()
        self.heads = _Heads(heads)
        self.dropout = Dropout(dropout)
        self.self_norm = nn.LayerNorm(width)
        # Without biases: the gradient of the keys' bias is only rounding noise, which Adam scales up to its full rate.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.self_output = nn.Linear(width, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, feedforward_size), nn.ReLU(), nn.Linear(feedforward_size, width)
        )

    def _feed_forward(self, x: Tensor) -> Tensor:
        fed: Tensor = x + self.dropout(self.feedforward(self.feedforward_norm(x)))
        return fed


class _EncoderLayer(_Layer):
    @override
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the input of the next layer; `mask` as in `_Heads`."""
        queries, keys, values = self.query_key_value(self.self_norm(x)).chunk(3, 2)
        return self._feed_forward(x + self.dropout(self.self_output(self.heads.attend(queries, keys, values, mask))))


class _DecoderLayer(_Layer):
    """Decoder layer: self-attention, attention to the source, and a feed-forward network."""

    def __init__(self, width: int, heads: int, feedforward_size: int, dropout: float) -> None:
        super().__init__(width, heads, feedforward_size, dropout)
        self.source_norm = nn.LayerNorm(width)
        self.source_query = nn.Linear(width, width, bias=False)
        self.source_output = nn.Linear(width, width)

    @override
    def forward(self, x: Tensor, past: Tensor | None, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Run the layer on whole sentences, or on one token after the tokens of `past`.

        Args:
            x: inputs of shape (batch, time, width).
            past: keys and values of earlier tokens, of shape (batch, past, 2 x width); None for whole sentences.
            encoded: values and keys of the source in this layer.

        Returns:
            The next layer's input, and keys and values of the tokens in `x`.
        """
        x, keys_and_values = self._attend_to_target(x, past)
        queries = self.source_query(self.source_norm(x))
        attended = self.heads.attend(queries, encoded.keys, encoded.memory, encoded.mask)
        return self._feed_forward(x + self.dropout(self.source_output(attended))), keys_and_values

    def _attend_to_target(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `x` after self-attention, and the keys and values of its tokens."""
        projected = self.query_key_value(self.self_norm(x))
        queries, keys_and_values = projected.split((x.shape[2], 2 * x.shape[2]), 2)
        visible = keys_and_values
        if past is not None:
            visible = torch.cat((past.to(keys_and_values.dtype), keys_and_values), 1)
        keys, values = visible.chunk(2, 2)
        # A single token attends to all earlier tokens, so only whole sentences need a causal mask.
        attended = self.heads.attend(queries, keys, values, causal=past is None)
        return x + self.dropout(self.self_output(attended)), keys_and_values

    def source_weights(self, x: Tensor, encoded: Encoded) -> Tensor:
        """Return the weights over the source of whole sentences `x`, of shape (batch, time, source)."""
        x, _ = self._attend_to_target(x, None)
        return self.heads.weights(self.source_query(self.source_norm(x)), encoded.keys, encoded.mask)


class TransformerNet(TranslationNetwork):
    """Encoder and decoder of attention layers, for sentences of any length.

    Dropout applies to the embeddings and to the residual branches of each layer, not to the attention weights, because
    `torch.nn.functional.scaled_dot_product_attention` does not return these. Positions are sinusoids. The output layer
    shares its weights with the target embedding (Press and Wolf, 2017).

    Args:
        source_vocab_size: tokens in the source vocabulary.
        target_vocab_size: tokens in the target vocabulary.
        hidden_size: width of embeddings and layers, a multiple of `heads`.
        num_layers: layers of the encoder, and of the decoder.
        heads: attention heads of a layer.
        feedforward_size: width inside the feed-forward networks.
        dropout: dropout rate of the embeddings and of the residual branches.

    Example:
        >>> network = TransformerNet(source_vocab_size=9, target_vocab_size=7, hidden_size=8)
        >>> source, lengths = torch.tensor([[4, 5, 2], [6, 2, 0]]), torch.tensor([3, 2])
        >>> target, positions = torch.tensor([[1, 4, 2], [1, 2, 0]]), torch.tensor([0, 1, 2])
        >>> network(source, lengths, target, positions).shape  # a row for each token to predict: "4 2" and "2"
        torch.Size([3, 7])
    """

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int,
        hidden_size: int = 256,
        num_layers: int = 3,
        heads: int = 4,
        feedforward_size: int = 512,
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        if hidden_size % heads:
            raise UserError(
                f"{spelled('hidden_size', hidden_size)} cannot be split into {spelled('heads', heads)} of equal width"
            )
        self.width = hidden_size
        self.layers = num_layers
        self.dropout = Dropout(dropout)
        self.source_embedding = nn.Embedding(source_vocab_size, hidden_size)
        self.target_embedding = nn.Embedding(target_vocab_size, hidden_size)

        sizes = hidden_size, heads, feedforward_size, dropout
        self.encoder = nn.ModuleList(_EncoderLayer(*sizes) for _ in range(num_layers))
        self.decoder = nn.ModuleList(_DecoderLayer(*sizes) for _ in range(num_layers))
        self.encoder_norm = nn.LayerNorm(hidden_size)
        self.decoder_norm = nn.LayerNorm(hidden_size)
        # The keys and the values of the source in all layers of the decoder.
        self.source_keys = nn.Linear(hidden_size, num_layers * hidden_size, bias=False)
        self.source_values = nn.Linear(hidden_size, num_layers * hidden_size, bias=False)
        self.output = nn.Linear(hidden_size, target_vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # Block by block: the weight is a stack of square projections, of queries, keys and values or of all
                # layers.
                blocks = module.weight.split(hidden_size) if module.weight.shape[1] == hidden_size else [module.weight]
                for block in blocks:
                    nn.init.xavier_uniform_(block)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=hidden_size**-0.5)
        self.output.weight = self.target_embedding.weight

    def _embed(self, embedding: nn.Embedding, tokens: Tensor, start: int = 0) -> Tensor:
        vectors = embedding(tokens) * math.sqrt(self.width)
        embedded: Tensor = self.dropout(vectors + sinusoids(start, tokens.shape[1], vectors))
        return embedded

    @override
    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Encoded, Tensor]:
        mask = position_mask(lengths.to(source.device, non_blocking=True), source.shape[1])
        x = self._embed(self.source_embedding, source)
        for layer in self.encoder:
            x = layer(x, mask)
        x = self.encoder_norm(x)
        encoded = Encoded(self.source_values(x), self.source_keys(x), mask)
        # The state has the keys and values of earlier tokens; there are no earlier tokens yet.
        return encoded, encoded.keys.new_zeros(source.shape[0], 0, 2 * self.layers * self.width)

    def _source_of_layers(self, encoded: Encoded) -> list[Encoded]:
        """Return the values and keys of the source in each layer of the decoder."""
        sides = zip(encoded.memory.chunk(self.layers, 2), encoded.keys.chunk(self.layers, 2), strict=True)
        return [Encoded(values, keys, encoded.mask) for values, keys in sides]

    def _decode(self, tokens: Tensor, cache: Tensor | None, encoded: Encoded) -> tuple[Tensor, list[Tensor]]:
        """Return the decoder's output for tokens (batch, time), and their keys and values in each layer."""
        x = self._embed(self.target_embedding, tokens, 0 if cache is None else cache.shape[1])
        past = [None] * self.layers if cache is None else cache.chunk(self.layers, 2)
        new_caches = []
        for layer, layer_past, source in zip(self.decoder, past, self._source_of_layers(encoded), strict=True):
            x, layer_cache = layer(x, layer_past, source)
            new_caches.append(layer_cache)
        return x, new_caches

    @override
    def attention(self, source: Tensor, lengths: Tensor, inputs: Tensor) -> Tensor:
        """Return the last decoder layer's attention to the source, a mean over heads (Vaswani et al., 2017).

        Arguments and result are the same as of `TranslationNetwork.attention`.
        """
        encoded, _ = self.encode(source, lengths)
        x = self._embed(self.target_embedding, inputs)
        sources = self._source_of_layers(encoded)
        for layer, layer_source in zip(self.decoder[:-1], sources[:-1], strict=True):
            x, _ = layer(x, None, layer_source)
        last_layer: Any = self.decoder[-1]
        weights: Tensor = last_layer.source_weights(x, sources[-1])
        return weights

    @override
    def step(self, tokens: Tensor, state: Tensor, encoded: Encoded) -> tuple[Tensor, Tensor]:
        x, new_caches = self._decode(tokens.unsqueeze(1), state, encoded)
        added = torch.cat(new_caches, 2)
        new_state = torch.cat((state.to(added.dtype), added), 1)
        return self.decoder_norm(x).squeeze(1), new_state

    @override
    def decode(self, inputs: Tensor, state: Tensor, encoded: Encoded, positions: Tensor) -> Tensor:
        x, _ = self._decode(inputs, None, encoded)
        readouts: Tensor = self.decoder_norm(x.flatten(0, 1)[positions])
        return readouts
