"""Sentence pairs in a few flat tensors, from which a batch is sliced and padded without a loop."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.translation.text import EOS, SOS, SPECIAL_TOKENS


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

    def retokenized(self, numbers: Sequence[Sequence[int]]) -> "PackedSentences":
        """The same sentences with ``numbers[i]``, such as the parts of a word, in place of i."""
        counts = torch.tensor([len(each) for each in numbers])
        flat = torch.tensor([number for each in numbers for number in each], dtype=torch.int32)
        tokens = self.tokens.long()
        widths = counts[tokens]
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), widths.cumsum(0)))
        return PackedSentences(flat[_places((counts.cumsum(0) - counts)[tokens], widths)], ends[self.offsets])

    def __getitem__(self, row: int) -> list[int]:
        return self.tokens[int(self.offsets[row]) : int(self.offsets[row + 1])].tolist()

    def gathered(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of some sentences, one after the other, and how many each has, int64 of shape (batch,)."""
        starts = self.offsets.index_select(0, rows)
        lengths = self.offsets.index_select(0, rows + 1) - starts
        return self.tokens.take(_places(starts, lengths)).long(), lengths

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Some sentences as int64 of shape (batch, time), padded with 0, and their lengths of shape (batch,)."""
        tokens, lengths = self.gathered(rows)
        # Two columns where there is none: networks drop one (the targets' last).
        columns = torch.arange(int(lengths.max()) if len(lengths) else 2)
        matrix = tokens.new_zeros(len(lengths), len(columns))
        matrix[columns < lengths.unsqueeze(1)] = tokens
        return matrix, lengths

    def counts(self, rows: Tensor, size: int) -> Tensor:
        """How often each of `size` tokens occurs in some sentences, int64 of shape (size,)."""
        return torch.bincount(self.gathered(rows)[0], minlength=size)


def _places(starts: Tensor, counts: Tensor) -> Tensor:
    """``counts[i]`` numbers from ``starts[i]`` on for each i, one after the other."""
    return torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts) + torch.arange(int(counts.sum()))


@dataclass(frozen=True)
class PackedPairs:
    """Both sides of a corpus, row by row."""

    source: PackedSentences
    target: PackedSentences

    def batch(self, rows: Tensor) -> TranslationBatch:
        """The pairs at `rows`, int64 of shape (batch,)."""
        return TranslationBatch(*self.source.padded(rows), *self.target.padded(rows), rows)


def pack(lines: Sequence[str], start: bool = False) -> tuple[PackedSentences, list[str]]:
    """Sentences as numbers of their own tokens, which are the second result; `EOS` ends each.

    Args:
        lines: normalised, none empty.
        start: put `SOS` in front of each.
    """
    numbers: defaultdict[str, int] = defaultdict(itertools.count(len(SPECIAL_TOKENS)).__next__)
    # Marks that occur in no normalised sentence, so that one pass over all tokens numbers them and finds the ends.
    numbers |= {"\x02": SOS, "\x03": EOS}
    first = ["\x02"] if start else []
    between = " ".join(["\x03", *first])
    text = f" {between} ".join(lines)
    found = list(map(numbers.__getitem__, [*first, *text.split(" "), "\x03"])) if lines else []
    tokens = torch.tensor(found, dtype=torch.int32)
    ends = (tokens == EOS).nonzero().flatten() + 1
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
    return PackedSentences(tokens, offsets), [*SPECIAL_TOKENS, *list(numbers)[2:]]
