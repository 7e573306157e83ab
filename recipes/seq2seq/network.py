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

__all__ = ["CellName", "Encoded", "Seq2SeqNet", "State", "position_mask", "target_positions"]

CellName = Literal["gru", "lstm"]
_CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": StatelessGRU, "lstm": StatelessLSTM}


def position_mask(lengths: Tensor, time: int) -> Tensor:
    """True at the positions before each length, of shape (batch, time)."""
    return torch.arange(time, device=lengths.device) < lengths.unsqueeze(1)


def target_positions(target: Tensor, target_lengths: Tensor) -> Tensor:
    """The positions of the tokens to predict, without padding, in the flattened ``target[:, 1:]``.

    Example:
        >>> target_positions(torch.tensor([[1, 4, 2], [1, 2, 0]]), torch.tensor([3, 2]))
        tensor([0, 1, 2])
    """
    mask = position_mask(target_lengths - 1, target.shape[1] - 1)
    return mask.flatten().nonzero().squeeze(1).to(target.device, non_blocking=True)


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


class Encoded(NamedTuple):
    """The encoder's output, which the decoder attends to.

    Args:
        memory: the encoder's states, of shape (batch, source, hidden).
        keys: what the attention compares queries with.
        mask: True where there is a token, of shape (batch, source).
    """

    memory: Tensor
    keys: Tensor
    mask: Tensor

    def select(self, rows: Tensor) -> "Encoded":
        """The output for these sentences, which may repeat."""
        return Encoded(self.memory[rows], self.keys[rows], self.mask[rows])


class Seq2SeqNet(nn.Module):
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
        self.input_feeding = input_feeding
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

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Encoded, State]:
        """The encoder's output, and the state in which the decoder starts.

        Args:
            source: tokens of shape (batch, source), then padding.
            lengths: tokens of each sentence, of shape (batch,), on any device.
        """
        lengths = lengths.to(source.device, non_blocking=True)
        memory, ends = self.encoder(self.dropout(self.source_embedding(source)), lengths)
        memory = self.dropout(memory)
        start = State(
            torch.tanh(self.bridge(ends)),
            self.cell_bridge(ends) if self.cell_bridge is not None else None,
            memory.new_zeros(source.shape[0], self.combine.out_features) if self.input_feeding else None,
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

    def logits(self, readouts: Tensor) -> Tensor:
        """The output layer: readouts of shape (..., readout) to logits of shape (..., target_vocab_size)."""
        logits: Tensor = self.output(readouts)
        return logits

    def step(self, tokens: Tensor, state: State, encoded: Encoded) -> tuple[Tensor, State, Tensor | None]:
        """Decode one token.

        Args:
            tokens: the last token of each sentence, of shape (batch,).

        Returns:
            The readouts of the next token, of shape (batch, readout), for `logits`; the state after it; and the
            attention weights, of shape (batch, source), or None without attention.
        """
        inputs = self.dropout(self.target_embedding(tokens))
        if state.readout is not None:
            inputs = torch.cat((inputs, state.readout.to(inputs.dtype)), 1)
        outputs, hidden, cell = self._recur(inputs.unsqueeze(1), state)
        attended, weights = self._attend(outputs, encoded)
        readout = self._read_out(attended.squeeze(1))
        after = State(hidden, cell, readout if self.input_feeding else None)
        return readout, after, None if weights is None else weights.squeeze(1)

    @override
    def forward(
        self,
        source: Tensor,
        source_lengths: Tensor,
        target: Tensor,
        target_positions: Tensor,
        teacher_forced: Tensor | None = None,
    ) -> Tensor:
        """Logits of the target's tokens after the first, given those before them.

        Args:
            source: of shape (batch, source).
            source_lengths: of shape (batch,).
            target: of shape (batch, target), beginning with SOS.
            target_positions: what the function `target_positions` returns, of shape (tokens,).
            teacher_forced: where the decoder's input is the true token; elsewhere it is its own prediction, the
                likeliest token. Of shape (batch, target - 1); by default True everywhere.

        Returns:
            Of shape (tokens, target_vocab_size), for the positions without padding only, sentence by sentence: the
            others are not used, and in batches of mixed lengths they are a quarter of the work.
        """
        encoded, state = self.encode(source, source_lengths)
        inputs = target[:, :-1]
        if teacher_forced is None and not self.input_feeding:
            outputs, _, _ = self._recur(self.dropout(self.target_embedding(inputs)), state)
            attended = self._attend(outputs, encoded)[0].flatten(0, 1)[target_positions]
            return self.logits(self._read_out(attended, target_positions, inputs.shape[1]))
        readouts: list[Tensor] = []
        tokens = inputs[:, 0]
        for position in range(inputs.shape[1]):
            if position > 0:
                tokens = inputs[:, position]
                if teacher_forced is not None:
                    with torch.no_grad():
                        predicted = self.logits(readouts[-1]).argmax(1)
                    tokens = torch.where(teacher_forced[:, position], tokens, predicted)
            readout, state, _ = self.step(tokens, state, encoded)
            readouts.append(readout)
        return self.logits(torch.stack(readouts, 1).flatten(0, 1)[target_positions])
