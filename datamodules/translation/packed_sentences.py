"""Stores sentence pairs in flat tensors, from which a padded batch is built without a loop over sentences."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.translation.text import EOS, SOS, SPECIAL_TOKENS


class TranslationBatch(NamedTuple):
    """Batch of sentence pairs as token numbers. Shorter sentences are padded with 0.

    Args:
        source: tokens and EOS of each source, int64 of shape (batch, source_time).
        source_lengths: lengths with EOS, int64 of shape (batch,).
        target: SOS, tokens and EOS of each target, int64 of shape (batch, target_time).
        target_lengths: lengths with SOS and EOS, int64 of shape (batch,).
        numbers: numbers of the pairs, int64 of shape (batch,), to restore the order of the outputs.
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor
    numbers: Tensor | None = None

    def select(self, indices: Tensor) -> "TranslationBatch":
        """Return the pairs at `indices` of the batch, int64 of shape (n,)."""

        def take(values: Tensor) -> Tensor:
            # Lengths and numbers stay on the CPU when the tokens move to a GPU.
            return values[indices.to(values.device, non_blocking=True)]

        return TranslationBatch(
            take(self.source),
            take(self.source_lengths),
            take(self.target),
            take(self.target_lengths),
            None if self.numbers is None else take(self.numbers),
        )


@dataclass(frozen=True)
class PackedSentences:
    """Sentences, concatenated in one tensor.

    Args:
        tokens: token numbers of all sentences, int32 of shape (tokens,).
        offsets: start of each sentence and end of the last one, int64 of shape (sentences + 1,).
    """

    tokens: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def retokenized(self, numbers: Sequence[Sequence[int]]) -> "PackedSentences":
        """Return the sentences with each token i replaced by ``numbers[i]``, such as the subwords of a word."""
        counts = torch.tensor([len(replacement) for replacement in numbers])
        flat = torch.tensor([number for replacement in numbers for number in replacement], dtype=torch.int32)
        starts = counts.cumsum(0) - counts
        tokens = self.tokens.long()
        widths = counts[tokens]
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), widths.cumsum(0)))
        return PackedSentences(flat[_ranges(starts[tokens], widths)], ends[self.offsets])

    def __getitem__(self, row: int) -> list[int]:
        return self.tokens[int(self.offsets[row]) : int(self.offsets[row + 1])].tolist()

    def gathered(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the concatenated tokens of some sentences, and the length of each, int64 of shape (batch,)."""
        starts = self.offsets.index_select(0, rows)
        lengths = self.offsets.index_select(0, rows + 1) - starts
        return self.tokens.take(_ranges(starts, lengths)).long(), lengths

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return sentences as int64 of shape (batch, time), padded with 0, and their lengths of shape (batch,)."""
        tokens, lengths = self.gathered(rows)
        # An empty batch has two columns, since networks drop one of the targets' columns and expect another.
        columns = torch.arange(int(lengths.max()) if len(lengths) else 2)
        matrix = tokens.new_zeros(len(lengths), len(columns))
        matrix[columns < lengths.unsqueeze(1)] = tokens
        return matrix, lengths

    def counts(self, rows: Tensor, size: int) -> Tensor:
        """Count the occurrences of each of `size` tokens in some sentences, int64 of shape (size,)."""
        return torch.bincount(self.gathered(rows)[0], minlength=size)


def _ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Concatenate the ranges ``starts[i], ..., starts[i] + counts[i] - 1`` of all i."""
    positions = torch.arange(int(counts.sum()))
    offsets = starts - (counts.cumsum(0) - counts)
    return torch.repeat_interleave(offsets, counts) + positions


@dataclass(frozen=True)
class PackedPairs:
    """Source and target sentences of a corpus, row by row."""

    source: PackedSentences
    target: PackedSentences

    def batch(self, rows: Tensor) -> TranslationBatch:
        """Return the batch of the pairs at `rows`, int64 of shape (batch,)."""
        return TranslationBatch(*self.source.padded(rows), *self.target.padded(rows), rows)


def pack(lines: Sequence[str], start: bool = False) -> tuple[PackedSentences, list[str]]:
    """Number the tokens of sentences, and return the packed sentences, each with `EOS`, and the list of tokens.

    Args:
        lines: normalised sentences, none empty.
        start: whether to put `SOS` in front of each sentence.
    """
    numbers: defaultdict[str, int] = defaultdict(itertools.count(len(SPECIAL_TOKENS)).__next__)
    # Control characters, which no normalised sentence contains, stand for SOS and EOS. One pass over all tokens then
    # numbers them and finds the ends.
    numbers |= {"\x02": SOS, "\x03": EOS}
    beginning = ["\x02"] if start else []
    separator = " ".join(["\x03", *beginning])
    token_numbers: list[int] = []
    if lines:
        words = f" {separator} ".join(lines).split(" ")
        token_numbers = list(map(numbers.__getitem__, [*beginning, *words, "\x03"]))
    tokens = torch.tensor(token_numbers, dtype=torch.int32)
    ends = (tokens == EOS).nonzero().flatten() + 1
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
    return PackedSentences(tokens, offsets), [*SPECIAL_TOKENS, *list(numbers)[2:]]
