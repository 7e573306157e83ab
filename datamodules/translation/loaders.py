"""Sentence pairs in flat tensors, and loaders of padded batches of sentences of similar length.

The order of the batches does not depend on the number of ranks. A batch is built without a loop over sentences.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError, spelled
from datamodules.loading.loaders import NumberedEvaluation, ResumableLoader, Spans, fingerprint
from datamodules.loading.randomness import permutation
from datamodules.loading.sampling import epoch_order
from datamodules.translation.text import EOS, SOS, SPECIAL_TOKENS


class TranslationBatch(NamedTuple):
    """Batch of sentence pairs as token numbers, padded with 0.

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
            # Lengths and numbers are on the CPU even if the tokens are on a GPU.
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
    """Sentences concatenated in one tensor.

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
        """Return the concatenated tokens of the sentences at `rows`, and their lengths, int64 of shape (batch,)."""
        starts = self.offsets.index_select(0, rows)
        lengths = self.offsets.index_select(0, rows + 1) - starts
        return self.tokens.take(_ranges(starts, lengths)).long(), lengths

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sentences at `rows`, int64 of shape (batch, time) padded with 0, and their lengths (batch,)."""
        tokens, lengths = self.gathered(rows)
        # An empty batch has two columns: networks drop one column of the targets, and need at least one more.
        columns = torch.arange(int(lengths.max()) if len(lengths) else 2)
        matrix = tokens.new_zeros(len(lengths), len(columns))
        matrix[columns < lengths.unsqueeze(1)] = tokens
        return matrix, lengths

    def counts(self, rows: Tensor, size: int) -> Tensor:
        """Count each of `size` tokens in the sentences at `rows`, int64 of shape (size,)."""
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
    """Number the tokens of sentences, and return the packed sentences with `EOS`, and the list of tokens.

    Args:
        lines: normalized sentences, not empty.
        start: whether to insert `SOS` before each sentence.
    """
    numbers: defaultdict[str, int] = defaultdict(itertools.count(len(SPECIAL_TOKENS)).__next__)
    # Control characters, which no normalized sentence contains, represent SOS and EOS, so that one pass numbers all
    # tokens and finds the ends.
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


_ORDINARY_LENGTH = 128
"""Length in tokens up to which an evaluation computes `batch_size` sentences in one forward pass."""

_POOL = 8
"""Number of updates per pool of sentences that are sorted by length."""


def sort_by_length(source_lengths: Tensor, target_lengths: Tensor, order: Tensor) -> Tensor:
    """Sort `order` by source length, then by target length. Sentences of equal lengths keep their order."""
    key = source_lengths * (int(target_lengths.max()) + 1) + target_lengths
    return order[torch.argsort(key[order], stable=True)]


def sort_pools(source_lengths: Tensor, target_lengths: Tensor, order: Tensor, size: int) -> Tensor:
    """Sort each pool of `size` successive entries of `order` stably by the longer side, then by the sum."""
    sources = source_lengths[order]
    targets = target_lengths[order]
    sums = sources + targets
    pool = torch.arange(len(order)) // size
    # One integer key for (pool, longer side, sum), because argsort sorts by one key.
    base = int(sums.max()) + 1 if len(order) else 1
    key = (pool * base + torch.maximum(sources, targets)) * base + sums
    return order[torch.argsort(key, stable=True)]


def shuffle_units(n: int, unit: int, seed: int, epoch: int) -> Tensor:
    """Return the numbers 0..n-1 in units of `unit` successive numbers, in random order, int64 of shape (n,).

    The remaining short unit comes last, because updates are counted from the start of the epoch. Its numbers come from
    a random position: at the end of a sort by length it would always have the longest sentences.
    """
    num_units, num_rest = divmod(n, unit)
    begin = int(permutation(num_units + 1, seed, "short unit", epoch)[0]) * unit
    numbers = torch.arange(n)
    short_unit = numbers[begin : begin + num_rest]
    units = torch.cat((numbers[:begin], numbers[begin + num_rest :])).view(num_units, unit)
    units = units[permutation(num_units, seed, "units", epoch)]
    return torch.cat((units.flatten(), short_unit))


def cut_by_tokens(source_lengths: Tensor, target_lengths: Tensor, max_tokens: int) -> Tensor:
    """Cut sentences that are sorted by length into batches, and return the bounds, int64 of shape (batches + 1,).

    A batch has as many sentences as fit with padding: sentences * (longest source + longest target) <= `max_tokens`.

    Raises:
        UserError: a single pair has more than `max_tokens` tokens.
    """
    longest = int((source_lengths + target_lengths).max())
    if longest > max_tokens:
        raise UserError(
            f"{spelled('max_tokens', max_tokens)} is less than the longest pair of sentences has, {longest} tokens with"
            f" their marks; pass {spelled('max_tokens', longest)} or more, or leave long sentences out with"
            f" {spelled('max_length')}"
        )
    bounds = [0]
    first = 0
    source_width = 0
    target_width = 0
    for position, (source, target) in enumerate(zip(source_lengths.tolist(), target_lengths.tolist())):
        source_width = max(source_width, source)
        target_width = max(target_width, target)
        if (position + 1 - first) * (source_width + target_width) > max_tokens:
            bounds.append(position)
            first = position
            source_width = source
            target_width = target
    return torch.tensor([*bounds, len(source_lengths)])


class SentenceTrainLoader(ResumableLoader[TranslationBatch]):
    """Loader of shuffled batches of similar lengths, in one order for any number of ranks, resumable at any update.

    An epoch is shuffled and cut into pools of 8 updates. Each pool is sorted by length and cut into units: the
    sentences of one update. The units are shuffled. Micro-batches are consecutive slices of a unit. The order is a
    function of (seed, epoch, sentences per update).

    With `max_tokens` the whole epoch is sorted and cut into micro-batches of that size, and a unit is the micro-batches
    of an update. The bounds are the same in every epoch, so the number of updates never changes.

    Args:
        pairs: all sentence pairs.
        rows: numbers of the pairs to train on, int64 of shape (n,).
        batch_size: sentences of a micro-batch.
        seed: seed of the shuffle order.
        max_tokens: tokens of a micro-batch, both sides and padding counted; replaces `batch_size`.
        shuffle: whether to shuffle; False repeats the order of the first epoch.

    Raises:
        UserError: the set is empty, or a pair does not fit into `max_tokens`.
    """

    def __init__(
        self,
        pairs: PackedPairs,
        rows: Tensor,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        max_tokens: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if not len(rows):
            raise UserError("there is no sentence to train on: the training set is empty")
        self.pairs = pairs
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self._source_lengths = pairs.source.lengths[rows]
        self._target_lengths = pairs.target.lengths[rows]
        self._bounds: Tensor | None = None
        # An item is a sentence, or with `max_tokens` a micro-batch with a varying number of sentences.
        items = len(rows)
        items_per_micro_batch = batch_size
        if max_tokens:
            # The bounds are a function of the sorted lengths, which are the same in every epoch.
            order = sort_by_length(self._source_lengths, self._target_lengths, torch.arange(len(rows)))
            self._bounds = cut_by_tokens(self._source_lengths[order], self._target_lengths[order], max_tokens)
            items = len(self._bounds) - 1
            items_per_micro_batch = 1
            mean = (self._source_lengths + self._target_lengths).double().mean()
            batch_size = max(1, int(max_tokens / mean))
        self.batch_size = batch_size
        """Sentences of a micro-batch; with `max_tokens` the mean number."""
        super().__init__(items, items_per_micro_batch, rank, world_size)
        self._unit = 0
        self._last_plan: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None

    @override
    def items_of_samples(self, samples: int) -> int:
        if self._bounds is not None:
            raise UserError(
                f"{spelled('global_batch_size', samples)} is a number of sentences, and batches are limited by"
                f" {spelled('max_tokens')}: pass the micro-batches of an update, as in {spelled('accumulate', 4)}"
            )
        return super().items_of_samples(samples)

    @property
    @override
    def samples_per_update(self) -> int:
        return self.division.update_size * (self.batch_size if self._bounds is not None else 1)

    @override
    def _samples_of(self, epoch: int, start: int, stop: int) -> int:
        if self._bounds is None:
            return stop - start
        _, starts = self._plan(epoch, self._unit)
        return int(starts[stop] - starts[start])

    def _plan(self, epoch: int, unit: int) -> tuple[Tensor, Tensor]:
        """Return the order of an epoch as positions in `rows`, and the bounds of its items in this order."""
        key = (epoch if self.shuffle and not self.keeps_order else 0, unit)
        # Cached: a plan of ten million pairs takes seconds.
        if self._last_plan is None or self._last_plan[0] != key:
            self._last_plan = key, self._make_plan(*key)
        return self._last_plan[1]

    def _make_plan(self, epoch: int, unit: int) -> tuple[Tensor, Tensor]:
        count = len(self.rows)
        order = epoch_order(count, self.seed, epoch)
        if self._bounds is None:
            # The short unit at the end is not sorted into a pool, so that it is a random sample.
            num_in_units = count - count % unit
            pools = sort_pools(self._source_lengths, self._target_lengths, order[:num_in_units], _POOL * unit)
            units = shuffle_units(num_in_units, unit, self.seed, epoch)
            return torch.cat((pools[units], order[num_in_units:])), torch.arange(count + 1)
        order = sort_by_length(self._source_lengths, self._target_lengths, order)
        batches = shuffle_units(self._items, unit, self.seed, epoch)
        sizes = self._bounds.diff()[batches]
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))
        # Offset of each sentence from its position in the sorted order.
        shift = torch.repeat_interleave(self._bounds[batches] - bounds[:-1], sizes)
        return order[torch.arange(count) + shift], bounds

    @override
    def _describe_data(self) -> tuple[int, str]:
        return len(self.rows), fingerprint((self.rows, self._source_lengths, self._target_lengths))

    @override
    def _batches_of_epoch(self, epoch: int, start_at: int, spans: Spans) -> Iterator[TranslationBatch]:
        # An interrupted epoch keeps its unit size. With another size the remaining positions would not be the remaining
        # sentences.
        if not start_at:
            self._unit = self.division.update_size
        order, starts = self._plan(epoch, self._unit)
        rows = self.rows[order]
        for start, stop in spans:
            yield self.pairs.batch(rows[int(starts[start]) : int(starts[stop])])

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the position, with the number of items of the epoch and the size of its units."""
        position = super().state_dict()
        return position | {"items": self._items, "unit": self._unit if position["consumed"] else 0}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of `state`, which may have been saved on another number of ranks.

        Raises:
            UserError: `state` is within an epoch, and the data or `max_tokens` have changed.
        """
        if state["consumed"] and state["items"] != self._items:
            kind = "sentences" if self._bounds is None else "batches"
            raise UserError(
                f"the checkpoint lies in the middle of an epoch of {state['items']:,} sentences or batches, found"
                f" {self._items:,} {kind}; resume with the same data and the same {spelled('max_tokens')}"
            )
        super().load_state_dict(state)
        self._unit = state["unit"]


def batches_within_memory(lengths: Tensor, batch_size: int) -> list[Tensor]:
    """Cut sentences into batches of at most `batch_size` successive sentences whose attention fits into memory.

    Attention needs memory in proportion to sentences * longest * longest. If that exceeds `batch_size` sentences of 128
    tokens, the sentences are sorted by length and cut into smaller batches. A batch has at least one sentence, of any
    length.

    Args:
        lengths: tokens of the longer side of each sentence, int64 of shape (n,).
        batch_size: maximum number of sentences of a batch.

    Returns:
        Indices of the sentences of each batch.
    """
    limit = batch_size * _ORDINARY_LENGTH**2
    batches: list[Tensor] = []
    if not len(lengths):
        return batches
    for indices in torch.arange(len(lengths)).split(batch_size):
        if len(indices) * int(lengths[indices].max()) ** 2 <= limit:
            batches.append(indices)
            continue
        by_length = indices[lengths[indices].argsort(stable=True)]
        start = 0
        for end, length in enumerate(lengths[by_length].tolist()):
            if end > start and (end + 1 - start) * length**2 > limit:
                batches.append(by_length[start:end])
                start = end
        batches.append(by_length[start:])
    return batches


class SentenceEvaluationLoader(NumberedEvaluation):
    """Loader of every pair exactly once, in batches that do not depend on the number of ranks.

    Batches contain sentences of similar length. Their order is random but fixed, so the first batches, as with
    ``limit_val_batches``, are a representative sample.

    Args:
        pairs: all sentence pairs.
        rows: numbers of the pairs to evaluate, int64 of shape (n,).
        batch_size: sentences in one forward pass; fewer if they are long, see `batches_within_memory`.
        bucket: whether to group sentences by length; False keeps the order of `rows`, except in batches that are cut
            because of long sentences.
    """

    def __init__(
        self,
        pairs: PackedPairs,
        rows: Tensor,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        bucket: bool = True,
    ) -> None:
        self.pairs = pairs
        source_lengths = pairs.source.lengths[rows]
        target_lengths = pairs.target.lengths[rows]
        order = torch.arange(len(rows))
        if bucket and len(rows):
            units = shuffle_units(len(rows), batch_size, seed=0, epoch=0)
            order = sort_by_length(source_lengths, target_lengths, order)[units]
        batches = batches_within_memory(torch.maximum(source_lengths, target_lengths)[order], batch_size)
        # Whole batches are assigned to the ranks in turn, so a batch is the same on any number of ranks.
        self._batches = [rows[order[indices]] for indices in batches[rank::world_size]]
        # A rank without a batch gets an empty one: every rank has to take part in the collective reductions.
        if not self._batches:
            self._batches = [rows[:0]]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[TranslationBatch]:
        return map(self.pairs.batch, self._batches)

    @override
    def sample_numbers(self) -> Tensor:
        return torch.cat(self._batches)
