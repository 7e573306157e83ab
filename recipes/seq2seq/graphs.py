"""The translator's network as two graphs: the encoder, and one step of the decoder.

The search between the steps is a loop of the program that runs them; `onnx_translate.py` is one.
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

from datamodules.translation.text import PAD
from recipes.graphs import Graph, GraphInput
from recipes.seq2seq.network import Encoded, Seq2SeqNet, State

__all__ = ["translation_graphs"]


def _flat(state: State) -> Tensor:
    """All parts of a decoder's state as one tensor of shape (batch, state)."""
    layers = [part.transpose(0, 1).flatten(1) for part in (state.hidden, state.cell) if part is not None]
    return torch.cat(layers if state.readout is None else [*layers, state.readout], 1)


def _parts(flat: Tensor, like: State) -> State:
    """The inverse of `_flat`, with the parts and sizes of another state."""
    layers, _, hidden = like.hidden.shape
    size = layers * hidden

    def part(number: int) -> Tensor:
        columns = flat[:, number * size : (number + 1) * size]
        return columns.view(-1, layers, hidden).transpose(0, 1)

    cell = None if like.cell is None else part(1)
    readout = None if like.readout is None else flat[:, -like.readout.shape[1] :]
    return State(part(0), cell, readout)


class _Encoder(nn.Module):
    def __init__(self, network: Seq2SeqNet) -> None:
        super().__init__()
        self.network = network
        self.eval()

    @override
    def forward(self, source: Tensor) -> dict[str, Tensor]:
        encoded, state = self.network.encode(source, (source != PAD).sum(1))
        return {"state": _flat(state), **encoded._asdict()}


class _DecoderStep(nn.Module):
    def __init__(self, network: Seq2SeqNet, like: State) -> None:
        super().__init__()
        self.network, self.like = network, like
        self.eval()

    @override
    def forward(self, tokens: Tensor, state: Tensor, memory: Tensor, keys: Tensor, mask: Tensor) -> dict[str, Tensor]:
        readouts, after, weights = self.network.step(tokens, _parts(state, self.like), Encoded(memory, keys, mask))
        outputs = {"logits": self.network.logits(readouts), "next_state": _flat(after)}
        return outputs if weights is None else outputs | {"attention": weights}


def translation_graphs(network: Seq2SeqNet, source_tokens: int, target_tokens: int) -> list[Graph]:
    """The graphs ``encoder`` and ``decoder``, for any number of sentences of any length.

    The decoder takes the encoder's outputs under their names, and its ``next_state`` is the ``state`` of the next step.
    """
    generator = torch.Generator().manual_seed(1)
    encoder = _Encoder(network)

    def source(batch: int) -> tuple[Tensor]:
        tokens = torch.randint(PAD + 1, source_tokens, (batch, batch + 2), generator=generator)
        tokens[-1, batch:] = PAD
        return (tokens,)

    def step(batch: int) -> tuple[Tensor, ...]:
        tokens = torch.randint(PAD + 1, target_tokens, (batch,), generator=generator)
        return (tokens, *encoder(*source(batch)).values())

    one, sequence = {0: "batch"}, {0: "batch", 1: "length"}
    sentences = GraphInput("source", "int64 of shape (batch, length): tokens with <eos>, then padding with 0", sequence)
    inputs = (
        GraphInput("tokens", "int64 of shape (batch,): the last token of each translation, at first <sos>", one),
        GraphInput("state", "of shape (batch, state): the encoder's, then next_state of the step before", one),
        GraphInput("memory", "of shape (batch, length, hidden): the encoder's", sequence),
        GraphInput("keys", "of shape (batch, length, keys): the encoder's", sequence),
        GraphInput("mask", "bool of shape (batch, length): the encoder's, true where the source has a token", sequence),
    )
    _, like = network.encode(*source(2), torch.tensor([4, 2]))
    return [
        Graph(encoder, (sentences,), source, "encoder"),
        Graph(_DecoderStep(network, like), inputs, step, "decoder"),
    ]
