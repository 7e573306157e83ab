"""Preparation of a corpus of sentence pairs: normalization, filters, split without leaks, packed token numbers.

Tested in `tests/datamodules/translation/test_data_module.py`.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.errors import UserError, spelled
from datamodules.loading.table_files import Faults
from datamodules.translation.loaders import PackedPairs, PackedSentences, pack
from datamodules.translation.parallel_corpus import LONGEST_INPUT, SentencePairs
from datamodules.translation.text import (
    EOS,
    INVISIBLE,
    SOS,
    SPECIAL_TOKENS,
    AnyVocabulary,
    Normalization,
    SubwordVocabulary,
    Vocabulary,
    build_vocabulary,
    encode_tokens,
    normalize_lines,
    train_subwords,
)

TUTORIAL_PREFIXES = (
    *("i am ", "i m ", "he is", "he s ", "she is", "she s "),
    *("you are", "you re ", "we are", "we re ", "they are", "they re "),
)
"""English prefixes of the sentences that PyTorch's translation tutorial keeps."""

Choice = Literal["error", "skip"]

_MAX_BYTES = 10_000


@dataclass(frozen=True)
class CorpusInfo:
    """Name of a corpus, number of lines read and pairs kept, and number of distinct source sentences.

    ``left_out`` is the number of unused lines, by reason: ``read == kept + sum(left_out.values())``.
    """

    title: str
    read: int = 0
    kept: int = 0
    sources: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Return a line with the counts."""
        counts = [f"{self.kept:,} pairs kept"]
        counts += [f"{count:,} {reason}" for reason, count in self.left_out.items()]
        return f"{self.title}: {self.read:,} lines read = {' + '.join(counts)}"


@dataclass(frozen=True)
class CorpusFilter:
    """Settings of the normalization and the filters, see `TranslationDataModule`; `is_held_out` for held-out files."""

    normalization: Normalization = "unicode"
    max_length: int | None = None
    prefixes: Literal["tutorial"] | None = None
    on_bad_lines: Choice = "error"
    is_held_out: bool = False


@dataclass(frozen=True)
class Corpus:
    """Kept pairs of all parts, as token numbers.

    Args:
        info: counts of the training files.
        held_out: counts of the files of "val" and "test", if any.
        source, target: sentences, first of the training files.
        source_tokens, target_tokens: token of each number.
        training_counts: number of occurrences of each source and target token in the training part, int64.
        rows: row numbers of "train", "val" and "test", int64.
        original_texts: original source and target of each held-out pair, by row.
        notes: remarks on lines that are left out.
    """

    info: CorpusInfo
    held_out: dict[str, CorpusInfo]
    source: PackedSentences
    target: PackedSentences
    source_tokens: list[str]
    target_tokens: list[str]
    training_counts: tuple[Tensor, Tensor]
    rows: dict[str, Tensor]
    original_texts: dict[int, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def vocabularies(self, vocab_size: int | None) -> tuple[Vocabulary, Vocabulary]:
        """Return word vocabularies of both sides, with up to `vocab_size` words, from the training part only."""
        source, target = self.training_counts
        return (
            build_vocabulary(self.source_tokens, source.tolist(), vocab_size),
            build_vocabulary(self.target_tokens, target.tolist(), vocab_size),
        )

    def subwords(self, vocab_size: int) -> tuple[SubwordVocabulary, SubwordVocabulary]:
        """Learn subword vocabularies of both sides from the training part only; see `train_subwords`."""
        vocabularies = []
        for tokens, counts in zip((self.source_tokens, self.target_tokens), self.training_counts, strict=True):
            words = list(zip(tokens, counts.tolist(), strict=True))[len(SPECIAL_TOKENS) :]
            vocabularies.append(train_subwords({word: count for word, count in words if count}, vocab_size))
        return vocabularies[0], vocabularies[1]

    def encoded(self, source: AnyVocabulary, target: AnyVocabulary) -> PackedPairs:
        """Return the pairs as token numbers of the given vocabularies."""
        return PackedPairs(
            self.source.retokenized(encode_tokens(source, self.source_tokens)),
            self.target.retokenized(encode_tokens(target, self.target_tokens)),
        )

    def sentences(self, rows: Tensor, side: int) -> list[str]:
        """Return the normalized sentences of the source (side 0) or the target (side 1)."""
        packed = (self.source, self.target)[side]
        tokens = (self.source_tokens, self.target_tokens)[side]
        sentences = []
        for row in rows.tolist():
            sentences.append(" ".join(tokens[number] for number in packed[row] if number not in (SOS, EOS)))
        return sentences

    def original_sentences(self, rows: Tensor, side: int) -> list[str]:
        """Return the original sentences of held-out pairs, and the normalized sentences of training pairs."""
        texts = []
        for row, sentence in zip(rows.tolist(), self.sentences(rows, side), strict=True):
            texts.append(self.original_texts[row][side] if row in self.original_texts else sentence)
        return texts


def hash_sources(sources: Sequence[str], seed: int) -> npt.NDArray[np.uint64]:
    """Return a hash of (seed, sentence) for each sentence, uint64 of shape (n,)."""
    # BLAKE2, because `hash` differs between processes. A key has at most 64 bytes.
    key = str(seed).encode()[:64]
    digests = b"".join(hashlib.blake2b(sentence.encode(), digest_size=8, key=key).digest() for sentence in sources)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def split_by_source(hashes: npt.NDArray[np.uint64], val: float, test: float) -> dict[str, Tensor]:
    """Split rows into parts so that all rows with the same source sentence are in one part.

    The distinct sentences are sorted by a hash of (seed, sentence). The first ones are the test part, the next ones the
    validation part. The split therefore does not depend on the order of the file, and hardly changes if sentences are
    added.

    Args:
        hashes: hash of the source sentence of each row, see `hash_sources`.
        val: share of the distinct sentences held out for validation.
        test: share of the distinct sentences held out for the test.

    Returns:
        Sorted row numbers of "train", "val" and "test", int64.
    """
    distinct, inverse = np.unique(hashes, return_inverse=True)
    position = torch.from_numpy(inverse)
    # A part with a share has at least one sentence.
    test_count = max(1, round(len(distinct) * test)) if test else 0
    val_count = max(1, round(len(distinct) * val)) if val else 0
    in_test = position < test_count
    is_held_out = position < test_count + val_count
    parts = {"train": ~is_held_out, "val": is_held_out & ~in_test, "test": in_test}
    return {part: mask.nonzero().flatten() for part, mask in parts.items()}


def _has_prefix(sentence: str) -> bool:
    """Return whether a sentence begins with a prefix of the tutorial, which replaces apostrophes by spaces."""
    return " ".join(sentence.replace("'", " ").split()).startswith(TUTORIAL_PREFIXES)


@dataclass
class _Kept:
    """Kept pairs of one file, normalized and original, and the number of pairs left out."""

    sources: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _hints(reasons: Collection[str]) -> str:
    """Return hints on how to correct faulty lines, by the reasons of the faults."""
    hints = {
        "not in UTF-8": "; save the file as UTF-8",
        f"over {_MAX_BYTES:,} bytes": f"; split them, or keep up to 10 bytes for each word of {spelled('max_length')}",
        "with doubled quotes, as CSV has them": f"; pass {spelled('columns', 'quotes=yes')} if a program wrote them",
        "of markup": "; write what is between the tags",
    }
    return "".join(text for reason, text in hints.items() if reason in reasons)


def _filtered(pairs: SentencePairs, keep: CorpusFilter) -> _Kept:
    """Normalize and filter pairs. Faulty lines raise a UserError, unless they may be skipped."""
    kept = _Kept()
    # Training batches have a fixed number of sentences, so one long sentence pads them all. Batches of held-out
    # sentences get smaller instead.
    longest = LONGEST_INPUT if keep.is_held_out else max(_MAX_BYTES, 10 * (keep.max_length or 0))
    faults = Faults(dict(pairs.faults.lines))
    too_long = Faults()
    without_prefix = 0
    sources = normalize_lines([pair.source for pair in pairs.pairs], keep.normalization)
    targets = normalize_lines([pair.target for pair in pairs.pairs], keep.normalization)
    for pair, source, target in zip(pairs.pairs, sources, targets, strict=True):
        if "\0" in pair.source or "\0" in pair.target:
            faults.add("with a NUL character", [pair.number])
        elif not (source.strip(INVISIBLE) and target.strip(INVISIBLE)):
            faults.add(f"with an empty side in {keep.normalization} normalization", [pair.number])
        # Words are one more than spaces, and EOS is one more token.
        elif keep.max_length and max(source.count(" "), target.count(" ")) + 2 > keep.max_length:
            too_long.add(f"over a length of {keep.max_length:,}", [pair.number])
        elif keep.prefixes and not (_has_prefix(source) or _has_prefix(target)):
            without_prefix += 1
        elif max(len(side.encode(errors="replace")) for side in pair[1:]) > longest:
            faults.add(f"over {longest:,} bytes", [pair.number])
        else:
            kept.sources.append(source)
            kept.targets.append(target)
            kept.texts.append((pair.source, pair.target))
    hint = _hints(faults.lines)
    notes = [
        pairs.describe_columns(),
        faults.raise_or_report(keep.on_bad_lines, pairs.where, pairs.read, "on_bad_lines", hint),
        too_long.raise_or_report("skip", pairs.where, pairs.read, None),
    ]
    kept.notes = [note for note in notes if note]
    left_out = faults.lines | too_long.lines
    kept.left_out = pairs.skipped_lines | {reason: len(lines) for reason, lines in left_out.items()}
    if without_prefix:
        kept.left_out["without a prefix"] = without_prefix
    return kept


def _info(title: str, files: Sequence[SentencePairs], kept: Sequence[_Kept], keep: CorpusFilter) -> CorpusInfo:
    """Return the counts of a part. Raise a UserError if no pair is left."""
    read = sum(pairs.read for pairs in files)
    sources = [source for kept_pairs in kept for source in kept_pairs.sources]
    if not sources:
        filters = {"max_length": keep.max_length, "prefixes": keep.prefixes, "normalization": keep.normalization}
        settings = ", ".join(spelled(name, value) for name, value in filters.items() if value)
        where = ", ".join(pairs.where for pairs in files)
        raise UserError(f"{where}: no pair of {read:,} is left after {settings}")
    left_out: Counter[str] = Counter()
    for kept_pairs in kept:
        left_out.update(kept_pairs.left_out)
    return CorpusInfo(title, read, len(sources), len(set(sources)), dict(left_out))


def _note_shared(hashes: Mapping[str, npt.NDArray[np.uint64]], rows: Tensor) -> list[str]:
    """Return remarks on training pairs whose source sentence is in a held-out file."""
    # The pairs are kept: the author of the split has decided what is trained on.
    train = hashes["train"][rows.numpy()]
    notes = []
    for part, name in (("val", "validation"), ("test", "test")):
        count = int(np.isin(train, hashes[part]).sum()) if part in hashes else 0
        if count:
            notes.append(
                f"{count:,} of {len(train):,} training pairs have a source sentence that is also in the {name} files"
            )
    return notes


def _letters(sentences: Sequence[str]) -> Counter[str]:
    """Count each letter in the first 1,000 sentences, in lower case."""
    text = "".join(sentences[:1_000]).lower()
    return Counter(letter for letter in text if letter.isalpha())


def _has_other_letters(letters: Counter[str], expected: Counter[str]) -> bool:
    """Return whether under 5 % of a text's letters are usual in another text; False if that text is too short."""
    total = expected.total()
    # Infrequent letters may come from foreign names, such as names in another script.
    usual = {letter for letter, count in expected.items() if 1_000 * count >= total}
    common = sum(count for letter, count in letters.items() if letter in usual)
    return total >= 1_000 and 20 * common < letters.total()


def _note_other_letters(files: Sequence[SentencePairs], kept: Sequence[_Kept]) -> list[str]:
    """Return remarks on files in which a side has other letters than in the first file."""
    expected = (_letters(kept[0].sources), _letters(kept[0].targets))
    notes = []
    for pairs, kept_pairs in zip(files[1:], kept[1:], strict=True):
        letters = (_letters(kept_pairs.sources), _letters(kept_pairs.targets))
        sides = zip(("source", "target"), letters, expected, strict=True)
        others = [name for name, *texts in sides if _has_other_letters(*texts)]
        if others:
            first = files[0].where
            notes.append(
                f"{pairs.where}: its {' and its '.join(others)} shares no usual letter with the same side of {first};"
                " are the"
                " sides exchanged?"
            )
    return notes


def prepare_corpus(
    files: Mapping[str, Sequence[SentencePairs]],
    titles: Mapping[str, str],
    keep: CorpusFilter,
    val: float,
    test: float,
    seed: int,
) -> Corpus:
    """Normalize, filter, split and pack the pairs of all files.

    Args:
        files: pairs of "train", which is split, and optionally of "val" and "test", which `max_length` and `prefixes`
            do not filter.
        titles: name of each part.
        keep: settings of the normalization and the filters.
        val, test, seed: shares and seed of the split, see `split_by_source`.
    """
    # Published validation and test files are not filtered.
    held_out_filter = replace(keep, max_length=None, prefixes=None, is_held_out=True)
    all_kept: list[_Kept] = []
    infos: dict[str, CorpusInfo] = {}
    hashes: dict[str, npt.NDArray[np.uint64]] = {}
    for part, part_files in files.items():
        filters = keep if part == "train" else held_out_filter
        kept = [_filtered(pairs, filters) for pairs in part_files]
        infos[part] = _info(titles[part], part_files, kept, filters)
        hashes[part] = hash_sources([source for kept_pairs in kept for source in kept_pairs.sources], seed)
        all_kept += kept
    rows = split_by_source(hashes["train"], val, test)
    start = 0
    for part, info in infos.items():
        if part != "train":
            rows[part] = torch.arange(start, start + info.kept)
        start += info.kept
    info = infos.pop("train")
    source, source_tokens = pack([line for kept_pairs in all_kept for line in kept_pairs.sources])
    target, target_tokens = pack([line for kept_pairs in all_kept for line in kept_pairs.targets], start=True)
    source_counts = source.counts(rows["train"], len(source_tokens))
    target_counts = target.counts(rows["train"], len(target_tokens))
    notes = [note for kept_pairs in all_kept for note in kept_pairs.notes]
    notes += _note_shared(hashes, rows["train"])
    notes += _note_other_letters([pairs for part_files in files.values() for pairs in part_files], all_kept)
    texts = [pair for kept_pairs in all_kept for pair in kept_pairs.texts]
    held_out_texts = {row: texts[row] for row in torch.cat((rows["val"], rows["test"])).tolist()}
    return Corpus(
        info=info,
        held_out=infos,
        source=source,
        target=target,
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        training_counts=(source_counts, target_counts),
        rows=rows,
        original_texts=held_out_texts,
        notes=notes,
    )
