"""Beam search against exhaustive search and a plain loop; scores of texts against torchmetrics."""

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchmetrics.text import BLEUScore

from datamodules.translation.bundled_corpus import bundled_pairs
from datamodules.translation.text import EOS, PAD, SOS
from recipes.seq2seq.decoding import attention_weights, beam_search, length_limits, length_penalty
from recipes.seq2seq.network import AnyNetwork
from recipes.seq2seq.recurrent import Seq2SeqNet
from recipes.seq2seq.scores import TextScores
from recipes.seq2seq.transformer import TransformerNet
from tests.support.ranks import run_ranks

SETTINGS: list[dict[str, Any]] = [
    {"cell": "gru", "attention_type": "dot"},
    {"cell": "lstm", "attention_type": "additive", "num_layers": 2, "tie_embeddings": False},
    {"cell": "gru", "attention_type": "general", "input_feeding": True},
    {"network": "transformer", "heads": 2, "num_layers": 2, "feedforward_size": 12},
    {"cell": "gru", "attention_type": "location", "positions": 5},
    {"cell": "gru", "attention_type": "none"},
]


def network(target_vocab_size: int, network: str = "rnn", **settings: Any) -> Any:
    """A network whose weights are large enough that its output depends on the source."""
    torch.manual_seed(5)
    kind, sizes = (Seq2SeqNet, {"embedding_size": 6}) if network == "rnn" else (TransformerNet, {})
    net = kind(12, target_vocab_size, hidden_size=8, **(sizes | settings)).double().eval()
    for parameter in net.parameters():
        parameter.data.mul_(2.5)
    return net


def sources(n: int, longest: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    lengths = 1 + torch.arange(n) * 3 % longest
    tokens = torch.randint(3, 12, (n, longest), generator=generator)
    tokens[torch.arange(n), lengths - 1] = EOS
    return tokens.masked_fill(torch.arange(longest) >= lengths[:, None], PAD)[:, : int(lengths.max())], lengths


def log_probability(net: AnyNetwork, source: torch.Tensor, tokens: tuple[int, ...]) -> float:
    """Of these tokens, by teacher forcing; PAD and SOS are never predicted."""
    target = torch.tensor([[SOS, *tokens]])
    logits = net(source, torch.tensor([source.shape[1]]), target, torch.arange(len(tokens)))
    logits[:, [PAD, SOS]] = -torch.inf
    each = F.log_softmax(logits, 1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return float(each.sum())


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_beam_with_a_place_for_every_sentence_finds_what_exhaustive_search_finds(settings, alpha):
    net, (source, lengths) = network(6, **settings), sources(5)
    limits = torch.tensor([4, 3, 1, 4, 2])
    found = beam_search(net, source, lengths, beam=50, nbest=50, alpha=alpha, limits=limits)
    for i, limit in enumerate(limits.tolist()):
        everything = {}
        for size in range(limit):
            for tokens in itertools.product((3, 4, 5), repeat=size):
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
                allowed = net.output(readout)[0].index_fill(0, torch.tensor([PAD, SOS]), -torch.inf)
                tokens.append(int(allowed.argmax()) if len(tokens) < length_limits(lengths[i]) else EOS)
        translated.append(tokens[1:])
    assert [[w for w in row if w != PAD] for row in found.tokens[:, 0].tolist()] == translated
    assert len({len(tokens) for tokens in translated}) > 2, "sentences have to end at different times"


@pytest.mark.parametrize("settings", SETTINGS[:4])
def test_a_wider_beam_never_finds_less_likely_first_translations_than_a_greedy_one(settings):
    net, (source, lengths) = network(15, **settings), sources(9)
    greedy = beam_search(net, source, lengths, beam=1, alpha=0.0)
    wide = beam_search(net, source, lengths, beam=6, nbest=6, alpha=0.0)
    assert (wide.scores[:, 0] >= greedy.scores[:, 0] - 1e-12).all()
    assert (wide.scores[:, 0] > greedy.scores[:, 0] + 1e-6).any()
    assert (wide.scores.diff(dim=1) <= 0).all()
    for rows in wide.tokens:
        assert len({tuple(row) for row in rows.tolist()}) == 6


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


@pytest.mark.parametrize("settings", SETTINGS[:5])
def test_each_token_has_attention_that_sums_to_one_and_does_not_depend_on_the_batch(settings):
    net, (source, lengths) = network(15, **settings), sources(9)
    tokens = beam_search(net, source, lengths, beam=3).tokens[:, 0]
    together = attention_weights(net, source, lengths, tokens)
    assert together.shape == (9, tokens.shape[1], source.shape[1])
    torch.testing.assert_close(together.sum(2), torch.ones_like(together[:, :, 0]))
    for i, length in enumerate(lengths.tolist()):
        assert (together[i, :, length:] == 0).all()
        alone = attention_weights(net, source[i : i + 1, :length], lengths[i : i + 1], tokens[i : i + 1])
        torch.testing.assert_close(together[i, :, :length], alone[0], atol=1e-10, rtol=0)


def test_without_attention_there_are_no_weights():
    source, lengths = sources(2)
    assert attention_weights(network(15, attention_type="none"), source, lengths, source) is None


def test_a_batch_without_sentences_has_no_translations_and_scores_of_nothing_are_zero():
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    found = beam_search(network(15), nothing, nothing[:, 0], beam=3, nbest=2)
    assert found.tokens.shape == (0, 2, 0)
    scores = TextScores()
    scores.update([], [])
    assert {name: float(value) for name, value in scores.compute().items()} == {
        "bleu": 0.0,
        "chrf": 0.0,
        "exact_match": 0.0,
    }


HYPOTHESES = [
    "i am very happy to see you here today",
    "he is a teacher",
    "",
    "they are not going to the old house anymore",
    "she is she is she is",
]
REFERENCES = [
    "i am happy to see you here",
    "he is a teacher",
    "we are lost",
    "they are not coming to the old house",
    "she is tall",
]


def counted(numbers: list[int]) -> dict[str, float]:
    scores = TextScores()
    for i in numbers:
        scores.update(HYPOTHESES[i : i + 1], REFERENCES[i : i + 1])
    return {name: float(value) for name, value in scores.compute().items()}


def test_bleu_and_chrf_are_those_of_sacrebleu():
    # sacrebleu 2.6.0: corpus_bleu(tokenize="none", smooth_method="none") and corpus_chrf() with their defaults.
    found = counted([0, 1, 2, 3, 4])
    assert found["bleu"] == pytest.approx(45.180100180492246, abs=1e-4)
    assert found["chrf"] == pytest.approx(69.64906313905716, abs=1e-4)
    assert found["exact_match"] == pytest.approx(0.2)


def test_scores_of_a_corpus_in_parts_are_those_of_sacrebleu_in_one():
    from sacrebleu.metrics import BLEU, CHRF

    references = [target for _, target in bundled_pairs()[:300]]
    generator = random.Random(1)
    hypotheses = [" ".join(word for word in text.split() if generator.random() < 0.8) for text in references]
    scores = TextScores()
    for i in range(0, 300, 64):
        scores.update(hypotheses[i : i + 64], references[i : i + 64])
    found = scores.compute()
    bleu = BLEU(tokenize="none", smooth_method="none").corpus_score(hypotheses, [references])
    assert float(found["bleu"]) == pytest.approx(bleu.score, abs=1e-4)
    assert float(found["chrf"]) == pytest.approx(CHRF().corpus_score(hypotheses, [references]).score, abs=1e-4)
    assert 20 < bleu.score < 90


def test_bleu_is_that_of_torchmetrics():
    expected = 100 * BLEUScore()(HYPOTHESES, [[reference] for reference in REFERENCES])
    assert counted([0, 1, 2, 3, 4])["bleu"] == pytest.approx(float(expected), abs=1e-4)


def counted_on_rank(world_size: int) -> dict[str, float]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return counted(list(range(dist.get_rank(), len(HYPOTHESES), world_size)))


def test_scores_are_equal_on_one_and_three_ranks_to_the_last_digit():
    assert run_ranks(counted_on_rank, 3, 3) == [counted([0, 1, 2, 3, 4])] * 3
