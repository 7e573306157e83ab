"""Data module of sentence pairs for translation: files, filters, split without leaks, vocabularies, loaders."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.base import BaseDataModule
from datamodules.contract import Transient
from datamodules.errors import UserError, spelled
from datamodules.loading.table_files import parse_columns
from datamodules.notes import inform, inform_if_slow, warn
from datamodules.ranges import COUNT, Range, check_choice, check_ranges
from datamodules.translation.corpus import Choice, Corpus, CorpusFilter, CorpusInfo, prepare_corpus
from datamodules.translation.loaders import (
    PackedPairs,
    PackedSentences,
    SentenceEvaluationLoader,
    SentenceTrainLoader,
    TranslationBatch,
    pack,
)
from datamodules.translation.parallel_corpus import (
    BUNDLED_TITLE,
    USES,
    InputSentence,
    Pair,
    SentencePairs,
    bundled_pairs,
    check_sentence,
    read_aligned,
    read_inputs,
    read_pairs,
)
from datamodules.translation.text import (
    EOS,
    SOS,
    AnyVocabulary,
    Normalization,
    SubwordKind,
    encode_tokens,
    normalize,
    normalize_lines,
    vocabulary_from_state,
)

Files = list[str] | str | None

_FILES = {
    "train": ("data_file", "source_file", "target_file"),
    "val": ("val_file", "val_source_file", "val_target_file"),
    "test": ("test_file", "test_source_file", "test_target_file"),
}
"""Parameters of the files of each part: files of pairs, or aligned files."""
_FRACTIONS = {"val": 0.05, "test": 0.1}
"""Default share of the source sentences that is held out for a part without files."""
_SUBWORDS = 8000  # Default size of each subword vocabulary.


def _listed(files: Files) -> list[str]:
    return [files] if isinstance(files, str) else list(files or ())


def _paths(files: Files) -> Files:
    """Return the files with ~ expanded: a list of several, a string for one, None for none."""
    names = [str(Path(name).expanduser()) for name in _listed(files)]
    return names if len(names) > 1 else names[0] if names else None


def _check_files(part: str, pairs: Files, source: Files, target: Files) -> None:
    """Check that a part has files of pairs or aligned files, and the same number of aligned files on both sides."""
    names = [spelled(name) for name in _FILES[part]]
    if (source is None) != (target is None):
        present, missing = (names[1], names[2]) if source else (names[2], names[1])
        raise UserError(f"{present} needs the file of its translations; pass {missing} too")
    if pairs is not None and source is not None:
        raise UserError(f"found both {names[0]} and {names[1]}; pass files of pairs, or aligned files")
    m, n = len(_listed(source)), len(_listed(target))
    if m != n:
        raise UserError(
            f"{names[1]} has {m} files and {names[2]} {n}; each file of sources needs a file of translations"
        )


def _check_fraction(part: str, fraction: float | None, has_files: bool) -> None:
    name = f"{part}_fraction"
    if fraction is not None and not 0 <= fraction <= 1:
        raise UserError(f"{spelled(name, fraction)} is outside 0 to 1; pass {spelled(name, 0.1)}")
    if fraction and has_files:
        raise UserError(
            f"found {spelled(name, fraction)} beside files of that part, {spelled(f'{part}_file')} or"
            f" {spelled(f'{part}_source_file')}, which replace it; pass {spelled(name, 0)}"
        )


def _in_one_line(text: str) -> str:
    return text.replace("\n", " ")


class TranslationDataModule(BaseDataModule):
    """Sentence pairs in batches of similar length, exact on any number of devices.

    Batches are `TranslationBatch`es of token numbers: PAD is 0, SOS 1, EOS 2, and UNK, any unknown token, 3.
    Both vocabularies come from the training part and are saved in the checkpoint. Pairs with the same source sentence
    are all in one part of the training files. Published validation and test files are not filtered.

    Args:
        data_file: pairs, one per line separated by a tab, or .csv with a header; also .gz, .bz2, .xz or .zip; a list
            for several files. Without any file a small artificial French-English corpus is used.
        source_file: source sentences, one per line; requires `target_file` and replaces `data_file`. Lists of several
            files have the same order.
        target_file: translations of `source_file`, line by line.
        val_file: pairs for validation, as for `data_file`; nothing is held out of the training files then. `max_length`
            and `prefixes` do not filter them.
        val_source_file: source sentences for validation, instead of `val_file`.
        val_target_file: translations of `val_source_file`, line by line.
        test_file: pairs for the test, as for `val_file`.
        test_source_file: source sentences for the test, instead of `test_file`.
        test_target_file: translations of `test_source_file`, line by line.
        columns: columns of source and target in files of pairs with more than two columns, by name or by number from
            1, as in source=2,target=4; also separator=; and quotes=yes for other forms.
        reverse: translate from the second column into the first.
        max_length: maximum length of a sentence on both sides, in words with the end mark, also with `subwords`, which
            are learned from the kept pairs. `max_tokens` limits the tokens of a batch, and so its memory.
        prefixes: "tutorial" keeps pairs that begin with an English prefix of PyTorch's translation tutorial.
        normalization: "unicode" keeps every script and separates punctuation; "none" only splits at spaces; "tutorial"
            keeps a to z, ! and ?, and "tutorial-2017" also the full stop, as the first edition of PyTorch's tutorial.
            11,445 of the tutorial's pairs remain with "tutorial", and 10,599 with "tutorial-2017". By default
            "unicode", and "none" with `subwords`.
        subwords: "bpe" learns tokens, parts of words, from the training part. No word is unknown, and translations keep
            capitals and punctuation. By default "bpe", and "none" if `normalization` or `prefixes` is given, or no
            file.
        vocab_size: maximum number of tokens of each side: by default 8,000 subwords, or all words. The most frequent
            words are kept, and special tokens are not counted.
        val_fraction: share of the source sentences held out for validation; by default 0.05, or 0 with `val_file`.
        test_fraction: share of the source sentences held out for the test; by default 0.1, or 0 with `test_file`.
        batch_size: sentences on one device in one forward pass.
        eval_batch_size: sentences in one forward pass of validation, test and prediction; fewer if they are long.
        max_tokens: tokens on one device in one forward pass, both sides and padding counted; replaces `batch_size`.
        on_bad_lines: whether lines without a tab, with an empty side, not in UTF-8 or over 10,000 bytes are an error,
            or skipped.
        seed: seed of the split and the shuffle order.
        predict_inputs: sentences to translate; "-" reads standard input; "@FILE" and names of files read their lines.

    Raises:
        UserError: files are missing, damaged or faulty, or leave nothing to train on.
    """

    tokens_parameter = "max_tokens"
    path_parameter = "data_file"

    def __init__(
        self,
        data_file: Files = None,
        source_file: Files = None,
        target_file: Files = None,
        val_file: Files = None,
        val_source_file: Files = None,
        val_target_file: Files = None,
        test_file: Files = None,
        test_source_file: Files = None,
        test_target_file: Files = None,
        columns: str | None = None,
        reverse: bool = False,
        max_length: int | None = None,
        prefixes: Literal["tutorial"] | None = None,
        normalization: Normalization | None = None,
        subwords: SubwordKind | None = None,
        vocab_size: int | None = None,
        val_fraction: float | None = None,
        test_fraction: float | None = None,
        batch_size: int = 64,
        eval_batch_size: int = 256,
        max_tokens: int | None = None,
        on_bad_lines: Choice = "error",
        seed: int = 1,
        predict_inputs: Transient[Sequence[str] | None] = None,
    ) -> None:
        super().__init__()
        data_file, source_file, target_file = map(_paths, (data_file, source_file, target_file))
        val_file, val_source_file, val_target_file = map(_paths, (val_file, val_source_file, val_target_file))
        test_file, test_source_file, test_target_file = map(_paths, (test_file, test_source_file, test_target_file))
        train = (data_file, source_file, target_file)
        val, test = (val_file, val_source_file, val_target_file), (test_file, test_source_file, test_target_file)
        of_parts = {"train": train, "val": val, "test": test}
        for part, files in of_parts.items():
            _check_files(part, *files)
        _check_fraction("val", val_fraction, any(val))
        _check_fraction("test", test_fraction, any(test))
        if any(val + test) and not any(train):
            raise UserError(
                f"found files for validation or the test, but no training files; pass {spelled('data_file')} too"
            )
        parse_columns(columns, USES)
        if columns is not None and not any(files[0] for files in of_parts.values()):
            raise UserError(f"only {spelled('data_file')} has columns", setting="columns", value=columns)
        check_ranges(
            max_length=(max_length, Range(2, whole=True)),  # A token and the end mark.
            vocab_size=(vocab_size, COUNT),
            batch_size=(batch_size, COUNT),
            eval_batch_size=(eval_batch_size, COUNT),
            max_tokens=(max_tokens, COUNT),
        )
        if prefixes is not None:
            check_choice("prefixes", prefixes, ("tutorial",))
        asks_for_words = normalization is not None or prefixes is not None
        if subwords is None:
            subwords = "none" if asks_for_words or not any(train) else "bpe"
        if subwords not in get_args(SubwordKind):
            raise UserError(f"no subwords {subwords!r}; expected one of {', '.join(get_args(SubwordKind))}")
        if subwords != "none":
            if normalization not in (None, "none"):
                kind = spelled("subwords", subwords)
                raise UserError(f"{kind} are learnt from the text as it is: leave {spelled('normalization')} out")
            vocab_size = vocab_size or _SUBWORDS
        if normalization is None:
            normalization = "unicode" if subwords == "none" else "none"
        # Raises for an unknown name now, before the corpus is read.
        normalize("", normalization)
        predict_inputs = list(predict_inputs) if predict_inputs else None
        self.save_hyperparameters()
        self.batch_size = batch_size
        self._corpus: Corpus | None = None
        self._vocabularies: tuple[AnyVocabulary, AnyVocabulary] | None = None
        self._pairs: PackedPairs | None = None
        self.normalization: Normalization = normalization
        """Normalization of the sentences. A checkpoint replaces the constructor's value."""
        self._inputs: list[InputSentence] | None = None

    @property
    def info(self) -> CorpusInfo:
        """Name of the corpus, and its counts once it has been read."""
        return self._corpus.info if self._corpus else CorpusInfo(self._title("train"))

    @property
    @override
    def title(self) -> str:
        return self.info.title

    def _files(self, part: str) -> tuple[list[str], list[str], list[str]]:
        """Return the files of pairs of a part, and its aligned source and target files."""
        pairs, source, target = (_listed(self.hparams[name]) for name in _FILES[part])
        return pairs, source, target

    def _title(self, part: str) -> str:
        names = [Path(name).name for names in self._files(part) for name in names]
        return ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4) if names else BUNDLED_TITLE

    def _fraction(self, part: str) -> float:
        """Return the share of the training files' source sentences to hold out for a part."""
        fraction: float | None = self.hparams[f"{part}_fraction"]
        default = 0.0 if any(self._files(part)) else _FRACTIONS[part]
        return default if fraction is None else float(fraction)

    @property
    @override
    def sizes(self) -> dict[str, int]:
        """Number of pairs in "train", "val" and "test", once the corpus has been read."""
        return {part: len(rows) for part, rows in self._corpus.rows.items()} if self._corpus else {}

    @property
    @override
    def left_out(self) -> Mapping[str, int]:
        """Number of unused lines, by reason. For held-out files the reason has the part: "blank in val"."""
        if self._corpus is None:
            return {}
        held_out = self._corpus.held_out.items()
        of_parts = {f"{why} in {part}": count for part, info in held_out for why, count in info.left_out.items()}
        return dict(self._corpus.info.left_out) | of_parts

    @property
    @override
    def validates(self) -> bool:
        return any(self._files("val")) or self._fraction("val") > 0

    @property
    def rows(self) -> dict[str, Tensor]:
        """Row numbers of the pairs of "train", "val" and "test", int64."""
        return self._load().rows

    @property
    def source_vocabulary(self) -> AnyVocabulary:
        """Vocabulary of the source. Reads the corpus, if called before `setup`."""
        return self.vocabularies()[0]

    @property
    def target_vocabulary(self) -> AnyVocabulary:
        """Vocabulary of the target. Reads the corpus, if called before `setup`."""
        return self.vocabularies()[1]

    def _read(self, part: str) -> list[SentencePairs]:
        """Read the files of a part."""
        files, sources, targets = self._files(part)
        if files:
            pairs = [read_pairs(Path(name), self.hparams.columns) for name in files]
        elif sources:
            pairs = [read_aligned(Path(source), Path(target)) for source, target in zip(sources, targets, strict=True)]
        else:
            bundled = bundled_pairs()
            warn(f"note: {spelled('data_file')} is not given: training on {len(bundled):,} {BUNDLED_TITLE}")
            pairs = [SentencePairs(BUNDLED_TITLE, [Pair(i, *pair) for i, pair in enumerate(bundled, 1)])]
        return [file_pairs.reversed() for file_pairs in pairs] if self.hparams.reverse else pairs

    def _load(self) -> Corpus:
        """Return the corpus. It is read once."""
        if self._corpus is None:
            options = self.hparams
            keep = CorpusFilter(self.normalization, options.max_length, options.prefixes, options.on_bad_lines)
            parts = [part for part in _FILES if part == "train" or any(self._files(part))]
            titles = {part: self._title(part) for part in parts}
            shares = self._fraction("val"), self._fraction("test")
            with inform_if_slow(f"reading {titles['train']} ..."):
                read = {part: self._read(part) for part in parts}
                self._corpus = prepare_corpus(read, titles, keep, *shares, options.seed)
            for note in self._corpus.notes:
                warn(f"note: {note}")
        return self._corpus

    def _part_to_use(self, part: str) -> Corpus:
        """Return the corpus. Raise a UserError if a part has no pairs."""
        corpus = self._load()
        if not len(corpus.rows[part]):
            raise UserError(
                f"{corpus.info.title}: nothing is left for the {part} part of {corpus.info.kept:,} pairs: all pairs"
                f" with the same source go into one part, and {corpus.info.sources:,} of these sentences are different;"
                f" pass more sentences, or {spelled('val_fraction', 0)} and {spelled('test_fraction', 0)}"
            )
        return corpus

    def vocabularies(self) -> tuple[AnyVocabulary, AnyVocabulary]:
        """Return the vocabularies of source and target. Reads the corpus, if called before `setup`."""
        if self._vocabularies is None:
            corpus, options = self._part_to_use("train"), self.hparams
            if options.subwords == "none":
                self._vocabularies = corpus.vocabularies(options.vocab_size)
            else:
                size = options.vocab_size or _SUBWORDS
                # Logged before, without `inform_if_slow`, because sentencepiece blocks all other threads.
                inform(f"learning up to {size:,} subwords of each side from {len(corpus.rows['train']):,} pairs ...")
                self._vocabularies = corpus.subwords(size)
        return self._vocabularies

    @property
    def encoded_pairs(self) -> PackedPairs:
        """All kept pairs, as token numbers of the vocabularies."""
        if self._pairs is None:
            self._pairs = self._load().encoded(*self.vocabularies())
        return self._pairs

    @override
    def setup(self, stage: str) -> None:
        """Read the corpus for "fit", "validate" and "test"; "predict" does not need it."""
        if stage == "predict":
            return
        part = {"fit": "train", "validate": "val", "test": "test"}[stage]
        self._load()
        if part == "train" or self._fraction(part) > 0:
            self._part_to_use(part)

    @override
    def train_dataloader(self) -> SentenceTrainLoader:
        options, corpus = self.hparams, self._load()
        loader = SentenceTrainLoader(
            self.encoded_pairs,
            corpus.rows["train"],
            self.batch_size,
            options.seed,
            *self._process[:2],
            options.max_tokens,
            shuffle=self._shuffles,
        )
        source, target = map(len, self.vocabularies())
        inform(f"{corpus.info.describe()}; vocabularies of {source:,} and {target:,} tokens")
        for part, info in corpus.held_out.items():
            inform(f"{'validation' if part == 'val' else part}: {info.describe()}")
        return loader

    def _evaluation_loader(self, part: str) -> SentenceEvaluationLoader | list[SentenceEvaluationLoader]:
        rows, size = self.rows[part], self.hparams.eval_batch_size
        if not len(rows):
            return []
        return SentenceEvaluationLoader(self.encoded_pairs, rows, size, *self._process[:2])

    @override
    def val_dataloader(self) -> SentenceEvaluationLoader | list[SentenceEvaluationLoader]:
        """Return the loader of the validation part, or an empty list if there is none."""
        return self._evaluation_loader("val")

    @override
    def test_dataloader(self) -> SentenceEvaluationLoader | list[SentenceEvaluationLoader]:
        """Return the loader of the test part, or an empty list if there is none."""
        return self._evaluation_loader("test")

    @override
    def sample_names(self, part: str) -> Sequence[str]:
        """Return the source sentences of a part, as `source_texts`, by pair number; "" for pairs of other parts."""
        rows = self.rows[part]
        sentences = dict(zip(rows.tolist(), self.source_texts(rows), strict=True))
        return [sentences.get(row, "") for row in range(len(self._load().source))]

    @override
    def numbered(self, batches: Iterable[Any]) -> Iterator[Any]:
        position = 0
        for batch in batches:
            yield batch._replace(numbers=torch.arange(position, position + len(batch.numbers)))
            position += len(batch.numbers)

    @override
    def set_inputs(self, inputs: Any) -> None:
        """Set the sentences to translate: a string or a list of strings."""
        sentences = [inputs] if isinstance(inputs, str) else list(inputs)
        if not sentences or not all(isinstance(sentence, str) for sentence in sentences):
            raise UserError("no sentence to translate; pass a text, or a list of texts")
        self._inputs = [check_sentence(text, text) for text in sentences]

    def _sentences_to_predict(self) -> list[InputSentence]:
        """Return the inputs of `predict`. They are read once, because standard input cannot be read again."""
        if self._inputs is None:
            self._inputs = read_inputs(self.hparams.predict_inputs or [])
        return self._inputs

    @property
    def _normalized_inputs(self) -> list[str]:
        texts = [_in_one_line(sentence.text) for sentence in self._sentences_to_predict()]
        return normalize_lines(texts, self.normalization)

    @property
    @override
    def prediction_names(self) -> list[str]:
        """Sentences as they were typed; for a sentence without words, its line."""
        inputs = zip(self._normalized_inputs, self._sentences_to_predict(), strict=True)
        return [_in_one_line(sentence.text) if text else sentence.where for text, sentence in inputs]

    @property
    @override
    def unreadable_inputs(self) -> Mapping[int, UserError]:
        return {i: sentence.problem for i, sentence in enumerate(self._inputs or ()) if sentence.problem}

    @property
    @override
    def unclear_inputs(self) -> Mapping[int, str]:
        """Remarks on inputs without words after normalization, by index."""
        note = f"unclear: nothing is left in {self.normalization} normalization"
        inputs = self._inputs or []
        texts = self._normalized_inputs if inputs else []
        return {i: note if inputs[i].text else "blank line" for i, text in enumerate(texts) if not text}

    @override
    def predict_dataloader(self) -> SentenceEvaluationLoader:
        """Return a loader of the sentences in ``predict_inputs``, with empty targets."""
        sentences = self._normalized_inputs
        rows = [i for i, sentence in enumerate(sentences) if sentence]
        if not rows:
            first = self._sentences_to_predict()[0]
            empty = f"nothing is left of the sentence {first.text!r} in {self.normalization} normalization"
            raise first.problem or UserError(f"{empty}; leave such sentences out")
        source, tokens = pack(sentences)
        count = len(sentences)
        target = PackedSentences(torch.tensor([SOS, EOS]).repeat(count).int(), torch.arange(count + 1) * 2)
        pairs = PackedPairs(source.retokenized(encode_tokens(self.source_vocabulary, tokens)), target)
        size = self.hparams.eval_batch_size
        return SentenceEvaluationLoader(pairs, torch.tensor(rows), size, *self._process[:2], bucket=False)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the tokens to the device. Lengths and numbers stay on the CPU: no read of them synchronizes."""
        if not isinstance(batch, TranslationBatch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        source, target = (side.to(device, non_blocking=True) for side in (batch.source, batch.target))
        return batch._replace(source=source, target=target)

    def source_sentences(self, numbers: Tensor) -> list[str]:
        """Return the normalized source sentences of pairs, by number in a batch."""
        return self._load().sentences(numbers, 0)

    def target_sentences(self, numbers: Tensor) -> list[str]:
        """Return the normalized reference translations, with unknown words: UNK could match a prediction."""
        return self._load().sentences(numbers, 1)

    def source_texts(self, numbers: Tensor) -> list[str]:
        """Return the original source sentences of pairs by number; in the training part, the normalized ones."""
        return self._load().original_sentences(numbers, 0)

    def target_texts(self, numbers: Tensor) -> list[str]:
        """Return the original translations of pairs by number; in the training part, the normalized ones."""
        return self._load().original_sentences(numbers, 1)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the vocabularies and the normalization, with which the network translates without the corpus."""
        source, target = self.vocabularies()
        return {"source_tokens": source.state, "target_tokens": target.state, "normalization": self.normalization}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        source = vocabulary_from_state(state_dict["source_tokens"])
        saved = source, vocabulary_from_state(state_dict["target_tokens"])
        if self.normalization != state_dict["normalization"]:
            # Lightning calls `setup` before it reads the checkpoint, so the corpus must be read and normalized again.
            self.normalization = state_dict["normalization"]
            self._corpus = None
            warn(f"note: the saved normalization is used: {self.normalization}")
        elif self._vocabularies not in (None, saved):
            warn("note: the saved vocabularies are used; the vocabularies of the training part differ")
        self._vocabularies, self._pairs = saved, None
