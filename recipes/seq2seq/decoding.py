"""Beam search over whole batches; a beam of one is greedy search.

Rows are hypotheses, of all sentences together. A hypothesis that says EOS gives up its row and its place in the beam,
so that the work shrinks with every end, and a sentence whose last place is gone costs nothing more.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.translation.text import EOS, PAD, SOS
from recipes.seq2seq.network import Seq2SeqNet

__all__ = ["Translations", "attention_weights", "beam_search", "length_limits", "length_penalty"]


class Translations(NamedTuple):
    """The best translations of each sentence, the likeliest first.

    Args:
        words: int64 of shape (batch, nbest, time): words, EOS, padding.
        scores: log-probability over length penalty, of shape (batch, nbest); -inf where there is no such translation.
    """

    words: Tensor
    scores: Tensor


def length_penalty(lengths: Tensor, alpha: float) -> Tensor:
    """What a log-probability is divided by (Wu et al., 2016, equation 14), so that length alone does no harm.

    Args:
        lengths: words said, EOS counted.
        alpha: 0 leaves log-probabilities as they are, 1 is nearly a mean over the words.
    """
    return ((5 + lengths) / 6) ** alpha


def length_limits(source_lengths: Tensor) -> Tensor:
    """Words that a translation may have, EOS counted: a function of its own source, not of its neighbours."""
    return 2 * source_lengths + 10


def _log_probabilities(network: Seq2SeqNet, readouts: Tensor, last: Tensor) -> Tensor:
    """Of the next word: never PAD or SOS, and nothing but EOS where `last` is True. Shape (rows, words)."""
    logits = network.output(readouts)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits[:, [PAD, SOS]] = -torch.inf
    log_probabilities = logits.log_softmax(1)
    log_probabilities[:, :EOS].masked_fill_(last.unsqueeze(1), -torch.inf)
    log_probabilities[:, EOS + 1 :].masked_fill_(last.unsqueeze(1), -torch.inf)
    return log_probabilities


@torch.no_grad()
def beam_search(
    network: Seq2SeqNet,
    source: Tensor,
    lengths: Tensor,
    beam: int = 5,
    nbest: int = 1,
    alpha: float = 0.6,
    limits: Tensor | None = None,
) -> Translations:
    """Translate a batch; the network has to be in evaluation mode.

    Each step keeps the likeliest continuations of a sentence, as many as it has places; each that ends takes one away
    (as in Bahdanau et al., 2015). With a place for every possible sentence the search is exhaustive.

    Args:
        source: words of shape (batch, source), then padding.
        lengths: of shape (batch,).
        beam: places of each sentence.
        nbest: translations of each sentence, at most `beam`.
        alpha: of `length_penalty`, which ranks the finished translations.
        limits: words that each may have, EOS counted, of shape (batch,).
    """
    device, batch = source.device, len(source)
    limits = (length_limits(lengths) if limits is None else limits).to(device)
    if not batch:
        return Translations(source.new_zeros(0, nbest, 0), torch.zeros(0, nbest, device=device))
    longest = int(limits.max())
    encoded, state = network.encode(source, lengths)
    dtype = torch.promote_types(encoded.memory.dtype, torch.float32)
    places = torch.full((batch,), beam, device=device)
    done = torch.zeros(batch, dtype=torch.int64, device=device)
    finished = torch.full((batch, beam, longest), PAD, device=device)
    scores = torch.full((batch, beam), -torch.inf, dtype=dtype, device=device)
    # Of each row: its sentence, its place in the beam, its log-probability, its last word, and all that it said.
    sentence, place = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
    total = torch.zeros(batch, dtype=dtype, device=device)
    words = torch.full((batch,), SOS, device=device)
    said = torch.full((batch, longest), PAD, device=device)
    here = encoded
    for time in range(longest):
        readouts, state, _ = network.step(words, state, here)
        log_probabilities = _log_probabilities(network, readouts, last=limits[sentence] == time + 1)
        # The best of a sentence are among the best of its rows.
        values, choices = (total.unsqueeze(1) + log_probabilities).topk(min(beam, log_probabilities.shape[1]))
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
        said_by = said[parents[of, rank]]
        said_by[:, time] = EOS
        finished[of, slot] = said_by
        scores[of, slot] = values[of, rank] / length_penalty(torch.tensor(time + 1), alpha)
        done, places = done + ends.sum(1), places - ends.sum(1)

        sentence, place = (valid & ~ends).nonzero(as_tuple=True)
        if len(sentence) == 0:
            break
        rows = parents[sentence, place]
        total, words, said, state = values[sentence, place], chosen[sentence, place], said[rows], state.select(rows)
        said[:, time] = words
        here = encoded.select(sentence)
    scores, order = scores.topk(nbest)
    time = int((finished != PAD).sum(2).max())
    at = torch.arange(batch, device=device).unsqueeze(1)
    return Translations(finished[at, order, :time], scores)


@torch.no_grad()
def attention_weights(network: Seq2SeqNet, source: Tensor, lengths: Tensor, words: Tensor) -> Tensor:
    """What each word of a translation looked at; the network has to be in evaluation mode.

    A search that kept this for all it tries would take gigabytes beside one long sentence.

    Args:
        source: words of shape (batch, source), then padding.
        lengths: of shape (batch,).
        words: the translation, of shape (batch, time).

    Returns:
        Weights of shape (batch, time, source).
    """
    encoded, state = network.encode(source, lengths)
    given = torch.cat((torch.full_like(words[:, :1], SOS), words[:, :-1]), 1)
    seen = []
    for column in given.unbind(1):
        _, state, weights = network.step(column, state, encoded)
        seen.append(weights)
    return torch.stack(seen, 1)
