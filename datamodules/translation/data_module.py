"""Sentence pairs for translation: read, filtered, split without leaks and packed, ready to be sliced into batches.

The 135,842 pairs of the classic tutorial's file load in about three seconds; a batch of 256 takes a tenth of a
millisecond.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from datamodules.base import BaseDataModule
from datamodules.contract import DataContract
from datamodules.errors import UserError
from datamodules.loading.text_files import Faults
from datamodules.ranges import COUNT, FINITE, SHARE_ABOVE_0, check_ranges
from datamodules.translation.bundled_corpus import BUNDLED_TITLE, bundled_pairs
from datamodules.translation.corpus import Choice, Corpus, CorpusFilter, CorpusInfo, prepare_corpus
from datamodules.translation.loaders import SentenceEvaluationLoader, SentenceTrainLoader
from datamodules.translation.packed_sentences import PackedPairs, PackedSentences, TranslationBatch, pack
from datamodules.translation.parallel_corpus import GivenSentence, SentencePairs, read_aligned, read_inputs, read_pairs
from datamodules.translation.text import EOS, SOS, Normalisation, Vocabulary, normalise, normalise_lines

__all__ = ["TranslationDataModule"]

log = logging.getLogger("lightning_recipes")
_inform, _warn = rank_zero_only(log.info), rank_zero_only(log.warning)


class TranslationDataParameters(AttributeDict):
    """The parameters of `TranslationDataModule`, as ``hparams`` holds them."""

    data_file: str | None
    source_file: str | None
    target_file: str | None
    columns: list[str] | None
    reverse: bool
    max_length: int | None
    prefixes: list[str] | str | None
    min_count: int
    max_vocab_size: int | None
    val_fraction: float
    test_fraction: float
    train_share: float
    eval_batch_size: int
    max_tokens: int | None
    bucket: bool
    on_bad_lines: Choice
    on_long_sentences: Choice
    seed: int
    predict_inputs: Sequence[str] | None


class TranslationDataModule(BaseDataModule):
    """Sentence pairs in batches of similar length, exact on any number of devices.

    Batches are `TranslationBatch`es of token numbers: PAD is 0, SOS 1, EOS 2, and UNK, any other token, 3.
    Both vocabularies come from the training part and are saved in the checkpoint. No source sentence is in two parts.

    Args:
        data_file: pairs, one per line with a tab between, or .csv, or .jsonl; also .gz or .zip. Without any file a
            small artificial French-English corpus is generated.
        source_file: source sentences, one per line; goes with `target_file` and replaces `data_file`.
        target_file: their translations, line by line.
        columns: the columns or keys of source and target in `data_file`, by name or by number from 1, as in '[en, fr]';
            by default what the first line names, or the first two.
        reverse: translate from the second column into the first.
        max_length: longest sentence kept, in tokens with the end mark, on both sides.
        prefixes: keep pairs of which one side begins with one of these; "tutorial" means the English beginnings of
            PyTorch's translation tutorial.
        normalisation: "unicode" keeps every script and makes tokens of punctuation; "none" only splits at spaces;
            "tutorial" and "tutorial-2017" leave a to z and some punctuation.
        min_count: how often a token has to occur in the training part to be in the vocabulary.
        max_vocab_size: tokens in each vocabulary at most, the most frequent ones; the special ones are not counted.
        val_fraction: share of the source sentences held out for validation.
        test_fraction: share of them held out for the test.
        train_share: share of the other source sentences to train on; smaller shares are subsets of larger ones.
        batch_size: sentences on one device in one forward pass.
        eval_batch_size: sentences in one forward pass of validation, test and prediction.
        max_tokens: tokens on one device in one forward pass, both sides and padding counted; replaces `batch_size`.
        bucket: put sentences of similar length into a batch.
        on_bad_lines: stop at lines without a tab, with an empty side or not in UTF-8, or skip them.
        on_long_sentences: skip pairs over `max_length`, or stop at them.
        seed: of the split and the shuffle order.
        predict_inputs: sentences to translate; "-" reads standard input, "@FILE" and names of .txt files their lines,
            and folders those of their .txt files.

    Raises:
        UserError: for files that are missing, damaged, faulty or leave nothing to train on.
    """

    free_parameters = DataContract.free_parameters | {"max_tokens"}
    tokens_parameter = "max_tokens"

    hparams: TranslationDataParameters

    def __init__(
        self,
        data_file: str | None = None,
        source_file: str | None = None,
        target_file: str | None = None,
        columns: list[str] | None = None,
        reverse: bool = False,
        max_length: int | None = None,
        prefixes: list[str] | str | None = None,
        normalisation: Normalisation = "unicode",
        min_count: int = 1,
        max_vocab_size: int | None = None,
        val_fraction: float = 0.05,
        test_fraction: float = 0.1,
        train_share: float = 1.0,
        batch_size: int = 64,
        eval_batch_size: int = 256,
        max_tokens: int | None = None,
        bucket: bool = True,
        on_bad_lines: Choice = "error",
        on_long_sentences: Choice = "skip",
        seed: int = 1,
        predict_inputs: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if (source_file is None) != (target_file is None):
            given, other = ("source", "target") if source_file else ("target", "source")
            raise UserError(f"`{given}_file` needs the file of its translations; pass `{other}_file` too")
        if data_file is not None and source_file is not None:
            raise UserError("found both `data_file` and `source_file`; pass one file of pairs, or two aligned files")
        if columns is not None:
            columns = [str(column) for column in columns]
            if len(columns) != 2 or source_file is not None:
                raise UserError(f"columns={columns}: expected the two of `data_file`, as in columns=['en', 'fr']")
        for name, share in (("val", val_fraction), ("test", test_fraction)):
            if not 0 <= share <= 1:
                raise UserError(f"{name}_fraction={share} is outside 0 to 1; pass {name}_fraction=0.1")
        check_ranges(
            max_length=(max_length, FINITE),
            min_count=(min_count, COUNT),
            max_vocab_size=(max_vocab_size, COUNT),
            batch_size=(batch_size, COUNT),
            eval_batch_size=(eval_batch_size, COUNT),
            max_tokens=(max_tokens, COUNT),
            train_share=(train_share, SHARE_ABOVE_0),
        )
        if max_length is not None and max_length < 2:
            raise UserError(
                f"max_length={max_length} leaves no room for a token and the end mark; pass one such as max_length=10"
            )
        if max_tokens and not bucket:
            raise UserError(
                "`max_tokens` needs sentences of similar length in a batch; pass `batch_size` with bucket=False"
            )
        # Refuses an unknown name here.
        normalise("", normalisation)
        data_file, source_file, target_file = (
            str(Path(name).expanduser()) if name else None for name in (data_file, source_file, target_file)
        )
        predict_inputs = list(predict_inputs) if predict_inputs else None
        self.save_hyperparameters()
        self.batch_size = batch_size
        self._corpus: Corpus | None = None
        self._vocabularies: tuple[Vocabulary, Vocabulary] | None = None
        self._pairs: PackedPairs | None = None
        self.normalisation: Normalisation = normalisation
        """The form of the sentences; a checkpoint's replaces that of the constructor."""
        self._inputs: list[GivenSentence] | None = None

    @property
    def info(self) -> CorpusInfo:
        """What the corpus is called, and its size once it has been read."""
        options = self.hparams
        name = options.data_file or (options.source_file and f"{options.source_file}, {options.target_file}")
        return self._corpus.info if self._corpus else CorpusInfo(Path(name).name if name else BUNDLED_TITLE)

    @property
    @override
    def title(self) -> str:
        return self.info.title

    @property
    @override
    def sizes(self) -> dict[str, int]:
        """Pairs in each part, once the corpus has been read: "train", "val", "test"."""
        return {part: len(rows) for part, rows in self._corpus.rows.items()} if self._corpus else {}

    @property
    @override
    def left_out(self) -> Mapping[str, int]:
        """Lines of the corpus that are not used, by reason; with those that are kept they are all that were read."""
        return self._corpus.info.left_out if self._corpus else {}

    @property
    @override
    def validates(self) -> bool:
        return float(self.hparams.val_fraction) > 0

    @property
    def rows(self) -> dict[str, Tensor]:
        """The numbers of the pairs of each part, int64: "train", "val" and "test"."""
        return self._load().rows

    @property
    def source_vocabulary(self) -> Vocabulary:
        """The tokens of the source; before `setup`, this reads the corpus."""
        return self.vocabularies()[0]

    @property
    def target_vocabulary(self) -> Vocabulary:
        """The tokens of the target; before `setup`, this reads the corpus."""
        return self.vocabularies()[1]

    def _read(self) -> SentencePairs:
        options = self.hparams
        if options.data_file:
            pairs = read_pairs(Path(options.data_file), options.columns)
        elif options.source_file and options.target_file:
            pairs = read_aligned(Path(options.source_file), Path(options.target_file))
        else:
            _warn(f"note: `data_file` is not given: training on {len(bundled_pairs()):,} {BUNDLED_TITLE}")
            made = bundled_pairs()
            numbers = list(range(1, len(made) + 1))
            pairs = SentencePairs(
                [a for a, _ in made], [b for _, b in made], numbers, len(made), BUNDLED_TITLE, Faults()
            )
        if options.reverse:
            return pairs.reversed()
        return pairs

    def _load(self) -> Corpus:
        """The corpus; kept, so it is read once."""
        if self._corpus is None:
            options = self.hparams
            keep = CorpusFilter(
                self.normalisation,
                options.max_length,
                options.prefixes,
                options.on_bad_lines,
                options.on_long_sentences,
            )
            held_out = options.val_fraction, options.test_fraction
            self._corpus = prepare_corpus(
                self._read(), self.info.title, keep, *held_out, options.seed, options.train_share
            )
            for note in self._corpus.notes:
                _warn(f"note: {note}")
        return self._corpus

    def vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        """The vocabularies of source and target; before `setup`, this reads the corpus."""
        if self._vocabularies is None:
            self._vocabularies = self._load().vocabularies(self.hparams.min_count, self.hparams.max_vocab_size)
        return self._vocabularies

    @property
    def encoded_pairs(self) -> PackedPairs:
        """All kept pairs in the numbers of the vocabularies."""
        if self._pairs is None:
            self._pairs = self._load().encoded(*self.vocabularies())
        return self._pairs

    @override
    def setup(self, stage: str) -> None:
        """Read the corpus for "fit", "validate" and "test"; "predict" needs a checkpoint only."""
        if stage == "predict":
            return
        corpus = self._load()
        part = {"fit": "train", "validate": "val", "test": "test"}[stage]
        wanted = {"train": 1, "val": self.hparams.val_fraction, "test": self.hparams.test_fraction}
        if wanted[part] and not len(corpus.rows[part]):
            raise UserError(
                f"{corpus.info.title}: nothing is left for the {part} part of {corpus.info.kept:,} pairs: all pairs "
                f"with the same source go into one part, and {corpus.info.sources:,} of these sentences are different; "
                f"pass more sentences, or val_fraction=0 and test_fraction=0"
            )
        if stage == "fit":
            self.vocabularies()

    @override
    def train_dataloader(self) -> SentenceTrainLoader:
        options, corpus = self.hparams, self._load()
        self._note_share()
        loader = SentenceTrainLoader(
            self.encoded_pairs,
            corpus.rows["train"],
            self.batch_size,
            options.seed,
            self._rank,
            self._world_size,
            options.max_tokens,
            options.bucket,
            shuffle=self._shuffles,
            micro_batches=self._micro_batches,
        )
        share, random_share = loader.padding_share, loader.random_padding_share
        source, target = map(len, self.vocabularies())
        _inform(
            f"{corpus.info.describe()}; {source:,} source and {target:,} target tokens; "
            f"{share:.1%} of a batch is padding, {random_share:.1%} without sorting by length"
        )
        if self.trainer is not None:
            for logger in self.trainer.loggers:
                logger.log_metrics({"data/padding_share": share}, step=self.trainer.global_step)
        return loader

    def _evaluation_loader(self, part: str) -> SentenceEvaluationLoader | list[SentenceEvaluationLoader]:
        rows, size = self.rows[part], self.hparams.eval_batch_size
        if not len(rows):
            return []
        return SentenceEvaluationLoader(self.encoded_pairs, rows, size, self._rank, self._world_size)

    @override
    def val_dataloader(self) -> SentenceEvaluationLoader | list[SentenceEvaluationLoader]:
        """The part held out for validation; nothing when ``val_fraction`` is 0."""
        return self._evaluation_loader("val")

    @override
    def test_dataloader(self) -> SentenceEvaluationLoader | list[SentenceEvaluationLoader]:
        """The part held out for the test; nothing when ``test_fraction`` is 0."""
        return self._evaluation_loader("test")

    @override
    def largest_batch(self, part: str, batch_size: int) -> TranslationBatch:
        """The longest sentences."""
        pairs, rows = self.encoded_pairs, self.rows[part]
        lengths = pairs.source.lengths[rows] + pairs.target.lengths[rows]
        longest = rows[lengths.argsort(descending=True, stable=True)]
        return pairs.batch(longest[torch.arange(batch_size) % len(longest)])

    @override
    def take_inputs(self, inputs: Any) -> None:
        """Sentences to translate, as written: a text or several."""
        sentences = [inputs] if isinstance(inputs, str) else list(inputs)
        if not sentences or not all(isinstance(sentence, str) for sentence in sentences):
            raise UserError("no sentence to translate; pass a text, or a list of texts")
        self._inputs = [GivenSentence(text, text) for text in sentences]

    def _sentences_to_predict(self) -> list[GivenSentence]:
        """The inputs of `predict`, normalised; read once, since standard input cannot be read again."""
        if self._inputs is None:
            self._inputs = read_inputs(self.hparams.predict_inputs or [])
        return self._inputs

    @property
    def _normalised_inputs(self) -> list[str]:
        texts = [given.text.replace("\n", " ") for given in self._sentences_to_predict()]
        return normalise_lines(texts, self.normalisation)

    @property
    @override
    def prediction_names(self) -> list[str]:
        """The sentences, with tokens outside the vocabulary in [brackets], and the places of those without a word."""
        given = zip(self._normalised_inputs, self._sentences_to_predict(), strict=True)
        return [self.source_vocabulary.mark_unknown(text) if text else sentence.where for text, sentence in given]

    @property
    @override
    def unreadable_inputs(self) -> Mapping[int, str]:
        return {i: sentence.problem for i, sentence in enumerate(self._inputs or ()) if sentence.problem}

    @property
    @override
    def unclear_inputs(self) -> Mapping[int, str]:
        """The inputs of which normalisation leaves nothing."""
        note = f"unclear: nothing is left in {self.normalisation} normalisation"
        return {i: note for i, text in enumerate(self._normalised_inputs if self._inputs else ()) if not text}

    @override
    def predict_dataloader(self) -> SentenceEvaluationLoader:
        """The sentences of ``predict_inputs`` in their order, with empty targets."""
        sentences = self._normalised_inputs
        rows = [i for i, sentence in enumerate(sentences) if sentence]
        if not rows:
            first = self._sentences_to_predict()[0]
            empty = f"nothing is left of the sentence {first.text!r} in {self.normalisation} normalisation"
            raise UserError(first.problem or f"{empty}; leave such sentences out")
        source, tokens = pack(sentences)
        count = len(sentences)
        target = PackedSentences(torch.tensor([SOS, EOS]).repeat(count).int(), torch.arange(count + 1) * 2)
        pairs = PackedPairs(source.renumbered(self.source_vocabulary.ids_of(tokens)), target)
        size = self.hparams.eval_batch_size
        return SentenceEvaluationLoader(pairs, torch.tensor(rows), size, self._rank, self._world_size, bucket=False)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the tokens; lengths and numbers stay, since packing sequences would wait for them on the CPU."""
        if not isinstance(batch, TranslationBatch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        source, target = (side.to(device, non_blocking=True) for side in (batch.source, batch.target))
        return batch._replace(source=source, target=target)

    def source_sentences(self, numbers: Tensor) -> list[str]:
        """The source sentences with these numbers (of train, val and test batches), with unknown words as they are."""
        return self._load().source_sentences(numbers)

    def target_sentences(self, numbers: Tensor) -> list[str]:
        """The translations to compare with; unknown words are not UNK, which a network could predict by chance."""
        return self._load().target_sentences(numbers)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The vocabularies and the normalisation, so that the network translates without the corpus."""
        source, target = self.vocabularies()
        return {"source_tokens": source.tokens, "target_tokens": target.tokens, "normalisation": self.normalisation}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = Vocabulary(state_dict["source_tokens"]), Vocabulary(state_dict["target_tokens"])
        if self.normalisation != state_dict["normalisation"]:
            # Lightning calls `setup` before it reads the checkpoint: the corpus has to be normalised again.
            self.normalisation, self._corpus = state_dict["normalisation"], None
            _warn(f"note: the normalisation of the checkpoint is used: {self.normalisation}")
        elif self._vocabularies not in (None, saved):
            _warn("note: the vocabularies of the checkpoint are used, which are not those of the training part")
        self._vocabularies, self._pairs = saved, None
