"""The translator's network as two graphs: the encoder, and one step of the decoder; and what goes with them.

The search between the steps is a loop of the program that runs them; `onnx_translate.py` is one.
"""

import base64
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from datamodules.translation.subwords import SubwordVocabulary
from datamodules.translation.text import PAD
from recipes.graphs import Graph, GraphInput
from recipes.seq2seq.checks import Vocabularies
from recipes.seq2seq.network import AnyNetwork, DecoderState, Encoded

__all__ = ["translation_graphs", "translation_script", "vocabulary_metadata"]


class _Encoder(nn.Module):
    def __init__(self, network: AnyNetwork) -> None:
        super().__init__()
        self.network = network
        self.eval()

    @override
    def forward(self, source: Tensor) -> dict[str, Tensor]:
        encoded, state = self.network.encode(source, (source != PAD).sum(1))
        return {"state": state.packed(), **encoded._asdict()}


class _DecoderStep(nn.Module):
    def __init__(self, network: AnyNetwork, like: DecoderState) -> None:
        super().__init__()
        self.network, self.like = network, like  # A state of the same parts.
        self.eval()

    @override
    def forward(self, tokens: Tensor, state: Tensor, memory: Tensor, keys: Tensor, mask: Tensor) -> dict[str, Tensor]:
        readouts, after, weights = self.network.step(tokens, self.like.unpacked(state), Encoded(memory, keys, mask))
        outputs = {"logits": self.network.logits(readouts), "next_state": after.packed()}
        return outputs if weights is None else outputs | {"attention": weights}


def translation_graphs(network: AnyNetwork, source_tokens: int, target_tokens: int) -> list[Graph]:
    """The graphs ``encoder`` and ``decoder``, for any number of sentences of any length.

    The decoder takes the encoder's outputs under their names, and its ``next_state`` is the ``state`` of the next step.
    """
    generator = torch.Generator().manual_seed(1)
    encoder = _Encoder(network)
    _, start = network.encode(torch.tensor([[PAD + 1]]), torch.tensor([1]))
    decoder = _DecoderStep(network, start)

    def source(batch: int) -> tuple[Tensor]:
        tokens = torch.randint(PAD + 1, source_tokens, (batch, batch + 2), generator=generator)
        tokens[-1, batch:] = PAD
        return (tokens,)

    def step(batch: int) -> tuple[Tensor, ...]:
        """The inputs of the fourth step."""
        encoded = encoder(*source(batch))
        for _ in range(4):
            tokens = torch.randint(PAD + 1, target_tokens, (batch,), generator=generator)
            inputs = tokens, *encoded.values()
            encoded["state"] = decoder(*inputs)["next_state"]
        return inputs

    grows = start.packed().dim() == 3
    layout, dims = (
        ("of shape (batch, tokens, state)", {0: "batch", 1: "time"})
        if grows
        else ("of shape (batch, state)", {0: "batch"})
    )
    one, sequence = {0: "batch"}, {0: "batch", 1: "length"}
    sentences = GraphInput("source", "int64 of shape (batch, length): tokens with <eos>, then padding with 0", sequence)
    inputs = (
        GraphInput("tokens", "int64 of shape (batch,): the last token of each translation, at first <sos>", one),
        GraphInput("state", f"{layout}: the encoder's, then next_state of the step before", dims),
        GraphInput("memory", "of shape (batch, length, hidden): the encoder's", sequence),
        GraphInput("keys", "of shape (batch, length, keys): the encoder's", sequence),
        GraphInput("mask", "bool of shape (batch, length): the encoder's, true where the source has a token", sequence),
    )
    return [
        Graph(encoder, (sentences,), source, "encoder"),
        Graph(decoder, inputs, step, "decoder"),
    ]


def vocabulary_metadata(vocabularies: Vocabularies) -> dict[str, Any]:
    """The tokens of both vocabularies, and of subwords sentencepiece's own file, as text."""
    metadata: dict[str, Any] = {}
    for side, vocabulary in zip(("source", "target"), vocabularies, strict=True):
        metadata[f"{side}_vocabulary"] = vocabulary.tokens
        if isinstance(vocabulary, SubwordVocabulary):
            metadata[f"{side}_subwords"] = base64.b64encode(vocabulary.model).decode()
    return metadata


def translation_script() -> str:
    """A program that translates with the graphs and the metadata, which needs onnxruntime and numpy only."""
    return Path(__file__).with_name("onnx_translate.py").read_text(encoding="utf-8")
