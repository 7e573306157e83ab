"""Beam search over whole batches; a beam of one is greedy search.

Rows are hypotheses, of all sentences together. A hypothesis that ends with EOS frees its row and its place in the beam,
so that the work shrinks as hypotheses end, and a sentence whose last hypothesis has ended takes no more work.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.packed_sentences import TranslationBatch
from datamodules.translation.subwords import AnyVocabulary
from datamodules.translation.text import EOS, PAD, SOS, SPECIAL_TOKENS, UNK
from recipes.seq2seq.network import TranslationNetwork

Vocabularies = tuple[AnyVocabulary, AnyVocabulary]
"""Of the source and of the target."""

NEVER = PAD, SOS, UNK
"""Tokens that no translation has."""


class Translations(NamedTuple):
    """The best translations of each sentence, the likeliest first.

    Args:
        tokens: int64 of shape (batch, nbest, time): tokens, EOS, padding.
        scores: log-probability over length penalty, of shape (batch, nbest); -inf where there is no such translation.
    """

    tokens: Tensor
    scores: Tensor


def length_penalty(lengths: Tensor, alpha: float) -> Tensor:
    """What a log-probability is divided by (Wu et al., 2016, equation 14), so that longer translations are not worse.

    Args:
        lengths: tokens of the translations, EOS counted.
        alpha: 0 leaves log-probabilities as they are, 1 is nearly a mean over the tokens.
    """
    return ((5 + lengths) / 6) ** alpha


def length_limits(source_lengths: Tensor) -> Tensor:
    """Tokens that a translation may have, EOS counted: a function of its own source, not of the rest of the batch."""
    return 2 * source_lengths + 10


def _likeliest(network: TranslationNetwork, readouts: Tensor, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest next tokens of each row, none of `NEVER`, and nothing but EOS where `last` is True.

    Returns:
        Log-probabilities and tokens, of shape (rows, count).
    """
    logits = network.logits(readouts)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for token in NEVER:  # Not by a list, which is an index that the device would wait for.
        logits[:, token] = -torch.inf
    log_probabilities = logits.log_softmax(1)
    values, tokens = log_probabilities.topk(min(count, logits.shape[1]))
    ends = torch.full_like(values, -torch.inf)
    ends[:, 0] = log_probabilities[:, EOS]
    last = last.unsqueeze(1)
    return torch.where(last, ends, values), tokens.masked_fill(last, EOS)


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
    """Translate a batch; the network has to be in evaluation mode.

    Each step keeps the likeliest continuations of a sentence, as many as it has places; each that ends takes one place
    away (as in Bahdanau et al., 2015). With a place for every possible sentence the search is exhaustive.

    Args:
        source: tokens of shape (batch, source), then padding.
        lengths: of shape (batch,).
        beam: places of each sentence.
        nbest: translations of each sentence, at most `beam`.
        alpha: of `length_penalty`, which ranks the finished translations.
        limits: tokens that each translation may have, EOS counted, of shape (batch,).
    """
    device, batch = source.device, len(source)
    limits = length_limits(lengths) if limits is None else limits
    if not batch:
        return Translations(source.new_zeros(0, nbest, 0), torch.zeros(0, nbest, device=device))
    longest = int(limits.max())  # Lengths lie on the CPU, where reading them waits for nothing.
    limits = limits.to(device, non_blocking=True)
    encoded, state = network.encode(source, lengths)
    dtype = torch.promote_types(encoded.memory.dtype, torch.float32)
    places = torch.full((batch,), beam, device=device)
    done = torch.zeros(batch, dtype=torch.int64, device=device)
    finished = torch.full((batch, beam, longest), PAD, device=device)
    scores = torch.full((batch, beam), -torch.inf, dtype=dtype, device=device)
    # Of each row: its sentence, its place in the beam, its log-probability, its last token, and all its tokens.
    sentence, place = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
    total = torch.zeros(batch, dtype=dtype, device=device)
    tokens = torch.full((batch,), SOS, device=device)
    hypotheses = torch.full((batch, longest), PAD, device=device)
    rows_encoded = encoded
    for time in range(longest):
        readouts, state = network.step(tokens, state, rows_encoded)
        # The best of a sentence are among the best of its rows.
        values, choices = _likeliest(network, readouts, limits[sentence] == time + 1, beam)
        values = total.unsqueeze(1) + values
        table = values.new_full((batch, beam, values.shape[1]), -torch.inf)
        table[sentence, place] = values
        values, best = table.flatten(1).topk(beam)
        row_of = torch.zeros(batch, beam, dtype=torch.int64, device=device)
        row_of[sentence, place] = torch.arange(len(sentence), device=device)
        parents = row_of.gather(1, best // table.shape[2])
        chosen = choices[parents, best % table.shape[2]]
        valid = (values > -torch.inf) & (torch.arange(beam, device=device) < places.unsqueeze(1))
        ends = valid & (chosen == EOS)

        of, rank = ends.nonzero(as_tuple=True)
        slot = (done.unsqueeze(1) + ends.cumsum(1) - 1)[of, rank]
        ended = hypotheses[parents[of, rank]]
        ended[:, time] = EOS
        finished[of, slot] = ended
        scores[of, slot] = values[of, rank] / length_penalty(torch.tensor(time + 1), alpha)
        done, places = done + ends.sum(1), places - ends.sum(1)

        before = sentence
        sentence, place = (valid & ~ends).nonzero(as_tuple=True)
        if len(sentence) == 0:
            break
        rows = parents[sentence, place]
        total, tokens = values[sentence, place], chosen[sentence, place]
        hypotheses, state = hypotheses[rows], network.select(state, rows)
        hypotheses[:, time] = tokens
        if not torch.equal(sentence, before):
            rows_encoded = encoded.select(sentence)
    scores, order = scores.topk(nbest)
    time = int((finished != PAD).sum(2).max())
    at = torch.arange(batch, device=device).unsqueeze(1)
    return Translations(finished[at, order, :time], scores)


def sentences_of(batch: TranslationBatch, vocabularies: Vocabularies, data: Any) -> tuple[list[str], list[str]]:
    """The sources and the references of a batch as text, with unknown words where the data module has them."""
    if batch.numbers is not None and isinstance(data, TranslationDataModule):
        return data.source_sentences(batch.numbers), data.target_sentences(batch.numbers)
    sides = zip(vocabularies, (batch.source, batch.target), strict=True)
    sources, references = ([vocabulary.decode(row) for row in side.tolist()] for vocabulary, side in sides)
    # No translation matches a word outside the vocabulary, not even one with <unk>.
    return sources, [text.replace(SPECIAL_TOKENS[UNK], "\ufffd") for text in references]
