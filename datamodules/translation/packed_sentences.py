"""Sentence pairs in a few flat tensors, from which a batch is sliced and padded without a loop."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.translation.text import EOS, SOS, SPECIAL_TOKENS

_CHUNK = 1 << 16  # Sentences whose tokens are looked at together.

__all__ = [
    "PackedPairs",
    "PackedSentences",
    "SentencePacker",
    "SpeltSentences",
    "TranslationBatch",
    "pack",
    "padding_share",
]


class TranslationBatch(NamedTuple):
    """Sentence pairs as numbers; shorter sentences are padded with 0.

    Args:
        source: int64 of shape (batch, source_time): the tokens, then EOS.
        source_lengths: int64 of shape (batch,), EOS counted.
        target: int64 of shape (batch, target_time): SOS, the tokens, EOS.
        target_lengths: int64 of shape (batch,), SOS and EOS counted.
        numbers: int64 of shape (batch,): which sentences these are, to put outputs back in order.
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor
    numbers: Tensor | None = None

    def select(self, places: Tensor) -> "TranslationBatch":
        """The sentences at these places of the batch, int64 of shape (any,)."""

        def chosen(part: Tensor) -> Tensor:
            return part[places.to(part.device, non_blocking=True)]

        return TranslationBatch(
            chosen(self.source),
            chosen(self.source_lengths),
            chosen(self.target),
            chosen(self.target_lengths),
            None if self.numbers is None else chosen(self.numbers),
        )


@dataclass(frozen=True)
class PackedSentences:
    """Concatenated sentences.

    Args:
        tokens: int32 of shape (all tokens,).
        offsets: int64 of shape (sentences + 1,): where each begins, and the last one's end.
    """

    tokens: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def spelt(self, numbers: Sequence[Sequence[int]]) -> "SpeltSentences":
        """The same sentences with ``numbers[i]`` in place of i.

        Example:
            >>> packed = PackedSentences(torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 3]))
            >>> packed.spelt([[7], [8, 9]]).padded(torch.tensor([0, 1]))
            (tensor([[8, 9, 7],
                    [8, 9, 0]]), tensor([3, 2]))
        """
        counts = torch.tensor([len(each) for each in numbers])
        flat = torch.tensor([number for each in numbers for number in each], dtype=torch.int64)
        if bool((counts == 1).all()):
            return SpeltSentences(self, flat, counts.cumsum(0) - counts, counts, self.lengths)
        lengths = [torch.zeros(0, dtype=torch.int64)]
        for start in range(0, len(self), _CHUNK):
            offsets = self.offsets[start : start + _CHUNK + 1]
            widths = counts[self.tokens[int(offsets[0]) : int(offsets[-1])].long()]
            ends = torch.cat((torch.zeros(1, dtype=torch.int64), widths.cumsum(0)))
            lengths.append(ends[offsets - offsets[0]].diff())
        return SpeltSentences(self, flat, counts.cumsum(0) - counts, counts, torch.cat(lengths))

    def __getitem__(self, row: int) -> list[int]:
        return self.tokens[int(self.offsets[row]) : int(self.offsets[row + 1])].tolist()

    def gathered(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of some sentences, one after the other, and how many each has, int64 of shape (batch,)."""
        starts = self.offsets.index_select(0, rows)
        lengths = self.offsets.index_select(0, rows + 1) - starts
        return self.tokens.take(_places(starts, lengths)).long(), lengths

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Some sentences as int64 of shape (batch, time), padded with 0, and their lengths of shape (batch,)."""
        return _padded(*self.gathered(rows))

    def counts(self, rows: Tensor, size: int) -> Tensor:
        """How often each of `size` tokens occurs in some sentences, int64 of shape (size,)."""
        found = torch.zeros(size, dtype=torch.int64)
        for some in rows.split(_CHUNK):
            found += torch.bincount(self.gathered(some)[0], minlength=size)
        return found


def _places(starts: Tensor, counts: Tensor) -> Tensor:
    """``counts[i]`` numbers from ``starts[i]`` on for each i, one after the other."""
    return torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts) + torch.arange(int(counts.sum()))


def _padded(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Sentences that stand one after the other as rows of a matrix, padded with 0."""
    # Two columns where there is none: networks drop one (the targets' last).
    columns = torch.arange(int(lengths.max()) if len(lengths) else 2)
    matrix = tokens.new_zeros(len(lengths), len(columns))
    matrix[columns < lengths.unsqueeze(1)] = tokens
    return matrix, lengths


@dataclass(frozen=True)
class SpeltSentences:
    """Packed sentences whose tokens stand for one or more numbers each, such as a word for its parts.

    The numbers are looked up for each batch, so that the tokens may be a file in memory that processes share.

    Args:
        packed: the sentences.
        flat: the numbers of all tokens, int64.
        first, counts: where those of each token begin in `flat`, and how many they are, int64 of shape (tokens,).
        lengths: numbers of each sentence, int64 of shape (sentences,).
    """

    packed: PackedSentences
    flat: Tensor
    first: Tensor
    counts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.packed)

    def _spell(self, tokens: Tensor) -> Tensor:
        return self.flat.take(_places(self.first[tokens], self.counts[tokens]))

    def __getitem__(self, row: int) -> list[int]:
        return self._spell(torch.tensor(self.packed[row])).tolist()

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As of `PackedSentences`."""
        return _padded(self._spell(self.packed.gathered(rows)[0]), self.lengths[rows])


@dataclass(frozen=True)
class PackedPairs:
    """Both sides of a corpus, row by row.

    Example:
        >>> side = PackedSentences(torch.tensor([4, 2, 5, 6, 2], dtype=torch.int32), torch.tensor([0, 2, 5]))
        >>> PackedPairs(side, side).batch(torch.tensor([1, 0])).source.tolist()
        [[5, 6, 2], [4, 2, 0]]
    """

    source: PackedSentences | SpeltSentences
    target: PackedSentences | SpeltSentences

    def batch(self, rows: Tensor) -> TranslationBatch:
        """The pairs at `rows`, int64 of shape (batch,)."""
        return TranslationBatch(*self.source.padded(rows), *self.target.padded(rows), rows)


class SentencePacker:
    """Turns sentences into numbers of their own tokens, piece by piece: what it keeps of them is their numbers.

    Args:
        start: put `SOS` in front of each sentence.
    """

    def __init__(self, start: bool = False) -> None:
        # Marks that occur in no normalised sentence, so that one pass over all tokens numbers them and finds the ends.
        self._start = ["\x02"] if start else []
        self._between = " ".join(["\x03", *self._start])
        self._numbers: defaultdict[str, int] = defaultdict(itertools.count(len(SPECIAL_TOKENS)).__next__)
        self._numbers |= {"\x02": SOS, "\x03": EOS}
        self._pieces: list[Tensor] = []

    def add(self, lines: Sequence[str]) -> None:
        """Take normalised sentences, none empty."""
        if lines:
            tokens = [*self._start, *f" {self._between} ".join(lines).split(" "), "\x03"]
            self._pieces.append(torch.tensor(list(map(self._numbers.__getitem__, tokens)), dtype=torch.int32))

    def packed(self) -> tuple[PackedSentences, list[str]]:
        """All sentences that were added, and the tokens by number."""
        tokens = torch.cat(self._pieces) if self._pieces else torch.zeros(0, dtype=torch.int32)
        ends = (tokens == EOS).nonzero().flatten() + 1
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
        return PackedSentences(tokens, offsets), [*SPECIAL_TOKENS, *list(self._numbers)[2:]]


def pack(lines: Sequence[str], start: bool = False) -> tuple[PackedSentences, list[str]]:
    """Sentences as numbers of their own tokens, which are the second result; `EOS` ends each.

    Args:
        lines: normalised, none empty.
        start: put `SOS` in front of each.

    Example:
        >>> sentences, tokens = pack(["le chat", "le chien"])
        >>> sentences.tokens.tolist(), tokens[4:]
        ([4, 5, 2, 4, 6, 2], ['le', 'chat', 'chien'])
    """
    packer = SentencePacker(start)
    packer.add(lines)
    return packer.packed()


def padding_share(pairs: PackedPairs, order: Tensor, starts: list[int]) -> float:
    """The share of padding in the batches that begin at `starts` of an order, both sides together."""
    tokens, places = 0, 0
    sizes = np.diff([*starts, len(order)])
    for side in (pairs.source, pairs.target):
        lengths = side.lengths[order].numpy()
        tokens += int(lengths.sum())
        places += int((np.maximum.reduceat(lengths, starts) * sizes).sum())
    return 1 - tokens / places
