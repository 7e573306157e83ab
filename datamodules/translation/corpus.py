"""From sentence pairs as written to packed numbers: normalise, filter, split without leaks."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.text_files import Faults
from datamodules.translation.packed_sentences import PackedPairs, pack
from datamodules.translation.parallel_corpus import SentencePairs
from datamodules.translation.text import (
    EOS,
    SOS,
    Normalisation,
    Vocabulary,
    build_vocabulary,
    normalise,
    normalise_lines,
)

__all__ = ["TUTORIAL_PREFIXES", "Corpus", "CorpusFilter", "CorpusInfo", "prepare_corpus", "split_by_source"]

TUTORIAL_PREFIXES = (
    *("i am ", "i m ", "he is", "he s ", "she is", "she s "),
    *("you are", "you re ", "we are", "we re ", "they are", "they re "),
)
"""The English beginnings that PyTorch's translation tutorial keeps."""

Choice = Literal["error", "skip"]
_Kept = list[tuple[int, str, str]]


@dataclass(frozen=True)
class CorpusInfo:
    """What a corpus is called, how many lines were read and pairs kept, and how many source sentences differ.

    ``left_out`` holds how many lines are not used, by reason: ``read == kept + sum(left_out.values())``.
    """

    title: str
    read: int = 0
    kept: int = 0
    sources: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """The counts in words.

        Example:
            >>> CorpusInfo("a.tsv", 10, 7, 7, {"header": 1, "over max_length=9": 2}).describe()
            'a.tsv: 10 lines read = 7 pairs kept + 1 header + 2 over max_length=9'
        """
        parts = [f"{self.kept:,} pairs kept", *(f"{count:,} {reason}" for reason, count in self.left_out.items())]
        return f"{self.title}: {self.read:,} lines read = {' + '.join(parts)}"


@dataclass(frozen=True)
class CorpusFilter:
    """Which pairs are kept, in what form; see `TranslationDataModule`."""

    normalisation: Normalisation = "unicode"
    max_length: int | None = None
    prefixes: Sequence[str] | str | None = None
    on_bad_lines: Choice = "error"
    on_long_sentences: Choice = "skip"


@dataclass(frozen=True)
class Corpus:
    """All kept pairs, in numbers of their own tokens.

    Args:
        pairs: the sentences.
        source_tokens, target_tokens: what the numbers mean.
        rows: the rows of each part, int64: "train", "val" and "test".
        notes: what was left out, for the user.
    """

    info: CorpusInfo
    pairs: PackedPairs
    source_tokens: list[str]
    target_tokens: list[str]
    rows: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)

    def vocabularies(self, min_count: int, max_vocab_size: int | None) -> tuple[Vocabulary, Vocabulary]:
        """The vocabularies of both sides, from the training part only; arguments as of `build_vocabulary`.

        Raises:
            UserError: no token is frequent enough.
        """
        in_train = torch.zeros(self.info.kept, dtype=torch.bool)
        in_train[self.rows["train"]] = True
        chosen = []
        sides = ((self.pairs.source, self.source_tokens), (self.pairs.target, self.target_tokens))
        for name, (packed, tokens) in zip(("source", "target"), sides):
            text = packed.tokens[torch.repeat_interleave(in_train, packed.lengths)]
            vocabulary = build_vocabulary(
                tokens, torch.bincount(text, minlength=len(tokens)).tolist(), min_count, max_vocab_size
            )
            if len(vocabulary) == len(Vocabulary.of(())) and len(text):
                raise UserError(
                    f"no {name} token occurs {min_count:,} times in the {len(self.rows['train']):,} training pairs of "
                    f"{self.info.title}; pass a smaller `min_count`"
                )
            chosen.append(vocabulary)
        return chosen[0], chosen[1]

    def encoded(self, source: Vocabulary, target: Vocabulary) -> PackedPairs:
        """The pairs in the numbers of these vocabularies."""
        return PackedPairs(
            self.pairs.source.renumbered(source.ids_of(self.source_tokens)),
            self.pairs.target.renumbered(target.ids_of(self.target_tokens)),
        )

    def source_sentences(self, rows: Tensor) -> list[str]:
        return [_as_text(self.pairs.source[row], self.source_tokens) for row in rows.tolist()]

    def target_sentences(self, rows: Tensor) -> list[str]:
        return [_as_text(self.pairs.target[row], self.target_tokens) for row in rows.tolist()]


def _as_text(numbers: list[int], tokens: list[str]) -> str:
    return " ".join(tokens[number] for number in numbers if number not in (SOS, EOS))


def split_by_source(
    sources: Sequence[str], val: float, test: float, seed: int, train_share: float = 1.0
) -> dict[str, Tensor]:
    """The rows of each part; rows with the same source sentence are in one, so no held-out source is trained on.

    Sentences are ordered by a hash of (seed, sentence): the first make up the test part, the next validation. So the
    split does not depend on the order of the file, and hardly changes when sentences are added.

    Args:
        sources: the source sentence of each row.
        val: share of the different sentences held out for validation.
        test: share of them held out for the test.
        train_share: share of the others to train on; smaller shares are subsets of larger ones.

    Returns:
        int64 tensors "train", "val" and "test", each sorted.
    """
    key = str(seed).encode()[:64]
    distinct = {s: hashlib.blake2b(s.encode(), digest_size=8, key=key).digest() for s in set(sources)}
    ranks = {sentence: rank for rank, sentence in enumerate(sorted(distinct, key=distinct.__getitem__))}
    held_out = [max(1, round(len(ranks) * share)) if share else 0 for share in (test, val)]
    rank = torch.tensor([ranks[sentence] for sentence in sources], dtype=torch.int64)
    in_test, in_val = rank < held_out[0], rank < sum(held_out)
    to_train_on = max(1, round((len(ranks) - sum(held_out)) * train_share))
    parts = {"train": ~in_val & (rank < sum(held_out) + to_train_on), "val": in_val & ~in_test, "test": in_test}
    return {part: mask.nonzero().flatten() for part, mask in parts.items()}


def starting_with(pairs: _Kept, prefixes: Sequence[str] | str, normalisation: Normalisation) -> _Kept:
    """The pairs of which one side begins so, which holds in either direction.

    Apostrophes count as spaces, as the tutorial reads them; a space at a prefix's end asks for the end of a token.
    """

    def plain(text: str) -> str:
        return " ".join(text.replace("'", " ").split()) if "'" in text else text

    prefixes = TUTORIAL_PREFIXES if prefixes == "tutorial" else prefixes
    prefixes = (prefixes,) if isinstance(prefixes, str) else prefixes
    wanted = tuple(plain(normalise(prefix, normalisation)) + " " * prefix.endswith(" ") for prefix in prefixes)
    return [pair for pair in pairs if plain(pair[1]).startswith(wanted) or plain(pair[2]).startswith(wanted)]


def filter_pairs(pairs: SentencePairs, keep: CorpusFilter) -> tuple[_Kept, list[str], dict[str, int]]:
    """Normalised pairs with their line numbers, notes on what was left out, and how many lines that were, by reason.

    Raises:
        UserError: lines are faulty or too long and may not be skipped, or nothing is left.
    """
    sides = [normalise_lines(side, keep.normalisation) for side in (pairs.source, pairs.target)]
    empty = [number for number, a, b in zip(pairs.numbers, *sides) if not (a and b)]
    faults = Faults(dict(pairs.faults.lines))
    faults.add(f"with an empty side in {keep.normalisation} normalisation", empty)
    hints = {
        "not in UTF-8": "; save the file as UTF-8",
        "without a tab": "; expected SOURCE<tab>TARGET (two files are `source_file` and `target_file`, and names of"
        " comma-separated files and JSON lines end in .csv and .jsonl)",
    }
    hint = "".join(text for reason, text in hints.items() if reason in faults.lines)
    notes = [f"{pairs.where}: {pairs.header}" if pairs.header else ""]
    notes.append(faults.settle(keep.on_bad_lines, pairs.where, pairs.read, "on_bad_lines", hint))
    left_out = pairs.apart | {reason: len(lines) for reason, lines in faults.lines.items()}
    kept = [(number, a, b) for number, a, b in zip(pairs.numbers, *sides) if a and b]
    if keep.max_length is not None:
        # Words are separated by single spaces, and the end mark is one more.
        widths = [max(a.count(" "), b.count(" ")) + 2 for _, a, b in kept]
        long = [number for (number, _, _), width in zip(kept, widths) if width > keep.max_length]
        faults = Faults({f"over max_length={keep.max_length}": long} if long else {})
        notes.append(faults.settle(keep.on_long_sentences, pairs.where, pairs.read, "on_long_sentences"))
        left_out |= {reason: len(lines) for reason, lines in faults.lines.items()}
        kept = [pair for pair, width in zip(kept, widths) if width <= keep.max_length]
    if keep.prefixes and (others := len(kept) - len(kept := starting_with(kept, keep.prefixes, keep.normalisation))):
        left_out["without a prefix"] = others
    if not kept:
        filters = {"max_length": keep.max_length, "prefixes": keep.prefixes, "normalisation": keep.normalisation}
        named = ", ".join(f"{name}={json.dumps(value)}" for name, value in filters.items() if value)
        raise UserError(f"{pairs.where}: none of {pairs.read:,} pairs is left after {named}")
    return kept, [note for note in notes if note], left_out


def prepare_corpus(
    pairs: SentencePairs, title: str, keep: CorpusFilter, val: float, test: float, seed: int, train_share: float = 1.0
) -> Corpus:
    """Normalise, filter, split and pack; arguments as of `split_by_source`."""
    kept, notes, left_out = filter_pairs(pairs, keep)
    sources, targets = [a for _, a, _ in kept], [b for _, _, b in kept]
    source, source_tokens = pack(sources)
    target, target_tokens = pack(targets, start=True)
    info = CorpusInfo(title, pairs.read, len(kept), len(set(sources)), left_out)
    rows = split_by_source(sources, val, test, seed, train_share)
    return Corpus(info, PackedPairs(source, target), source_tokens, target_tokens, rows, notes)
