"""What a translation network offers, and the recurrent one: a bidirectional encoder, a decoder with attention.

A network decodes whole sequences, where the target is known, and step by step, with equal results. In the recurrent
one attention comes after the decoder's recurrent layer (Luong et al., 2015), so with the target known in advance all of
its positions are computed at once: one recurrent call, one batched attention, one projection. In translating the same
modules run step by step.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from datamodules.errors import UserError
from recipes.dropout import Dropout


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


class Encoded(NamedTuple):
    """The encoder's output, which the decoder attends to.

    Args:
        memory: what the attention takes means of, of shape (batch, source, hidden): states, or values of all layers.
        keys: what it compares queries with, of shape (batch, source, any).
        mask: True where there is a token, of shape (batch, source).
    """

    memory: Tensor
    keys: Tensor
    mask: Tensor

    def select(self, rows: Tensor) -> "Encoded":
        """The output for these sentences, which may repeat."""
        return Encoded(self.memory[rows], self.keys[rows], self.mask[rows])


class TranslationNetwork(nn.Module):
    """The base of translation networks, whose decoders work on whole sequences and step by step, with equal results.

    A subclass has the output layer `output`, and defines `encode`, `step` and `decode`. Its decoder's state between two
    tokens is a tensor; where that is not of shape (batch, ...), it defines `select`, too.
    """

    output: nn.Linear

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Encoded, Tensor]:
        """The encoder's output, and the state in which the decoder starts.

        Args:
            source: tokens of shape (batch, source), then padding.
            lengths: tokens of each sentence, of shape (batch,), on any device.
        """
        raise NotImplementedError

    def step(self, tokens: Tensor, state: Tensor, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Decode one token.

        Args:
            tokens: the last token of each sentence, of shape (batch,).

        Returns:
            The readouts of the next token, of shape (batch, readout), for `logits`; and the state after it.
        """
        raise NotImplementedError

    def decode(self, inputs: Tensor, state: Tensor, encoded: Encoded, positions: Tensor) -> Tensor:
        """The readouts of whole sequences.

        Args:
            inputs: tokens of shape (batch, time).
            positions: of the flattened inputs, those to return the readouts of; of shape (tokens,).

        Returns:
            Of shape (tokens, readout).
        """
        raise NotImplementedError

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        """The state of these sentences, which may repeat."""
        return state[rows]

    def attention(self, source: Tensor, lengths: Tensor, inputs: Tensor) -> Tensor:
        """The weights with which the decoder looks at the source as it predicts each token (Bahdanau et al., 2015).

        They are those of a pass over whole sequences, and what `step` computes in translating: so a translation is
        made without them, and looked at afterwards.

        Args:
            source: of shape (batch, source).
            lengths: of shape (batch,).
            inputs: the tokens before those that are predicted: SOS, then the translation; of shape (batch, time).

        Returns:
            Of shape (batch, time, source), float32; the sum over the source is 1, and padding has 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method attention(source, lengths, inputs)")

    def free_running(self, source: Tensor, source_lengths: Tensor, target: Tensor, target_positions: Tensor) -> Tensor:
        """As `forward`, but each token follows from those that the decoder itself found likeliest before it.

        The decoder is not told the target, in training as in translating (Williams and Zipser, 1989, call the other
        teacher forcing). It decodes step by step. No gradient flows through the choice of a token.

        Returns:
            Logits of shape (tokens, target_vocab_size).
        """
        encoded, state = self.encode(source, source_lengths)
        tokens = target[:, 0]
        readouts = []
        for _ in range(target.shape[1] - 1):
            readout, state = self.step(tokens, state, encoded)
            readouts.append(readout)
            with torch.no_grad():
                tokens = self.logits(readout).argmax(1)
        return self.logits(torch.stack(readouts, 1).flatten(0, 1)[target_positions])

    def logits(self, readouts: Tensor) -> Tensor:
        """The output layer: readouts of shape (..., readout) to logits of shape (..., target_vocab_size)."""
        logits: Tensor = self.output(readouts)
        return logits

    @override
    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor, target_positions: Tensor) -> Tensor:
        """Logits of the target's tokens after the first, given those before them.

        Args:
            source: of shape (batch, source).
            source_lengths: of shape (batch,).
            target: of shape (batch, target), beginning with SOS.
            target_positions: what the function `target_positions` returns, of shape (tokens,).

        Returns:
            Of shape (tokens, target_vocab_size), for the positions without padding only, sentence by sentence: the
            others are not used, and in batches of mixed lengths they are a quarter of the work.
        """
        encoded, state = self.encode(source, source_lengths)
        return self.logits(self.decode(target[:, :-1], state, encoded, target_positions))


def reversed_positions(lengths: Tensor, time: int) -> Tensor:
    """For each sentence its positions from the last token to the first, then those of its padding; (batch, time).

    Example:
        >>> reversed_positions(torch.tensor([3, 2]), time=4)
        tensor([[2, 1, 0, 3],
                [1, 0, 2, 3]])
    """
    positions = torch.arange(time, device=lengths.device)
    ends = lengths.unsqueeze(1)
    return torch.where(positions < ends, ends - 1 - positions, positions)


class Encoder(nn.Module):
    """Bidirectional recurrent layers without packed sequences.

    The backward direction reads each sentence reversed within its length, so that padding comes last in both directions
    and cannot change the states before it. On a CPU that takes 0.3 to 0.85 times as long as `pack_padded_sequence`,
    whose gradient fills a buffer of the whole batch for each step; on a GPU it does not wait for the lengths.

    Args:
        input_size: of the inputs.
        hidden_size: of the outputs, half of it for each direction.
        num_layers: stacked layers.
        dropout: between layers.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        self.forward_layers = nn.ModuleList(nn.GRU(size, hidden_size // 2, batch_first=True) for size in sizes)
        self.backward_layers = nn.ModuleList(nn.GRU(size, hidden_size // 2, batch_first=True) for size in sizes)
        self.dropout = Dropout(dropout)

    @override
    def forward(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """States at each token, (batch, time, hidden), and the final states of each layer, (layers, batch, hidden).

        Args:
            inputs: of shape (batch, time, size), padding last.
            lengths: of shape (batch,), on the device of the inputs.
        """
        order = reversed_positions(lengths, inputs.shape[1]).unsqueeze(2)
        rows, states, ends = torch.arange(inputs.shape[0], device=inputs.device), inputs, []
        layers = zip(self.forward_layers, self.backward_layers, strict=True)
        for number, (forward_layer, backward_layer) in enumerate(layers):
            if number > 0:
                states = self.dropout(states)
            ahead = forward_layer(states)[0]
            behind = backward_layer(states.gather(1, order.expand(-1, -1, states.shape[2])))[0]
            behind = behind.gather(1, order.expand(-1, -1, behind.shape[2]))
            states = torch.cat((ahead, behind), 2)
            ends.append(torch.cat((ahead[rows, lengths - 1], behind[:, 0]), 1))
        return states, torch.stack(ends)


def attention_weights(queries: Tensor, encoded: Encoded) -> Tensor:
    """The softmax over the source of inner products of queries and keys (Luong et al., 2015).

    Args:
        queries: of shape (batch, time, hidden); with one query it is a decoder's step, with all of them the whole
            sequence in one batched product.

    Returns:
        Of shape (batch, time, source), float32 or float64; 0 at padding.
    """
    scores = torch.bmm(queries, encoded.keys.transpose(1, 2))
    # float32 at least: bf16 has too few digits for a softmax.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(~encoded.mask.unsqueeze(1), -torch.inf).softmax(2)


def attend(queries: Tensor, encoded: Encoded) -> Tensor:
    """The queries, and their means of the memory, weighted by `attention_weights`.

    Args:
        queries: of shape (batch, time, hidden).

    Returns:
        Of shape (batch, time, 2 x hidden).
    """
    weights = attention_weights(queries, encoded)
    return torch.cat((queries, torch.bmm(weights.to(encoded.memory.dtype), encoded.memory)), 2)


class Seq2SeqNet(TranslationNetwork):
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
        if hidden_size % 2:
            raise UserError(f"hidden_size={hidden_size} cannot be halved between two directions; pass an even number")
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
    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Encoded, Tensor]:
        lengths = lengths.to(source.device, non_blocking=True)
        memory, ends = self.encoder(self.dropout(self.source_embedding(source)), lengths)
        memory = self.dropout(memory)
        return Encoded(memory, memory, position_mask(lengths, source.shape[1])), torch.tanh(self.bridge(ends))

    @override
    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[:, rows]

    def _recur(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The recurrent layers over inputs of shape (batch, time, size), and a state of (layers, batch, hidden)."""
        outputs, hidden = self.decoder(inputs, state.to(inputs.dtype).contiguous())
        return outputs, hidden

    def _read_out(self, attended: Tensor) -> Tensor:
        """Attentional vectors."""
        readouts: Tensor = self.dropout(torch.tanh(self.combine(attended)))
        return readouts

    @override
    def attention(self, source: Tensor, lengths: Tensor, inputs: Tensor) -> Tensor:
        encoded, state = self.encode(source, lengths)
        outputs, _ = self._recur(self.dropout(self.target_embedding(inputs)), state)
        return attention_weights(outputs, encoded)

    @override
    def step(self, tokens: Tensor, state: Tensor, encoded: Encoded) -> tuple[Tensor, Tensor]:
        inputs = self.dropout(self.target_embedding(tokens))
        outputs, after = self._recur(inputs.unsqueeze(1), state)
        return self._read_out(attend(outputs, encoded).squeeze(1)), after

    @override
    def decode(self, inputs: Tensor, state: Tensor, encoded: Encoded, positions: Tensor) -> Tensor:
        outputs, _ = self._recur(self.dropout(self.target_embedding(inputs)), state)
        return self._read_out(attend(outputs, encoded).flatten(0, 1)[positions])
