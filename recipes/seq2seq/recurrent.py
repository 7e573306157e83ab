"""A bidirectional encoder, and a decoder with attention (Luong et al., 2015) or without (Sutskever et al., 2014).

Attention comes after the decoder's recurrent layer, so with the target known in advance all of its positions are
computed at once: one recurrent call, one batched attention, one projection. Where a token depends on the step before
(input feeding, scheduled sampling, translating) the same modules run step by step; both ways give the same numbers.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.lib.stateless_dropout import StatelessDropout
from callbacks.lib.stateless_rnn import StatelessGRU, StatelessLSTM
from recipes.seq2seq.attention import AttentionName, build_attention
from recipes.seq2seq.encoder import Encoder
from recipes.seq2seq.network import Encoded, TranslationNetwork, position_mask

__all__ = ["CellName", "Seq2SeqNet", "State"]

CellName = Literal["gru", "lstm"]
_CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": StatelessGRU, "lstm": StatelessLSTM}


class State(NamedTuple):
    """The state of the decoder for each sentence.

    Args:
        hidden: of shape (layers, batch, hidden).
        cell: the same of an LSTM.
        readout: the last attentional vector, of shape (batch, readout), for input feeding.
    """

    hidden: Tensor
    cell: Tensor | None
    readout: Tensor | None

    def select(self, rows: Tensor) -> "State":
        """The state of these sentences, which may repeat."""
        cell = None if self.cell is None else self.cell[:, rows]
        readout = None if self.readout is None else self.readout[rows]
        return State(self.hidden[:, rows], cell, readout)

    def packed(self) -> Tensor:
        """All parts, of shape (batch, state)."""
        layers = [part.transpose(0, 1).flatten(1) for part in (self.hidden, self.cell) if part is not None]
        return torch.cat(layers if self.readout is None else [*layers, self.readout], 1)

    def unpacked(self, tensor: Tensor) -> "State":
        """The inverse of `packed`, with the parts and sizes of this state."""
        layers, _, hidden = self.hidden.shape
        size = layers * hidden

        def part(number: int) -> Tensor:
            columns = tensor[:, number * size : (number + 1) * size]
            return columns.view(-1, layers, hidden).transpose(0, 1)

        cell = None if self.cell is None else part(1)
        readout = None if self.readout is None else tensor[:, -self.readout.shape[1] :]
        return State(part(0), cell, readout)


class Seq2SeqNet(TranslationNetwork[State]):
    """Bidirectional encoder, recurrent decoder, attention.

    Args:
        source_vocab_size: tokens in the source vocabulary.
        target_vocab_size: tokens in the target vocabulary.
        hidden_size: width of the decoder, and of the encoder's two directions together; even.
        embedding_size: width of the token embeddings.
        num_layers: recurrent layers of encoder and decoder.
        cell: kind of the recurrent layers.
        attention_type: additive (Bahdanau et al., 2015), general, dot or location (Luong et al., 2015), or none.
        positions: places of the source that location attention weighs; it ignores the tokens after them.
        dropout: share of the inputs and outputs of the recurrent layers that is dropped.
        tie_embeddings: the output layer shares its weights with the target embedding (Press and Wolf, 2017).
        input_feeding: the decoder's input includes its last attentional vector (Luong et al., 2015), which takes a step
            per token.

    Example:
        >>> network = Seq2SeqNet(source_vocab_size=9, target_vocab_size=7, hidden_size=8, embedding_size=4)
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
        embedding_size: int = 256,
        num_layers: int = 1,
        cell: CellName = "gru",
        attention_type: AttentionName = "dot",
        positions: int = 50,
        dropout: float = 0.3,
        tie_embeddings: bool = True,
        input_feeding: bool = False,
    ) -> None:
        super().__init__()
        readout = embedding_size if tie_embeddings else hidden_size
        recurrent, between = _CELLS[cell], dropout if num_layers > 1 else 0.0
        self.by_step = input_feeding
        self.dropout = StatelessDropout(dropout)
        self.source_embedding = nn.Embedding(source_vocab_size, embedding_size)
        self.target_embedding = nn.Embedding(target_vocab_size, embedding_size)
        self.encoder = Encoder(recurrent, embedding_size, hidden_size, num_layers, dropout)
        self.bridge = nn.Linear(hidden_size, hidden_size)
        self.cell_bridge = nn.Linear(hidden_size, hidden_size) if cell == "lstm" else None
        self.decoder = recurrent(
            embedding_size + (readout if input_feeding else 0),
            hidden_size,
            num_layers,
            batch_first=True,
            dropout=between,
        )
        self.attention = build_attention(attention_type, hidden_size, positions)
        self.combine = nn.Linear(hidden_size if self.attention is None else 2 * hidden_size, readout)
        self.output = nn.Linear(readout, target_vocab_size)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=embedding_size**-0.5)
        if tie_embeddings:
            self.output.weight = self.target_embedding.weight

    @override
    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Encoded, State]:
        lengths = lengths.to(source.device, non_blocking=True)
        memory, ends = self.encoder(self.dropout(self.source_embedding(source)), lengths)
        memory = self.dropout(memory)
        start = State(
            torch.tanh(self.bridge(ends)),
            self.cell_bridge(ends) if self.cell_bridge is not None else None,
            memory.new_zeros(source.shape[0], self.combine.out_features) if self.by_step else None,
        )
        keys = memory if self.attention is None else self.attention.keys(memory)
        return Encoded(memory, keys, position_mask(lengths, source.shape[1])), start

    def _recur(self, inputs: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor | None]:
        """The decoder's recurrent layers over inputs of shape (batch, time, size)."""
        hidden, cell = state.hidden.to(inputs.dtype), state.cell
        if cell is None:
            outputs, hidden = self.decoder(inputs, hidden.contiguous())
        else:
            outputs, (hidden, cell) = self.decoder(inputs, (hidden.contiguous(), cell.to(inputs.dtype).contiguous()))
        return outputs, hidden, cell

    def _attend(self, outputs: Tensor, encoded: Encoded) -> tuple[Tensor, Tensor | None]:
        """The decoder's outputs, of shape (batch, time, hidden), with their contexts; and the attention weights."""
        if self.attention is None:
            return outputs, None
        contexts, weights = self.attention(outputs, encoded.keys, encoded.memory, encoded.mask)
        return torch.cat((outputs, contexts), 2), weights

    def _read_out(self, attended: Tensor, rows: Tensor | None = None, time: int = 1) -> Tensor:
        """Attentional vectors; `rows` and `time` as in `StatelessDropout`."""
        readouts: Tensor = self.dropout(torch.tanh(self.combine(attended)), rows, time)
        return readouts

    @override
    def step(self, tokens: Tensor, state: State, encoded: Encoded) -> tuple[Tensor, State, Tensor | None]:
        inputs = self.dropout(self.target_embedding(tokens))
        if state.readout is not None:
            inputs = torch.cat((inputs, state.readout.to(inputs.dtype)), 1)
        outputs, hidden, cell = self._recur(inputs.unsqueeze(1), state)
        attended, weights = self._attend(outputs, encoded)
        readout = self._read_out(attended.squeeze(1))
        after = State(hidden, cell, readout if self.by_step else None)
        return readout, after, None if weights is None else weights.squeeze(1)

    @override
    def decode(self, inputs: Tensor, state: State, encoded: Encoded, positions: Tensor) -> Tensor:
        outputs, _, _ = self._recur(self.dropout(self.target_embedding(inputs)), state)
        attended = self._attend(outputs, encoded)[0].flatten(0, 1)[positions]
        return self._read_out(attended, positions, inputs.shape[1])
