"""What a translation network offers: an encoder, and a decoder that works on whole sequences and step by step."""

from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["AnyNetwork", "DecoderState", "Encoded", "TranslationNetwork", "position_mask", "target_positions"]


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


class DecoderState(Protocol):
    """The state of a decoder between two tokens, for each sentence."""

    def select(self, rows: Tensor) -> Self:
        """The state of these sentences, which may repeat."""

    def packed(self) -> Tensor:
        """The state as one tensor, of shape (batch, ...)."""

    def unpacked(self, tensor: Tensor) -> Self:
        """The inverse of `packed`, for any number of sentences."""


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


StateT = TypeVar("StateT", bound=DecoderState)


class TranslationNetwork(nn.Module, Generic[StateT]):
    """The base of translation networks, whose decoders work on whole sequences and step by step, with equal results.

    A subclass has the output layer `output`, and defines `encode`, `step` and `decode`.
    """

    output: nn.Linear

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Encoded, StateT]:
        """The encoder's output, and the state in which the decoder starts.

        Args:
            source: tokens of shape (batch, source), then padding.
            lengths: tokens of each sentence, of shape (batch,), on any device.
        """
        raise NotImplementedError

    def step(self, tokens: Tensor, state: StateT, encoded: Encoded) -> tuple[Tensor, StateT, Tensor]:
        """Decode one token.

        Args:
            tokens: the last token of each sentence, of shape (batch,).

        Returns:
            The readouts of the next token, of shape (batch, readout), for `logits`; the state after it; and the
            attention weights, of shape (batch, source).
        """
        raise NotImplementedError

    def decode(self, inputs: Tensor, state: StateT, encoded: Encoded, positions: Tensor) -> Tensor:
        """The readouts of whole sequences.

        Args:
            inputs: tokens of shape (batch, time).
            positions: of the flattened inputs, those to return the readouts of; of shape (tokens,).

        Returns:
            Of shape (tokens, readout).
        """
        raise NotImplementedError

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


AnyNetwork = TranslationNetwork[Any]
