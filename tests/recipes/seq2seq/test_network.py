"""The translation network: padding changes nothing, both ways through the decoder are the same; and beam search against
exhaustive search and a plain loop.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.translation.text import EOS, PAD, SOS
from recipes.seq2seq.decoding import NEVER, beam_search, length_limits, length_penalty
from recipes.seq2seq.network import Encoder, Seq2SeqNet, TranslationNetwork, position_mask, target_positions
from recipes.seq2seq.transformer import TransformerNet, sinusoids

TRANSFORMER: dict[str, Any] = {"network": "transformer", "heads": 2, "num_layers": 2, "feedforward_size": 12}
EVERY_KIND: list[dict[str, Any]] = [{}, {"num_layers": 2}, TRANSFORMER]
# Sources and targets of 1 to 6 tokens with their ends; the last sentence is the longest on neither side.
LENGTHS = [(2, 5), (6, 2), (1, 3), (4, 6), (3, 4)]


def network(network: str = "rnn", sizes: tuple[int, int] = (11, 13), seed: int = 7, **settings: Any) -> Any:
    torch.manual_seed(seed)
    kind = TransformerNet if network == "transformer" else Seq2SeqNet
    return kind(*sizes, hidden_size=8, **({"dropout": 0.0} | settings)).double()


def sentence(tokens: int, time: int, vocabulary: int, first: list[int]) -> Tensor:
    """A sentence that is a function of its length: `first`, tokens, EOS, padding."""
    middle = [4 + (3 * tokens + 5 * i) % (vocabulary - 4) for i in range(tokens - 1)]
    row = [*first, *middle, EOS]
    return torch.tensor(row + [PAD] * (time - len(row)))


def batch(numbers: list[int], padding: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some of the sentences, padded to the longest of them and further."""
    lengths = torch.tensor([LENGTHS[i] for i in numbers]) + torch.tensor([0, 1])
    times = (lengths.amax(0) + padding).tolist()
    source = torch.stack([sentence(LENGTHS[i][0], times[0], 11, []) for i in numbers])
    target = torch.stack([sentence(LENGTHS[i][1], times[1], 13, [SOS]) for i in numbers])
    return source, lengths[:, 0], target, lengths[:, 1]


def step_by_step(net: TranslationNetwork, source: Tensor, lengths: Tensor, target: Tensor, positions: Tensor) -> Tensor:
    """What `net` gives for a batch, token by token."""
    encoded, state = net.encode(source, lengths)
    readouts = []
    for tokens in target[:, :-1].unbind(1):
        readout, state = net.step(tokens, state, encoded)
        readouts.append(readout)
    return net.logits(torch.stack(readouts, 1).flatten(0, 1)[positions])


def loss_and_gradients(
    net: TranslationNetwork,
    source: Tensor,
    source_lengths: Tensor,
    target: Tensor,
    target_lengths: Tensor,
    logits_of: Any = lambda net, *sentences: net(*sentences),
) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss of a batch, and its gradient for each parameter."""
    positions = target_positions(target, target_lengths)
    logits = logits_of(net, source, source_lengths, target, positions)
    loss = F.cross_entropy(logits, target[:, 1:].flatten()[positions], reduction="sum", label_smoothing=0.1)
    net.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", EVERY_KIND, ids=str)
def test_sentences_have_the_same_gradients_alone_as_in_a_batch(settings):
    net = network(**settings)
    alone = [loss_and_gradients(net, *batch([i])) for i in range(len(LENGTHS))]
    for padding in (0, 3):
        loss, gradients = loss_and_gradients(net, *batch(list(range(len(LENGTHS))), padding))
        torch.testing.assert_close(loss, sum(each for each, _ in alone), atol=1e-10, rtol=0)
        assert gradients.keys() == dict(net.named_parameters()).keys()
        for name, gradient in gradients.items():
            expected = sum(each[name] for _, each in alone)
            torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("settings", EVERY_KIND, ids=str)
def test_a_whole_sequence_gives_what_step_by_step_gives(settings):
    net, sentences = network(**settings), batch(list(range(len(LENGTHS))))
    whole, steps = loss_and_gradients(net, *sentences), loss_and_gradients(net, *sentences, step_by_step)
    torch.testing.assert_close(whole[0], steps[0], atol=1e-10, rtol=0)
    for name, gradient in whole[1].items():
        torch.testing.assert_close(gradient, steps[1][name], atol=1e-10, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_positions_are_the_sinusoids_of_vaswani_et_al():
    like = torch.zeros(1, 6, dtype=torch.float64)
    found = sinusoids(0, 40, like)
    for position in (0, 1, 17, 39):
        angles = torch.tensor([position / 10_000 ** (2 * i / 6) for i in range(3)])
        expected = torch.cat((angles.sin(), angles.cos())).double()
        torch.testing.assert_close(found[position], expected, atol=1e-5, rtol=0)
        assert torch.equal(sinusoids(position, 1, like)[0], found[position])
    assert sinusoids(0, 2, torch.zeros(1, 5)).shape == (2, 5)


def test_explicit_attention_in_bf16_gives_what_torch_gives(monkeypatch):
    heads = network(**TRANSFORMER).encoder[0].heads
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(3, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = position_mask(torch.tensor([5, 2, 3]), 5)
    for options in ({"mask": mask}, {"causal": True}, {}):
        expected = heads.attend(*x, **options)
        found = heads.attend(*(each.bfloat16() for each in x), **options)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, atol=0.03, rtol=0)
    monkeypatch.delattr(type(heads), "_weights")
    long = torch.randn(1, 600, 8, dtype=torch.bfloat16)
    assert heads.attend(long, long, long, causal=True).shape == long.shape


def test_dropout_acts_only_between_the_layers_of_the_encoder():
    inputs, lengths = torch.randn(2, 5, 4), torch.tensor([5, 3])
    for layers in (1, 2):
        encoder = Encoder(4, 8, layers, dropout=0.5)
        same = torch.equal(encoder.train()(inputs, lengths)[0], encoder.eval()(inputs, lengths)[0])
        assert same == (layers == 1)


# Beam search


def searched(target_vocab_size: int, **settings: Any) -> Any:
    """A network whose weights are large enough that its output depends on the source."""
    net = network(sizes=(12, target_vocab_size), seed=1, **settings).eval()
    for parameter in net.parameters():
        parameter.data.mul_(2.5)
    return net


def sources(n: int, longest: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    lengths = 1 + torch.arange(n) * 3 % longest
    tokens = torch.randint(3, 12, (n, longest), generator=generator)
    tokens[torch.arange(n), lengths - 1] = EOS
    return tokens.masked_fill(torch.arange(longest) >= lengths[:, None], PAD)[:, : int(lengths.max())], lengths


def log_probability(net: TranslationNetwork, source: Tensor, tokens: tuple[int, ...]) -> float:
    """Of these tokens, by teacher forcing; PAD, SOS and UNK are never predicted."""
    target = torch.tensor([[SOS, *tokens]])
    logits = net(source, torch.tensor([source.shape[1]]), target, torch.arange(len(tokens)))
    logits[:, list(NEVER)] = -torch.inf
    each = F.log_softmax(logits, 1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return float(each.sum().detach())


@pytest.mark.parametrize("settings", EVERY_KIND)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_full_beam_finds_what_exhaustive_search_finds(settings, alpha):
    net, (source, lengths) = searched(7, **settings), sources(5)
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


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_a_beam_of_one_takes_the_likeliest_token_each_time(settings):
    net, (source, lengths) = searched(15, **settings), sources(9)
    found = beam_search(net, source, lengths, beam=1)
    translated = []
    for i in range(len(source)):
        with torch.no_grad():
            encoded, state = net.encode(source[i : i + 1, : lengths[i]], lengths[i : i + 1])
            tokens = [SOS]
            while tokens[-1] != EOS:
                readout, state = net.step(torch.tensor(tokens[-1:]), state, encoded)
                allowed = net.output(readout)[0].index_fill(0, torch.tensor(NEVER), -torch.inf)
                tokens.append(int(allowed.argmax()) if len(tokens) < length_limits(lengths[i]) else EOS)
        translated.append(tokens[1:])
    assert [[w for w in row if w != PAD] for row in found.tokens[:, 0].tolist()] == translated
    assert len({len(tokens) for tokens in translated}) > 2, "sentences have to end at different times"


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_translations_do_not_depend_on_what_else_is_in_the_batch(settings):
    net, (source, lengths) = searched(15, **settings), sources(9)
    together = beam_search(net, source, lengths, beam=4, nbest=3)
    for i, length in enumerate(lengths.tolist()):
        alone = beam_search(net, source[i : i + 1, :length], lengths[i : i + 1], beam=4, nbest=3)
        time = alone.tokens.shape[2]
        assert torch.equal(together.tokens[i, :, :time], alone.tokens[0])
        assert (together.tokens[i, :, time:] == PAD).all()
        torch.testing.assert_close(together.scores[i], alone.scores[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_a_run_in_bf16_translates_in_the_type_of_the_weights(settings):
    net, (source, lengths) = searched(15, **settings).float(), sources(9)
    with torch.autocast("cpu", torch.bfloat16):
        found = beam_search(net, source, lengths, beam=4, nbest=3)
    expected = beam_search(net, source, lengths, beam=4, nbest=3)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.scores, expected.scores)


def test_a_batch_without_sentences_has_no_translations():
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    found = beam_search(searched(15), nothing, nothing[:, 0], beam=3, nbest=2)
    assert found.tokens.shape == (0, 2, 0)
