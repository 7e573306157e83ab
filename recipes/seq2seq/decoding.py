"""Translation of whole batches by beam search; a beam of one is greedy search.

A row is a hypothesis; the rows of all sentences form one batch. A hypothesis that ends with EOS frees its row and its
place in the beam. So the work shrinks as hypotheses end, and a finished sentence costs nothing.

Tested in `tests/recipes/seq2seq/test_network.py`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.loaders import TranslationBatch
from datamodules.translation.text import EOS, PAD, SOS, SPECIAL_TOKENS, UNK, AnyVocabulary

from .network import TranslationNetwork

Vocabularies = tuple[AnyVocabulary, AnyVocabulary]
"""The vocabularies of source and target."""

NEVER = PAD, SOS, UNK
"""Tokens that are never in a translation."""


class Translations(NamedTuple):
    """The best translations of each sentence, the most probable first.

    Args:
        tokens: int64 of shape (batch, nbest, time): tokens, EOS, padding.
        scores: log-probability divided by the length penalty, of shape (batch, nbest); -inf without a translation.
    """

    tokens: Tensor
    scores: Tensor


def length_penalty(lengths: Tensor, alpha: float) -> Tensor:
    """Return the divisor of a log-probability that compensates for the length of a translation (Wu et al., 2016, eq.
    14).

    Args:
        lengths: tokens of the translations, EOS included.
        alpha: exponent; 0 leaves log-probabilities unchanged, 1 is nearly a mean over the tokens.
    """
    return ((5 + lengths) / 6) ** alpha


def length_limits(source_lengths: Tensor) -> Tensor:
    """Return the maximum length of each translation, EOS included; it depends on the source sentence only."""
    return 2 * source_lengths + 10


def _likeliest(network: TranslationNetwork, readouts: Tensor, is_last: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the most probable next tokens of each row without `NEVER`, and only EOS for rows with `is_last`.

    Returns:
        Log-probabilities and tokens, of shape (rows, count).
    """
    logits = network.logits(readouts)
    # float32 at least: bf16 has too few digits for a softmax.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # One by one: indexing with a list would copy the list to the device, and wait.
    for token in NEVER:
        logits[:, token] = -torch.inf
    log_probabilities = logits.log_softmax(1)
    values, tokens = log_probabilities.topk(min(count, logits.shape[1]))
    ends = torch.full_like(values, -torch.inf)
    ends[:, 0] = log_probabilities[:, EOS]
    is_last = is_last.unsqueeze(1)
    return torch.where(is_last, ends, values), tokens.masked_fill(is_last, EOS)


@torch.no_grad()
def beam_search(
    network: TranslationNetwork,
    source: Tensor,
    lengths: Tensor,
    beam: int = 5,
    nbest: int = 1,
    alpha: float = 0.6,
    limits: Tensor | None = None,
) -> Translations:
    """Translate a batch; the network must be in evaluation mode.

    The search runs in the type of the weights, without autocast. In bf16, rounding depends on the shape of the batch
    and may swap two probable tokens, so a translation would depend on the other sentences in its batch.

    Each step keeps the most probable continuations of a sentence, one for each of its places in the beam. A
    continuation that ends removes one place (as in Bahdanau et al., 2015). With a place for every possible sentence,
    the search is exhaustive.

    Args:
        network: the translation network.
        source: tokens, then padding, of shape (batch, source).
        lengths: tokens of each sentence, of shape (batch,).
        beam: places in the beam of each sentence.
        nbest: translations to return for each sentence, at most `beam`.
        alpha: the exponent of `length_penalty`, which ranks the finished translations.
        limits: maximum length of each translation, EOS included, of shape (batch,).
    """
    limits = length_limits(lengths) if limits is None else limits
    with torch.autocast(source.device.type, enabled=False):
        return _search(network, source, lengths, beam, nbest, alpha, limits)


def _search(
    network: TranslationNetwork,
    source: Tensor,
    lengths: Tensor,
    beam: int,
    nbest: int,
    alpha: float,
    limits: Tensor,
) -> Translations:
    device = source.device
    batch = len(source)
    if not batch:
        return Translations(source.new_zeros(0, nbest, 0), torch.zeros(0, nbest, device=device))
    longest = int(limits.max())  # Lengths are on the CPU, so reading them does not wait for the device.
    limits = limits.to(device, non_blocking=True)
    encoded, state = network.encode(source, lengths)
    dtype = torch.promote_types(encoded.memory.dtype, torch.float32)
    places = torch.full((batch,), beam, device=device)
    finished_count = torch.zeros(batch, dtype=torch.int64, device=device)
    finished = torch.full((batch, beam, longest), PAD, device=device)
    scores = torch.full((batch, beam), -torch.inf, dtype=dtype, device=device)
    # For each row: its sentence, its place in the beam, its log-probability, its last token, and all its tokens.
    sentence = torch.arange(batch, device=device)
    place_in_beam = torch.zeros(batch, dtype=torch.int64, device=device)
    total = torch.zeros(batch, dtype=dtype, device=device)
    tokens = torch.full((batch,), SOS, device=device)
    hypotheses = torch.full((batch, longest), PAD, device=device)
    rows_encoded = encoded
    for time in range(longest):
        readouts, state = network.step(tokens, state, rows_encoded)
        # `beam` choices of each row suffice: the best continuations of a sentence are among the best of its rows.
        values, choices = _likeliest(network, readouts, limits[sentence] == time + 1, beam)
        values = total.unsqueeze(1) + values
        table = values.new_full((batch, beam, values.shape[1]), -torch.inf)
        table[sentence, place_in_beam] = values
        values, best = table.flatten(1).topk(beam)
        row_of = torch.zeros(batch, beam, dtype=torch.int64, device=device)
        row_of[sentence, place_in_beam] = torch.arange(len(sentence), device=device)
        parents = row_of.gather(1, best // table.shape[2])
        chosen = choices[parents, best % table.shape[2]]
        valid = (values > -torch.inf) & (torch.arange(beam, device=device) < places.unsqueeze(1))
        ends = valid & (chosen == EOS)

        ended_sentence, rank = ends.nonzero(as_tuple=True)
        slot = (finished_count.unsqueeze(1) + ends.cumsum(1) - 1)[ended_sentence, rank]
        ended = hypotheses[parents[ended_sentence, rank]]
        ended[:, time] = EOS
        finished[ended_sentence, slot] = ended
        scores[ended_sentence, slot] = values[ended_sentence, rank] / length_penalty(torch.tensor(time + 1), alpha)
        finished_count = finished_count + ends.sum(1)
        places = places - ends.sum(1)

        sentence_before = sentence
        sentence, place_in_beam = (valid & ~ends).nonzero(as_tuple=True)
        if len(sentence) == 0:
            break
        rows = parents[sentence, place_in_beam]
        total = values[sentence, place_in_beam]
        tokens = chosen[sentence, place_in_beam]
        hypotheses = hypotheses[rows]
        state = network.select(state, rows)
        hypotheses[:, time] = tokens
        # Copied only if the rows belong to different sentences than before.
        if not torch.equal(sentence, sentence_before):
            rows_encoded = encoded.select(sentence)
    scores, order = scores.topk(nbest)
    time = int((finished != PAD).sum(2).max())
    at = torch.arange(batch, device=device).unsqueeze(1)
    return Translations(finished[at, order, :time], scores)


def sentences_of(batch: TranslationBatch, vocabularies: Vocabularies, data: Any) -> tuple[list[str], list[str]]:
    """Return the sources and the references of a batch as text, with the data module's words outside the vocabulary."""
    if batch.numbers is not None and isinstance(data, TranslationDataModule):
        return data.source_sentences(batch.numbers), data.target_sentences(batch.numbers)
    sides = zip(vocabularies, (batch.source, batch.target), strict=True)
    sources, references = ([vocabulary.decode(row) for row in side.tolist()] for vocabulary, side in sides)
    # Unknown words of a reference must match no translation, not even one that contains the text <unk>.
    return sources, [text.replace(SPECIAL_TOKENS[UNK], "\ufffd") for text in references]
