"""A bidirectional encoder, and a decoder with attention (Luong et al., 2015).

Attention comes after the decoder's recurrent layer, so with the target known in advance all of its positions are
computed at once: one recurrent call, one batched attention, one projection. In translating the same modules run step by
step; both ways give the same numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.dropout import Dropout
from recipes.seq2seq.encoder import Encoder
from recipes.seq2seq.network import Encoded, TranslationNetwork, position_mask

__all__ = ["Seq2SeqNet", "State"]


class State(NamedTuple):
    """The state of the decoder for each sentence.

    Args:
        hidden: of shape (layers, batch, hidden).
    """

    hidden: Tensor

    def select(self, rows: Tensor) -> "State":
        """The state of these sentences, which may repeat."""
        return State(self.hidden[:, rows])

    def packed(self) -> Tensor:
        """The state of all layers, of shape (batch, state)."""
        return self.hidden.transpose(0, 1).flatten(1)

    def unpacked(self, tensor: Tensor) -> "State":
        """The inverse of `packed`, with the sizes of this state."""
        layers, _, hidden = self.hidden.shape
        return State(tensor.view(-1, layers, hidden).transpose(0, 1))


def attend(queries: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The means of the memory, weighted by the inner products of each query with the keys (Luong et al., 2015).

    Args:
        queries: of shape (batch, time, hidden); with one query it is a decoder's step, with all of them the whole
            sequence in one batched product.
        keys, memory: of shape (batch, source, hidden); here both are the encoder's states.
        mask: True where the source has a token, of shape (batch, source).

    Returns:
        Contexts of shape (batch, time, hidden), and weights of shape (batch, time, source): float32 at least, exactly
        0 on padding.
    """
    scores = torch.bmm(queries, keys.transpose(1, 2))
    # float32 at least: bf16 has too few digits for a softmax.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(2)
    return torch.bmm(weights.to(memory.dtype), memory), weights


class Seq2SeqNet(TranslationNetwork[State]):
    """Bidirectional encoder, recurrent decoder, attention; gated recurrent units (GRU).

    The output layer shares its weights with the target embedding (Press and Wolf, 2017).

    Args:
        source_vocab_size: tokens in the source vocabulary.
        target_vocab_size: tokens in the target vocabulary.
        hidden_size: width of the token embeddings, of the decoder, and of the encoder's two directions together; even.
        num_layers: recurrent layers of encoder and decoder.
        dropout: share of the inputs and outputs of the recurrent layers that is dropped.

    Example:
        >>> network = Seq2SeqNet(source_vocab_size=9, target_vocab_size=7, hidden_size=8)
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
        num_layers: int = 1,
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.source_embedding = nn.Embedding(source_vocab_size, hidden_size)
        self.target_embedding = nn.Embedding(target_vocab_size, hidden_size)
        self.encoder = Encoder(hidden_size, hidden_size, num_layers, dropout)
        self.bridge = nn.Linear(hidden_size, hidden_size)
        between = dropout if num_layers > 1 else 0.0
        self.decoder = nn.GRU(hidden_size, hidden_size, num_layers, batch_first=True, dropout=between)
        self.combine = nn.Linear(2 * hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, target_vocab_size)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=hidden_size**-0.5)
        self.output.weight = self.target_embedding.weight

    @override
    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Encoded, State]:
        lengths = lengths.to(source.device, non_blocking=True)
        memory, ends = self.encoder(self.dropout(self.source_embedding(source)), lengths)
        memory = self.dropout(memory)
        return Encoded(memory, memory, position_mask(lengths, source.shape[1])), State(torch.tanh(self.bridge(ends)))

    def _recur(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """The decoder's recurrent layers over inputs of shape (batch, time, size)."""
        outputs, hidden = self.decoder(inputs, state.hidden.to(inputs.dtype).contiguous())
        return outputs, State(hidden)

    def _attend(self, outputs: Tensor, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """The decoder's outputs, of shape (batch, time, hidden), with their contexts; and the attention weights."""
        contexts, weights = attend(outputs, encoded.keys, encoded.memory, encoded.mask)
        return torch.cat((outputs, contexts), 2), weights

    def _read_out(self, attended: Tensor) -> Tensor:
        """Attentional vectors."""
        readouts: Tensor = self.dropout(torch.tanh(self.combine(attended)))
        return readouts

    @override
    def step(self, tokens: Tensor, state: State, encoded: Encoded) -> tuple[Tensor, State, Tensor]:
        inputs = self.dropout(self.target_embedding(tokens))
        outputs, after = self._recur(inputs.unsqueeze(1), state)
        attended, weights = self._attend(outputs, encoded)
        return self._read_out(attended.squeeze(1)), after, weights.squeeze(1)

    @override
    def decode(self, inputs: Tensor, state: State, encoded: Encoded, positions: Tensor) -> Tensor:
        outputs, _ = self._recur(self.dropout(self.target_embedding(inputs)), state)
        return self._read_out(self._attend(outputs, encoded)[0].flatten(0, 1)[positions])
