"""An encoder that reads a sentence both ways, and a decoder with attention that writes another (Luong et al., 2015).

Attention comes after the decoder's recurrent layer, so with the target known in advance all of its positions are
computed at once: one recurrent call, one batched attention, one projection. Where a word depends on the step before
(input feeding, scheduled sampling, translating) the same modules go step by step; both ways give the same numbers.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.seq2seq.attention import ATTENTIONS, AttentionName
from recipes.seq2seq.encoder import Encoder

__all__ = ["CellName", "Encoded", "Seq2SeqNet", "State", "position_mask", "spoken_positions"]

CellName = Literal["gru", "lstm"]
_CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}


def position_mask(lengths: Tensor, time: int) -> Tensor:
    """True at the positions before each length, of shape (batch, time)."""
    return torch.arange(time, device=lengths.device) < lengths.unsqueeze(1)


def spoken_positions(target: Tensor, target_lengths: Tensor) -> Tensor:
    """Which of the flattened targets but the first of each sentence are words to be said, not padding.

    Example:
        >>> spoken_positions(torch.tensor([[1, 4, 2], [1, 2, 0]]), torch.tensor([3, 2]))
        tensor([0, 1, 2])
    """
    mask = position_mask(target_lengths - 1, target.shape[1] - 1)
    return mask.flatten().nonzero().squeeze(1).to(target.device, non_blocking=True)


class State(NamedTuple):
    """Where the decoder stands in each sentence.

    Args:
        hidden: of shape (layers, batch, hidden).
        cell: the same of an LSTM.
        readout: the last attentional vector, of shape (batch, readout), for input feeding.
    """

    hidden: Tensor
    cell: Tensor | None
    readout: Tensor | None

    def select(self, rows: Tensor) -> "State":
        """The state of these sentences, each as often as it is named."""
        cell = None if self.cell is None else self.cell[:, rows]
        readout = None if self.readout is None else self.readout[rows]
        return State(self.hidden[:, rows], cell, readout)


class Encoded(NamedTuple):
    """What the decoder looks at.

    Args:
        memory: the encoder's states, of shape (batch, source, hidden).
        keys: what the attention compares queries with.
        mask: True where there is a word, of shape (batch, source).
    """

    memory: Tensor
    keys: Tensor
    mask: Tensor

    def select(self, rows: Tensor) -> "Encoded":
        """These sentences, each as often as it is named."""
        return Encoded(self.memory[rows], self.keys[rows], self.mask[rows])


class Seq2SeqNet(nn.Module):
    """Bidirectional encoder, attention, recurrent decoder.

    Args:
        source_words: size of the source vocabulary.
        target_words: size of the target vocabulary.
        hidden: width of the decoder and of the encoder's two directions together; even.
        embedding: width of the word vectors.
        layers: recurrent layers of encoder and decoder.
        cell: kind of the recurrent layers.
        attention: additive (Bahdanau et al., 2015), general or dot (Luong et al., 2015).
        dropout: share of the inputs and outputs of the recurrent layers that is dropped.
        tied: the output layer's weights are the target words' vectors (Press and Wolf, 2017).
        input_feeding: the decoder sees its last attentional vector (Luong et al., 2015), which takes a step per word.

    Example:
        >>> network = Seq2SeqNet(source_words=9, target_words=7, hidden=8, embedding=4)
        >>> source, lengths = torch.tensor([[4, 5, 2], [6, 2, 0]]), torch.tensor([3, 2])
        >>> target, spoken = torch.tensor([[1, 4, 2], [1, 2, 0]]), torch.tensor([0, 1, 2])
        >>> network(source, lengths, target, spoken).shape  # a row for each word to be said: "4 2" and "2"
        torch.Size([3, 7])
    """

    def __init__(
        self,
        source_words: int,
        target_words: int,
        hidden: int = 256,
        embedding: int = 256,
        layers: int = 1,
        cell: CellName = "gru",
        attention: AttentionName = "dot",
        dropout: float = 0.3,
        tied: bool = True,
        input_feeding: bool = False,
    ) -> None:
        super().__init__()
        readout = embedding if tied else hidden
        recurrent, between = _CELLS[cell], dropout if layers > 1 else 0.0
        self.input_feeding = input_feeding
        self.dropout = nn.Dropout(dropout)
        self.source_embedding = nn.Embedding(source_words, embedding)
        self.target_embedding = nn.Embedding(target_words, embedding)
        self.encoder = Encoder(recurrent, embedding, hidden, layers, dropout)
        self.bridge = nn.Linear(hidden, hidden)
        self.cell_bridge = nn.Linear(hidden, hidden) if cell == "lstm" else None
        self.decoder = recurrent(
            embedding + (readout if input_feeding else 0), hidden, layers, batch_first=True, dropout=between
        )
        self.attention = ATTENTIONS[attention](hidden)
        self.combine = nn.Linear(2 * hidden, readout)
        self.output = nn.Linear(readout, target_words)
        for vectors in (self.source_embedding, self.target_embedding):
            nn.init.normal_(vectors.weight, std=embedding**-0.5)
        if tied:
            self.output.weight = self.target_embedding.weight

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Encoded, State]:
        """Read sentences.

        Args:
            source: words of shape (batch, source), then padding.
            lengths: words of each sentence, of shape (batch,), on any device.
        """
        lengths = lengths.to(source.device, non_blocking=True)
        memory, ends = self.encoder(self.dropout(self.source_embedding(source)), lengths)
        memory = self.dropout(memory)
        start = State(
            torch.tanh(self.bridge(ends)),
            self.cell_bridge(ends) if self.cell_bridge is not None else None,
            memory.new_zeros(len(source), self.combine.out_features) if self.input_feeding else None,
        )
        return Encoded(memory, self.attention.keys(memory), position_mask(lengths, source.shape[1])), start

    def _recur(self, inputs: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor | None]:
        """The decoder's recurrent layers over inputs of shape (batch, time, size)."""
        hidden, cell = state.hidden.to(inputs.dtype), state.cell
        if cell is None:
            outputs, hidden = self.decoder(inputs, hidden.contiguous())
        else:
            outputs, (hidden, cell) = self.decoder(inputs, (hidden.contiguous(), cell.to(inputs.dtype).contiguous()))
        return outputs, hidden, cell

    def _read_out(self, outputs: Tensor, contexts: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.combine(torch.cat((outputs, contexts), -1))))

    def step(self, words: Tensor, state: State, encoded: Encoded) -> tuple[Tensor, State, Tensor]:
        """Say one word more.

        Args:
            words: the last word of each sentence, of shape (batch,).

        Returns:
            The readouts of the next word, of shape (batch, readout), for `output`; the state after it; and the
            attention, of shape (batch, source).
        """
        inputs = self.dropout(self.target_embedding(words))
        if state.readout is not None:
            inputs = torch.cat((inputs, state.readout.to(inputs.dtype)), 1)
        outputs, hidden, cell = self._recur(inputs.unsqueeze(1), state)
        contexts, weights = self.attention(outputs, encoded.keys, encoded.memory, encoded.mask)
        readout = self._read_out(outputs.squeeze(1), contexts.squeeze(1))
        return readout, State(hidden, cell, readout if self.input_feeding else None), weights.squeeze(1)

    @override
    def forward(
        self,
        source: Tensor,
        source_lengths: Tensor,
        target: Tensor,
        spoken: Tensor,
        forced: Tensor | None = None,
    ) -> Tensor:
        """Logits of the target's words after the first, given those before them.

        Args:
            source: of shape (batch, source).
            source_lengths: of shape (batch,).
            target: of shape (batch, target), beginning with SOS.
            spoken: what `spoken_positions` says, of shape (words,).
            forced: where the decoder is given the true word; elsewhere it is given its own, the likeliest. Of shape
                (batch, target - 1); by default True everywhere.

        Returns:
            Of shape (words, target_words), for the positions without padding only, sentence by sentence: nobody reads
            the others, and in batches of mixed lengths they are a quarter of the work.
        """
        encoded, state = self.encode(source, source_lengths)
        inputs = target[:, :-1]
        if forced is None and not self.input_feeding:
            outputs, _, _ = self._recur(self.dropout(self.target_embedding(inputs)), state)
            contexts, _ = self.attention(outputs, encoded.keys, encoded.memory, encoded.mask)
            outputs, contexts = outputs.flatten(0, 1)[spoken], contexts.flatten(0, 1)[spoken]
            return self.output(self._read_out(outputs, contexts))
        readouts: list[Tensor] = []
        words = inputs[:, 0]
        for position in range(inputs.shape[1]):
            if position > 0:
                words = inputs[:, position]
                if forced is not None:
                    with torch.no_grad():
                        own = self.output(readouts[-1]).argmax(1)
                    words = torch.where(forced[:, position], words, own)
            readout, state, _ = self.step(words, state, encoded)
            readouts.append(readout)
        return self.output(torch.stack(readouts, 1).flatten(0, 1)[spoken])
