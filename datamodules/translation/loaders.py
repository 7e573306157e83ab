"""Batches of sentence pairs, grouped by length for each update, in one order for any number of ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError
from datamodules.loading.randomness import permutation
from datamodules.loading.resumable import ResumableLoader, Spans, fingerprint
from datamodules.loading.sampling import epoch_order
from datamodules.translation.packed_sentences import PackedPairs, TranslationBatch

_ORDINARY_LENGTH = 128  # Tokens of a sentence, of which as many as the batch size go into one forward pass.

_POOL = 8  # Updates of which the sentences are sorted by length together.


def sort_by_length(source_lengths: Tensor, target_lengths: Tensor, order: Tensor) -> Tensor:
    """`order` sorted by source length, then by target length, then as it was."""
    key = source_lengths * (int(target_lengths.max()) + 1) + target_lengths
    return order[torch.argsort(key[order], stable=True)]


def sort_pools(source_lengths: Tensor, target_lengths: Tensor, order: Tensor, size: int) -> Tensor:
    """`order` with each `size` neighbours sorted by the longer side, then by both sides, then as they were."""
    sources, targets = source_lengths[order], target_lengths[order]
    both = sources + targets
    base = int(both.max()) + 1 if len(order) else 1
    pool = torch.arange(len(order)) // size
    return order[torch.argsort((pool * base + torch.maximum(sources, targets)) * base + both, stable=True)]


def shuffle_units(n: int, unit: int, seed: int, epoch: int) -> Tensor:
    """The numbers 0..n-1 in units of neighbours, the units in random order, int64 of shape (n,).

    The unit that is left short comes last, since updates are counted from the epoch's start. Which numbers are in it is
    random, too: at the end of a sort by length it would always be the longest sentences.
    """
    full, rest = divmod(n, unit)
    begin = int(permutation(full + 1, seed, "short unit", epoch)[0]) * unit
    numbers = torch.arange(n)
    whole = torch.cat((numbers[:begin], numbers[begin + rest :])).view(full, unit)
    whole = whole[permutation(full, seed, "units", epoch)].flatten()
    return torch.cat((whole, numbers[begin : begin + rest]))


def cut_by_tokens(source_lengths: Tensor, target_lengths: Tensor, max_tokens: int) -> Tensor:
    """Where batches of sentences sorted by length begin, int64 of shape (batches + 1,), the last one's end included.

    A batch takes as many as fit when padded: sentences times (longest source + longest target) <= `max_tokens`.

    Raises:
        UserError: a single pair is longer than that.
    """
    if (longest := int((source_lengths + target_lengths).max())) > max_tokens:
        raise UserError(
            f"max_tokens={max_tokens} is less than the longest pair of sentences has, {longest} tokens with their "
            f"marks; pass max_tokens={longest} or more, or leave long sentences out with `max_length`"
        )
    bounds, first, source_width, target_width = [0], 0, 0, 0
    for position, (source, target) in enumerate(zip(source_lengths.tolist(), target_lengths.tolist())):
        source_width, target_width = max(source_width, source), max(target_width, target)
        if (position + 1 - first) * (source_width + target_width) > max_tokens:
            bounds.append(position)
            first, source_width, target_width = position, source, target
    return torch.tensor([*bounds, len(source_lengths)])


class SentenceTrainLoader(ResumableLoader[TranslationBatch]):
    """Shuffled batches of similar lengths in one global order for any number of ranks, resumable at any update.

    An epoch is shuffled and cut into pools of 8 updates; each pool is sorted by length and cut into the
    sentences of one update each, and these units are shuffled: a function of (seed, epoch, sentences per update).
    Micro-batches are consecutive parts of a unit. With `max_tokens` the whole epoch is sorted and cut into
    micro-batches of that size, the same in each epoch, and a unit is those of an update. So the number of updates never
    changes.

    Args:
        pairs: all sentences.
        rows: int64, the numbers of those to train on.
        batch_size: sentences of a micro-batch.
        seed: of the shuffle order.
        max_tokens: tokens of a micro-batch, of both sides with their padding; replaces `batch_size`.
        shuffle: False repeats the order of the first epoch.

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
        self.pairs, self.rows, self.seed, self.shuffle = pairs, rows, seed, shuffle
        self._source_lengths, self._target_lengths = pairs.source.lengths[rows], pairs.target.lengths[rows]
        self._bounds: Tensor | None = None
        # What a rank takes at a time: sentences, or one batch cut by tokens.
        items, items_at_once = len(rows), batch_size
        if max_tokens:
            any_order = sort_by_length(self._source_lengths, self._target_lengths, torch.arange(len(rows)))
            self._bounds = cut_by_tokens(self._source_lengths[any_order], self._target_lengths[any_order], max_tokens)
            items, items_at_once = len(self._bounds) - 1, 1
            mean = (self._source_lengths + self._target_lengths).double().mean()
            batch_size = max(1, int(max_tokens / mean))
        self.batch_size = batch_size
        """Sentences of a micro-batch; with `max_tokens` their mean number."""
        super().__init__(items, items_at_once, rank, world_size)
        self._unit = 0
        self._last_plan: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None

    @override
    def items_of_samples(self, samples: int) -> int:
        if self._bounds is not None:
            raise UserError(
                f"global_batch_size={samples} is a number of sentences, and batches are limited by `max_tokens`: pass"
                " the micro-batches of an update, as in accumulate=4"
            )
        return super().items_of_samples(samples)

    @property
    @override
    def samples_per_update(self) -> int:
        return self.division.update_size * (self.batch_size if self._bounds is not None else 1)

    def _plan(self, epoch: int, unit: int) -> tuple[Tensor, Tensor]:
        """The order of an epoch as positions in `rows`, and where each item begins in it, the end included.

        The last one is kept: for ten million pairs it takes seconds.
        """
        key = epoch if self.shuffle and not self.keeps_order else 0, unit
        if self._last_plan is None or self._last_plan[0] != key:
            self._last_plan = key, self._make_plan(*key)
        return self._last_plan[1]

    def _make_plan(self, epoch: int, unit: int) -> tuple[Tensor, Tensor]:
        count = len(self.rows)
        order, lengths = epoch_order(count, self.seed, epoch), (self._source_lengths, self._target_lengths)
        if self._bounds is None:
            # The short unit is a random sample as it is.
            whole = count - count % unit
            units = shuffle_units(whole, unit, self.seed, epoch)
            order = torch.cat((sort_pools(*lengths, order[:whole], _POOL * unit)[units], order[whole:]))
            return order, torch.arange(count + 1)
        order = sort_by_length(*lengths, order)
        visits = shuffle_units(self._items, unit, self.seed, epoch)
        sizes = self._bounds.diff()[visits]
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))
        shift = torch.repeat_interleave(self._bounds[visits] - bounds[:-1], sizes)
        return order[torch.arange(count) + shift], bounds

    @override
    def _describe_data(self) -> tuple[int, str]:
        return len(self.rows), fingerprint((self.rows, self._source_lengths, self._target_lengths))

    @override
    def _batches_of_epoch(self, epoch: int, start_at: int, spans: Spans) -> Iterator[TranslationBatch]:
        # An epoch goes on as it started: with other units the rest would not be the sentences not yet seen.
        if not start_at:
            self._unit = self.division.update_size
        order, starts = self._plan(epoch, self._unit)
        rows = self.rows[order]
        for start, stop in spans:
            yield self.pairs.batch(rows[int(starts[start]) : int(starts[stop])])

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, what all ranks have consumed of it, of how much, and the size of its units."""
        position = super().state_dict()
        return position | {"items": self._items, "unit": self._unit if position["consumed"] else 0}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, on any number of ranks.

        Raises:
            UserError: in the middle of an epoch, if the data have changed or other batches are cut by tokens.
        """
        if state["consumed"] and state["items"] != self._items:
            kind = "sentences" if self._bounds is None else "batches"
            raise UserError(
                f"the checkpoint lies in the middle of an epoch of {state['items']:,} sentences or batches, found "
                f"{self._items:,} {kind}; resume with the same data and the same `max_tokens`"
            )
        super().load_state_dict(state)
        self._unit = state["unit"]


def batches_within_memory(lengths: Tensor, batch_size: int) -> list[Tensor]:
    """The places of sentences in batches: `batch_size` neighbours, in as many batches as their memory asks for.

    Attention takes memory for sentences x longest x longest. Where that is more than of `batch_size` sentences of 128
    tokens, the neighbours are sorted by length and cut; one sentence is a batch, however long it is.

    Args:
        lengths: tokens of each sentence, of its longer side, int64 of shape (any,).
    """
    most, batches = batch_size * _ORDINARY_LENGTH**2, []
    for places in torch.arange(len(lengths)).split(batch_size) if len(lengths) else ():
        if len(places) * int(lengths[places].max()) ** 2 > most:
            places, start = places[lengths[places].argsort(stable=True)], 0
            for end, length in enumerate(lengths[places].tolist()):
                if end > start and (end + 1 - start) * length**2 > most:
                    batches.append(places[start:end])
                    start = end
            places = places[start:]
        batches.append(places)
    return batches


class SentenceEvaluationLoader:
    """Every pair exactly once, on any number of ranks, in batches that do not depend on that number.

    Batches hold sentences of similar length, in a fixed random order: the first few are a fair sample, as where
    ``limit_val_batches`` stops early.

    Args:
        pairs: all sentences.
        rows: int64, the numbers of those to evaluate.
        batch_size: sentences in one forward pass; fewer of long ones, see `batches_within_memory`.
        bucket: False keeps the order of `rows`, except where long sentences are put apart.
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
        lengths = pairs.source.lengths[rows], pairs.target.lengths[rows]
        order = torch.arange(len(rows))
        if bucket and len(rows):
            order = sort_by_length(*lengths, order)[shuffle_units(len(rows), batch_size, seed=0, epoch=0)]
        batches = batches_within_memory(torch.maximum(*lengths)[order], batch_size)
        # A rank without a batch gets an empty one: each takes part in the reductions.
        self._batches = [rows[order[places]] for places in batches[rank::world_size]] or [rows[:0]]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[TranslationBatch]:
        return map(self.pairs.batch, self._batches)
