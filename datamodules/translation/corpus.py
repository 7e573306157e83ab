"""From sentence pairs as written to packed numbers: normalise, filter, split without leaks."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.text_files import Faults
from datamodules.translation.given_sentences import LONGEST_INPUT
from datamodules.translation.packed_sentences import PackedPairs, PackedSentences, pack
from datamodules.translation.parallel_corpus import SentencePairs
from datamodules.translation.subwords import AnyVocabulary, SubwordVocabulary, encode_tokens, train_subwords
from datamodules.translation.text import (
    EOS,
    INVISIBLE,
    SOS,
    SPECIAL_TOKENS,
    Normalisation,
    Vocabulary,
    build_vocabulary,
    normalise_lines,
)

TUTORIAL_PREFIXES = (
    *("i am ", "i m ", "he is", "he s ", "she is", "she s "),
    *("you are", "you re ", "we are", "we re ", "they are", "they re "),
)
"""The English beginnings that PyTorch's translation tutorial keeps."""

Choice = Literal["error", "skip"]

_LONGEST = 10_000


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
        """The counts in words."""
        parts = [f"{self.kept:,} pairs kept", *(f"{count:,} {reason}" for reason, count in self.left_out.items())]
        return f"{self.title}: {self.read:,} lines read = {' + '.join(parts)}"


@dataclass(frozen=True)
class CorpusFilter:
    """Which pairs are kept, in what form; see `TranslationDataModule`."""

    normalisation: Normalisation = "unicode"
    max_length: int | None = None
    prefixes: Literal["tutorial"] | None = None
    on_bad_lines: Choice = "error"
    whole: bool = False


@dataclass(frozen=True)
class Corpus:
    """All kept pairs, in numbers of their own tokens.

    Args:
        info: of the training files.
        held_out: of the files of "val" and "test", where there are any.
        source, target: the sentences, those of the training files first.
        source_tokens, target_tokens: what the numbers mean.
        training_counts: how often each token of the source and of the target occurs in the training part, int64.
        rows: the rows of each part, int64: "train", "val" and "test".
        texts: by row, source and target of the held-out pairs as they were written.
        notes: what was left out, for the user.
    """

    info: CorpusInfo
    held_out: dict[str, CorpusInfo]
    source: PackedSentences
    target: PackedSentences
    source_tokens: list[str]
    target_tokens: list[str]
    training_counts: tuple[Tensor, Tensor]
    rows: dict[str, Tensor]
    texts: dict[int, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def vocabularies(self, vocab_size: int | None) -> tuple[Vocabulary, Vocabulary]:
        """The words of both sides, from the training part only, `vocab_size` of each side at most."""
        source, target = self.training_counts
        return (
            build_vocabulary(self.source_tokens, source.tolist(), vocab_size),
            build_vocabulary(self.target_tokens, target.tolist(), vocab_size),
        )

    def subwords(self, vocab_size: int) -> tuple[SubwordVocabulary, SubwordVocabulary]:
        """Subwords of both sides, from the training part only; arguments as of `train_subwords`."""
        found = []
        for tokens, counts in zip((self.source_tokens, self.target_tokens), self.training_counts, strict=True):
            words = list(zip(tokens, counts.tolist(), strict=True))[len(SPECIAL_TOKENS) :]
            found.append(train_subwords({word: count for word, count in words if count}, vocab_size))
        return found[0], found[1]

    def encoded(self, source: AnyVocabulary, target: AnyVocabulary) -> PackedPairs:
        """The pairs in the numbers of these vocabularies."""
        return PackedPairs(
            self.source.retokenized(encode_tokens(source, self.source_tokens)),
            self.target.retokenized(encode_tokens(target, self.target_tokens)),
        )

    def sentences(self, rows: Tensor, side: int) -> list[str]:
        """The normalised sentences of the source, side 0, or of the target, side 1."""
        packed, tokens = ((self.source, self.source_tokens), (self.target, self.target_tokens))[side]
        return [" ".join(tokens[n] for n in packed[row] if n not in (SOS, EOS)) for row in rows.tolist()]

    def written(self, rows: Tensor, side: int) -> list[str]:
        """The sentences as they were written, where they are held out."""
        found = zip(rows.tolist(), self.sentences(rows, side), strict=True)
        return [self.texts[row][side] if row in self.texts else sentence for row, sentence in found]


def hash_sources(sources: Sequence[str], seed: int) -> npt.NDArray[np.uint64]:
    """A hash of (seed, sentence) for each sentence."""
    key = str(seed).encode()[:64]
    digests = b"".join(hashlib.blake2b(sentence.encode(), digest_size=8, key=key).digest() for sentence in sources)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def split_by_source(hashes: npt.NDArray[np.uint64], val: float, test: float) -> dict[str, Tensor]:
    """The rows of each part; rows with the same source sentence are in one, so no held-out source is trained on.

    Sentences are ordered by a hash of (seed, sentence): the first make up the test part, the next validation. So the
    split does not depend on the order of the file, and hardly changes when sentences are added.

    Args:
        hashes: of the source sentence of each row, of `hash_sources`.
        val: share of the different sentences held out for validation.
        test: share of them held out for the test.

    Returns:
        int64 tensors "train", "val" and "test", each sorted.
    """
    distinct, ranks = np.unique(hashes, return_inverse=True)
    rank = torch.from_numpy(ranks)
    held_out = [max(1, round(len(distinct) * share)) if share else 0 for share in (test, val)]
    in_test, in_val = rank < held_out[0], rank < sum(held_out)
    parts = {"train": ~in_val, "val": in_val & ~in_test, "test": in_test}
    return {part: mask.nonzero().flatten() for part, mask in parts.items()}


def _has_prefix(sentence: str) -> bool:
    """Whether a normalised sentence begins so; apostrophes count as spaces, as the tutorial reads them."""
    return " ".join(sentence.replace("'", " ").split()).startswith(TUTORIAL_PREFIXES)


@dataclass
class _Kept:
    """What is kept of the pairs of one place, normalised and as written, and what is not."""

    sources: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


_HINTS = {
    "not in UTF-8": "; save the file as UTF-8",
    f"over {_LONGEST:,} bytes": "; split them, or keep up to 10 bytes for each word of `max_length`",
    "without a tab": "; expected SOURCE<tab>TARGET (two files are `source_file` and `target_file`, and the names of"
    " comma-separated files end in .csv)",
}


def _filtered(pairs: SentencePairs, keep: CorpusFilter) -> _Kept:
    """The pairs that are kept, in normal form; faulty ones that may not be skipped are refused."""
    kept = _Kept()
    # Those to train on are padded in batches of a fixed number.
    longest = LONGEST_INPUT if keep.whole else max(_LONGEST, 10 * (keep.max_length or 0))
    faults, too_long, without_prefix = Faults(dict(pairs.faults.lines)), Faults(), 0
    sides = ([pair.source for pair in pairs.pairs], [pair.target for pair in pairs.pairs])
    sources, targets = (normalise_lines(side, keep.normalisation) for side in sides)
    for pair, source, target in zip(pairs.pairs, sources, targets, strict=True):
        if "\0" in pair.source or "\0" in pair.target:
            faults.add("with a NUL character", [pair.number])
        elif not (source.strip(INVISIBLE) and target.strip(INVISIBLE)):
            faults.add(f"with an empty side in {keep.normalisation} normalisation", [pair.number])
        # Words are separated by single spaces, and the end mark is one more.
        elif keep.max_length and max(source.count(" "), target.count(" ")) + 2 > keep.max_length:
            too_long.add(f"over max_length={keep.max_length}", [pair.number])
        elif keep.prefixes and not (_has_prefix(source) or _has_prefix(target)):
            without_prefix += 1
        elif max(len(side.encode(errors="replace")) for side in pair[1:]) > longest:
            faults.add(f"over {longest:,} bytes", [pair.number])
        else:
            kept.sources.append(source)
            kept.targets.append(target)
            kept.texts.append((pair.source, pair.target))
    hint = "".join(text for reason, text in _HINTS.items() if reason in faults.lines)
    notes = [
        pairs.describe_columns(),
        faults.raise_or_report(keep.on_bad_lines, pairs.where, pairs.read, "on_bad_lines", hint),
        too_long.raise_or_report("skip", pairs.where, pairs.read, None),
    ]
    kept.notes = [note for note in notes if note]
    by_reason = {reason: len(lines) for reason, lines in (faults.lines | too_long.lines).items()}
    kept.left_out = pairs.apart | by_reason | ({"without a prefix": without_prefix} if without_prefix else {})
    return kept


def _info(title: str, files: Sequence[SentencePairs], kept: Sequence[_Kept], keep: CorpusFilter) -> CorpusInfo:
    """The counts of one part, of which something has to be left."""
    read, sources = sum(pairs.read for pairs in files), [source for one in kept for source in one.sources]
    if not sources:
        filters = {"max_length": keep.max_length, "prefixes": keep.prefixes, "normalisation": keep.normalisation}
        named = ", ".join(f"{name}={json.dumps(value)}" for name, value in filters.items() if value)
        where = ", ".join(pairs.where for pairs in files)
        raise UserError(f"{where}: no pair of {read:,} is left after {named}")
    left_out: Counter[str] = Counter()
    for one in kept:
        left_out.update(one.left_out)
    return CorpusInfo(title, read, len(sources), len(set(sources)), dict(left_out))


def _note_shared(hashes: Mapping[str, npt.NDArray[np.uint64]], rows: Tensor) -> list[str]:
    """How many training pairs have a source sentence of a held-out file, which is left to who published the split."""
    train = hashes["train"][rows.numpy()]
    return [
        f"{count:,} of {len(train):,} training pairs have a source sentence that is in the {name} files, too"
        for part, name in (("val", "validation"), ("test", "test"))
        if part in hashes and (count := int(np.isin(train, hashes[part]).sum()))
    ]


def prepare_corpus(
    files: Mapping[str, Sequence[SentencePairs]],
    titles: Mapping[str, str],
    keep: CorpusFilter,
    val: float,
    test: float,
    seed: int,
) -> Corpus:
    """Normalise, filter, split and pack.

    Args:
        files: of "train", which is split, and of "val" and "test", which are used whole: `max_length` and `prefixes`
            of `keep` are not theirs.
        titles: what each part is called.
        val, test, seed: of the split, see `split_by_source`.
    """
    whole = replace(keep, max_length=None, prefixes=None, whole=True)
    everything: list[_Kept] = []
    infos, hashes = {}, {}
    for part, of_part in files.items():
        filters = keep if part == "train" else whole
        kept = [_filtered(pairs, filters) for pairs in of_part]
        infos[part] = _info(titles[part], of_part, kept, filters)
        hashes[part] = hash_sources([source for one in kept for source in one.sources], seed)
        everything += kept
    rows = split_by_source(hashes["train"], val, test)
    start = 0
    for part, info in infos.items():
        if part != "train":
            rows[part] = torch.arange(start, start + info.kept)
        start += info.kept
    info = infos.pop("train")
    source, source_tokens = pack([line for one in everything for line in one.sources])
    target, target_tokens = pack([line for one in everything for line in one.targets], start=True)
    counts = source.counts(rows["train"], len(source_tokens)), target.counts(rows["train"], len(target_tokens))
    notes = [note for one in everything for note in one.notes] + _note_shared(hashes, rows["train"])
    texts = [pair for one in everything for pair in one.texts]
    held_out = {row: texts[row] for row in torch.cat((rows["val"], rows["test"])).tolist()}
    return Corpus(info, infos, source, target, source_tokens, target_tokens, counts, rows, held_out, notes)
