"""From sentence pairs as written to packed numbers: normalise, filter, split without leaks."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.text_files import Faults
from datamodules.translation.packed_sentences import PackedPairs, PackedSentences, SentencePacker
from datamodules.translation.parallel_corpus import SentencePairs
from datamodules.translation.subwords import (
    AnyVocabulary,
    SubwordKind,
    SubwordVocabulary,
    spellings,
    train_subwords,
)
from datamodules.translation.text import (
    EOS,
    SOS,
    SPECIAL_TOKENS,
    Normalisation,
    Vocabulary,
    build_vocabulary,
    normalise,
    normalise_lines,
)

__all__ = [
    "TUTORIAL_PREFIXES",
    "Corpus",
    "CorpusFilter",
    "CorpusInfo",
    "hash_sources",
    "prepare_corpus",
    "split_by_source",
]

TUTORIAL_PREFIXES = (
    *("i am ", "i m ", "he is", "he s ", "she is", "she s "),
    *("you are", "you re ", "we are", "we re ", "they are", "they re "),
)
"""The English beginnings that PyTorch's translation tutorial keeps."""

Choice = Literal["error", "skip"]
_CHUNK = 1 << 16  # Pairs that are held as text at a time.


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
        info: of the training files.
        held_out: of the files of "val" and "test", where there are any.
        source, target: the sentences, those of the training files first.
        source_tokens, target_tokens: what the numbers mean.
        training_counts: how often each token of the source and of the target occurs in the training part, int64.
        rows: the rows of each part, int64: "train", "val" and "test".
        texts: by row, source and target of the held-out pairs as they were written; of a large file with few different
            sources some may be missing.
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

    def vocabularies(self, min_count: int, max_vocab_size: int | None) -> tuple[Vocabulary, Vocabulary]:
        """The vocabularies of both sides, from the training part only; arguments as of `build_vocabulary`.

        Raises:
            UserError: no token is frequent enough.
        """
        chosen = []
        sides = self.source_tokens, self.target_tokens
        for name, tokens, counts in zip(("source", "target"), sides, self.training_counts, strict=True):
            vocabulary = build_vocabulary(tokens, counts.tolist(), min_count, max_vocab_size)
            if len(vocabulary) == len(SPECIAL_TOKENS) and bool(counts.any()):
                raise UserError(
                    f"no {name} token occurs {min_count:,} times in the {len(self.rows['train']):,} training pairs of "
                    f"{self.info.title}; pass a smaller `min_count`"
                )
            chosen.append(vocabulary)
        return chosen[0], chosen[1]

    def subwords(self, kind: SubwordKind, vocab_size: int, joint: bool) -> tuple[SubwordVocabulary, SubwordVocabulary]:
        """Subwords of both sides, from the training part only; arguments as of `train_subwords`.

        Args:
            joint: one vocabulary for both sides.
        """
        counts = [
            {
                token: count
                for token, count in list(zip(tokens, found.tolist(), strict=True))[len(SPECIAL_TOKENS) :]
                if count
            }
            for tokens, found in zip((self.source_tokens, self.target_tokens), self.training_counts)
        ]
        if joint:
            both = train_subwords(Counter(counts[0]) + Counter(counts[1]), kind, vocab_size)
            return both, both
        source, target = (train_subwords(each, kind, vocab_size) for each in counts)
        return source, target

    def encoded(self, source: AnyVocabulary, target: AnyVocabulary) -> PackedPairs:
        """The pairs in the numbers of these vocabularies."""
        return PackedPairs(
            self.source.spelt(spellings(source, self.source_tokens)),
            self.target.spelt(spellings(target, self.target_tokens)),
        )

    def state(self) -> dict[str, Any]:
        """All of it in tensors and plain values, for a file."""
        state: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        state["info"] = asdict(self.info)
        state["held_out"] = {part: asdict(info) for part, info in self.held_out.items()}
        return state | {side: (state[side].tokens, state[side].offsets) for side in ("source", "target")}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Corpus":
        """The inverse of `state`."""
        held_out = {part: CorpusInfo(**info) for part, info in state["held_out"].items()}
        sides = {side: PackedSentences(*state[side]) for side in ("source", "target")}
        return cls(**(state | sides | {"info": CorpusInfo(**state["info"]), "held_out": held_out}))

    def source_sentences(self, rows: Tensor) -> list[str]:
        return [_as_text(self.source[row], self.source_tokens) for row in rows.tolist()]

    def target_sentences(self, rows: Tensor) -> list[str]:
        return [_as_text(self.target[row], self.target_tokens) for row in rows.tolist()]

    def source_texts(self, rows: Tensor) -> list[str]:
        return self._written(rows, self.source_sentences(rows), 0)

    def target_texts(self, rows: Tensor) -> list[str]:
        return self._written(rows, self.target_sentences(rows), 1)

    def _written(self, rows: Tensor, sentences: list[str], side: int) -> list[str]:
        return [
            self.texts[row][side] if row in self.texts else sentence
            for row, sentence in zip(rows.tolist(), sentences, strict=True)
        ]


def _as_text(numbers: list[int], tokens: list[str]) -> str:
    return " ".join(tokens[number] for number in numbers if number not in (SOS, EOS))


def hash_sources(sources: Sequence[str], seed: int) -> npt.NDArray[np.uint64]:
    """A hash of (seed, sentence) for each sentence."""
    key = str(seed).encode()[:64]
    digests = b"".join(hashlib.blake2b(sentence.encode(), digest_size=8, key=key).digest() for sentence in sources)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def split_by_source(
    hashes: npt.NDArray[np.uint64], val: float, test: float, train_share: float = 1.0
) -> dict[str, Tensor]:
    """The rows of each part; rows with the same source sentence are in one, so no held-out source is trained on.

    Sentences are ordered by a hash of (seed, sentence): the first make up the test part, the next validation. So the
    split does not depend on the order of the file, and hardly changes when sentences are added.

    Args:
        hashes: of the source sentence of each row, of `hash_sources`.
        val: share of the different sentences held out for validation.
        test: share of them held out for the test.
        train_share: share of the others to train on; smaller shares are subsets of larger ones.

    Returns:
        int64 tensors "train", "val" and "test", each sorted.
    """
    distinct, ranks = np.unique(hashes, return_inverse=True)
    rank = torch.from_numpy(ranks)
    held_out = [max(1, round(len(distinct) * share)) if share else 0 for share in (test, val)]
    in_test, in_val = rank < held_out[0], rank < sum(held_out)
    to_train_on = max(1, round((len(distinct) - sum(held_out)) * train_share))
    parts = {"train": ~in_val & (rank < sum(held_out) + to_train_on), "val": in_val & ~in_test, "test": in_test}
    return {part: mask.nonzero().flatten() for part, mask in parts.items()}


def _has_prefix(prefixes: Sequence[str] | str, normalisation: Normalisation) -> Callable[[str, str], bool]:
    """Whether one side of a pair begins so, which holds in either direction.

    Apostrophes count as spaces, as the tutorial reads them; a space at a prefix's end asks for the end of a token.
    """

    def plain(text: str) -> str:
        return " ".join(text.replace("'", " ").split()) if "'" in text else text

    prefixes = TUTORIAL_PREFIXES if prefixes == "tutorial" else prefixes
    prefixes = (prefixes,) if isinstance(prefixes, str) else prefixes
    wanted = tuple(plain(normalise(prefix, normalisation)) + " " * prefix.endswith(" ") for prefix in prefixes)
    return lambda source, target: plain(source).startswith(wanted) or plain(target).startswith(wanted)


@dataclass
class _LeftOut:
    """Lines of one file that are not used, beside those that its reader found."""

    empty: list[int] = field(default_factory=list)
    long: list[int] = field(default_factory=list)
    without_prefix: int = 0

    def settle(self, pairs: SentencePairs, keep: CorpusFilter) -> tuple[list[str], dict[str, int]]:
        """Notes on what was left out, and how many lines that were, by reason.

        Raises:
            UserError: lines are faulty or too long and may not be skipped.
        """
        pairs.count -= len(self.empty)
        pairs.faults.add(f"with an empty side in {keep.normalisation} normalisation", self.empty)
        hints = {
            "not in UTF-8": "; save the file as UTF-8",
            "without a tab": "; expected SOURCE<tab>TARGET (two files are `source_file` and `target_file`, and names of"
            " comma-separated files and JSON lines end in .csv and .jsonl)",
        }
        hint = "".join(text for reason, text in hints.items() if reason in pairs.faults.lines)
        long = Faults()
        long.add(f"over max_length={keep.max_length}", self.long)
        notes = [
            f"{pairs.where}: {pairs.header}" if pairs.header else "",
            pairs.faults.settle(keep.on_bad_lines, pairs.where, pairs.read, "on_bad_lines", hint),
            long.settle(keep.on_long_sentences, pairs.where, pairs.read, "on_long_sentences"),
        ]
        faults = {reason: len(lines) for reason, lines in (pairs.faults.lines | long.lines).items()}
        others = {"without a prefix": self.without_prefix} if self.without_prefix else {}
        return [note for note in notes if note], pairs.apart | faults | others


_Texts = list[tuple[str, str]]


def _kept(
    pairs: SentencePairs, keep: CorpusFilter, left_out: _LeftOut
) -> Iterator[tuple[list[str], list[str], _Texts]]:
    """Sources and targets that are kept, and both as written, `_CHUNK` at most at a time; the others are noted."""
    begins = _has_prefix(keep.prefixes, keep.normalisation) if keep.prefixes else None
    each = iter(pairs)
    while chunk := list(islice(each, _CHUNK)):
        sources, targets = (
            normalise_lines(side, keep.normalisation) for side in ([p.source for p in chunk], [p.target for p in chunk])
        )
        kept: tuple[list[str], list[str], _Texts] = [], [], []
        for pair, source, target in zip(chunk, sources, targets):
            if not (source and target):
                left_out.empty.append(pair.number)
            # Words are separated by single spaces, and the end mark is one more.
            elif keep.max_length and max(source.count(" "), target.count(" ")) + 2 > keep.max_length:
                left_out.long.append(pair.number)
            elif begins is not None and not begins(source, target):
                left_out.without_prefix += 1
            else:
                kept[0].append(source)
                kept[1].append(target)
                kept[2].append((pair.source, pair.target))
        yield kept


class _CorpusBuilder:
    """Packs files one after the other, so that what is held of them is the numbers of their tokens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.source, self.target = SentencePacker(), SentencePacker(start=True)
        self.hashes: list[npt.NDArray[np.uint64]] = []
        self.notes: list[str] = []
        self.texts: dict[int, tuple[str, str]] = {}
        self.count = 0

    def _add_texts(self, texts: _Texts, hashes: npt.NDArray[np.uint64], held_out: float) -> None:
        """Keep the pairs as written that may be held out, which are those of the smallest hashes."""
        # All of the first ones: of few sentences another share than expected may have hashes below a limit.
        limit = 1.0 if self.count < _CHUNK else 0.001 + 2 * held_out
        chosen = (hashes < limit * 2.0**64).nonzero()[0].tolist()
        self.texts |= {self.count + place: texts[place] for place in chosen}
        self.count += len(texts)

    def add(self, files: Sequence[SentencePairs], title: str, keep: CorpusFilter, held_out: float) -> CorpusInfo:
        """The files of one part, and their counts.

        Args:
            held_out: share of the source sentences that are not trained on.

        Raises:
            UserError: lines are faulty or too long and may not be skipped, or nothing is left.
        """
        counts: Counter[str] = Counter()
        hashes = [np.zeros(0, dtype=np.uint64)]
        for pairs in files:
            found = _LeftOut()
            for sources, targets, texts in _kept(pairs, keep, found):
                self.source.add(sources)
                self.target.add(targets)
                hashed = hash_sources(sources, self.seed)
                self._add_texts(texts, hashed, held_out)
                hashes.append(hashed)
            notes, left_out = found.settle(pairs, keep)
            self.notes += notes
            counts.update(left_out)
        read, of_part = sum(pairs.read for pairs in files), np.concatenate(hashes)
        if not len(of_part):
            filters = {"max_length": keep.max_length, "prefixes": keep.prefixes, "normalisation": keep.normalisation}
            named = ", ".join(f"{name}={json.dumps(value)}" for name, value in filters.items() if value)
            where = ", ".join(pairs.where for pairs in files)
            raise UserError(f"{where}: none of {read:,} pairs is left after {named}")
        self.hashes.append(of_part)
        return CorpusInfo(title, read, len(of_part), len(np.unique(of_part)), dict(counts))


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
    train_share: float = 1.0,
) -> Corpus:
    """Normalise, filter, split and pack.

    Args:
        files: of "train", which is split, and of "val" and "test", which are used whole: `max_length` and `prefixes`
            of `keep` are not theirs. Without "train" there are no counts of tokens.
        titles: what each part is called.
        val, test, seed, train_share: of the split, see `split_by_source`.
    """
    builder = _CorpusBuilder(seed)
    whole = replace(keep, max_length=None, prefixes=None)
    infos = {
        part: builder.add(of_part, titles[part], *((keep, val + test) if part == "train" else (whole, 1.0)))
        for part, of_part in files.items()
    }
    hashes = dict(zip(infos, builder.hashes))
    rows = split_by_source(hashes.get("train", np.zeros(0, dtype=np.uint64)), val, test, train_share)
    start = 0
    for part, info in infos.items():
        if part != "train":
            rows[part] = torch.arange(start, start + info.kept)
        start += info.kept
    info = infos.pop("train", next(iter(infos.values())))
    (source, source_tokens), (target, target_tokens) = builder.source.packed(), builder.target.packed()
    counts = source.counts(rows["train"], len(source_tokens)), target.counts(rows["train"], len(target_tokens))
    notes = builder.notes + (_note_shared(hashes, rows["train"]) if "train" in hashes else [])
    held_out = torch.cat((rows["val"], rows["test"])).tolist()
    texts = {row: builder.texts[row] for row in held_out if row in builder.texts}
    return Corpus(info, infos, source, target, source_tokens, target_tokens, counts, rows, texts, notes)
