"""Beam search against exhaustive search and a plain loop."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from datamodules.translation.text import EOS, PAD, SOS
from recipes.seq2seq.decoding import NEVER, beam_search, length_limits, length_penalty
from recipes.seq2seq.network import Seq2SeqNet, TranslationNetwork
from recipes.seq2seq.transformer import TransformerNet

SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2},
    {"network": "transformer", "heads": 2, "num_layers": 2, "feedforward_size": 12},
]


def network(target_vocab_size: int, network: str = "rnn", **settings: Any) -> Any:
    """A network whose weights are large enough that its output depends on the source."""
    torch.manual_seed(1)
    kind = Seq2SeqNet if network == "rnn" else TransformerNet
    net = kind(12, target_vocab_size, hidden_size=8, **settings).double().eval()
    for parameter in net.parameters():
        parameter.data.mul_(2.5)
    return net


def sources(n: int, longest: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    lengths = 1 + torch.arange(n) * 3 % longest
    tokens = torch.randint(3, 12, (n, longest), generator=generator)
    tokens[torch.arange(n), lengths - 1] = EOS
    return tokens.masked_fill(torch.arange(longest) >= lengths[:, None], PAD)[:, : int(lengths.max())], lengths


def log_probability(net: TranslationNetwork, source: torch.Tensor, tokens: tuple[int, ...]) -> float:
    """Of these tokens, by teacher forcing; PAD, SOS and UNK are never predicted."""
    target = torch.tensor([[SOS, *tokens]])
    logits = net(source, torch.tensor([source.shape[1]]), target, torch.arange(len(tokens)))
    logits[:, list(NEVER)] = -torch.inf
    each = F.log_softmax(logits, 1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return float(each.sum().detach())


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_beam_with_a_place_for_every_sentence_finds_what_exhaustive_search_finds(settings, alpha):
    net, (source, lengths) = network(7, **settings), sources(5)
    limits = torch.tensor([4, 3, 1, 4, 2])
    found = beam_search(net, source, lengths, beam=50, nbest=50, alpha=alpha, limits=limits)
    for i, limit in enumerate(limits.tolist()):
        everything = {}
        for size in range(limit):
            for tokens in itertools.product((4, 5, 6), repeat=size):
                translated = (*tokens, EOS)
                total = log_probability(net, source[i : i + 1, : lengths[i]], translated)
                everything[translated] = total / float(length_penalty(torch.tensor(len(translated)), alpha))
        ranked = sorted(everything.items(), key=lambda item: -item[1])
        kept = found.scores[i] > -torch.inf
        assert [tuple(w for w in row if w != PAD) for row in found.tokens[i][kept].tolist()] == [w for w, _ in ranked]
        torch.testing.assert_close(
            found.scores[i][kept], torch.tensor([s for _, s in ranked], dtype=torch.float64), atol=1e-10, rtol=0
        )


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_beam_of_one_takes_the_likeliest_token_each_time(settings):
    net, (source, lengths) = network(15, **settings), sources(9)
    found = beam_search(net, source, lengths, beam=1)
    translated = []
    for i in range(len(source)):
        with torch.no_grad():
            encoded, state = net.encode(source[i : i + 1, : lengths[i]], lengths[i : i + 1])
            tokens = [SOS]
            while tokens[-1] != EOS:
                readout, state, _ = net.step(torch.tensor(tokens[-1:]), state, encoded)
                allowed = net.output(readout)[0].index_fill(0, torch.tensor(NEVER), -torch.inf)
                tokens.append(int(allowed.argmax()) if len(tokens) < length_limits(lengths[i]) else EOS)
        translated.append(tokens[1:])
    assert [[w for w in row if w != PAD] for row in found.tokens[:, 0].tolist()] == translated
    assert len({len(tokens) for tokens in translated}) > 2, "sentences have to end at different times"


@pytest.mark.parametrize("settings", SETTINGS)
def test_translations_do_not_depend_on_what_else_is_in_the_batch(settings):
    net, (source, lengths) = network(15, **settings), sources(9)
    together = beam_search(net, source, lengths, beam=4, nbest=3)
    for i, length in enumerate(lengths.tolist()):
        alone = beam_search(net, source[i : i + 1, :length], lengths[i : i + 1], beam=4, nbest=3)
        time = alone.tokens.shape[2]
        assert torch.equal(together.tokens[i, :, :time], alone.tokens[0])
        assert (together.tokens[i, :, time:] == PAD).all()
        torch.testing.assert_close(together.scores[i], alone.scores[0], atol=1e-10, rtol=0)


def test_a_batch_without_sentences_has_no_translations():
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    found = beam_search(network(15), nothing, nothing[:, 0], beam=3, nbest=2)
    assert found.tokens.shape == (0, 2, 0)
