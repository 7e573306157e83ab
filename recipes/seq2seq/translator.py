"""The base of translation recipes: cross-entropy on target tokens, beam search, BLEU and chrF."""

import base64
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from callbacks.drawing.translation_samples import TranslationSamples
from callbacks.lib.exchange import gather
from datamodules.contract import data_contract
from datamodules.errors import UserError
from datamodules.loading.randomness import uniform
from datamodules.ranges import COUNT, SHARE, Range, check_ranges
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.loaders import batches_within_memory
from datamodules.translation.packed_sentences import TranslationBatch
from datamodules.translation.subwords import AnyVocabulary, SubwordVocabulary, vocabulary_from_state
from datamodules.translation.text import PAD, SPECIAL_TOKENS, UNK, Normalisation, normalise_lines
from recipes.graphs import Graph
from recipes.recipe import Recipe, Table
from recipes.seq2seq.data import SentenceData, VocabularyData
from recipes.seq2seq.decoding import Translations, attention_weights, beam_search
from recipes.seq2seq.graphs import translation_graphs
from recipes.seq2seq.network import AnyNetwork, target_positions
from recipes.seq2seq.scores import TranslationScores
from recipes.text_scores import TRANSLATIONS, BleuTokenizer, check_tokenizer, standard_scores, tokenizer

__all__ = ["Translator"]

_SENTENCES_AT_ONCE = 256


TestedSentence = tuple[int, str, str, str]
"""A sentence's number, its source, its translation and the reference, as text."""


class Translator(Recipe):
    """The base of the translation recipes: override `build_network`, which returns a `TranslationNetwork`.

    Batches are `TranslationBatch`es. Validation translates greedily, the test and `predict` by beam search.

    Args:
        source_vocab_size: tokens in the source vocabulary; by default that of the data.
        target_vocab_size: tokens in the target vocabulary; by default that of the data.
        label_smoothing: share of the target spread over all tokens (Szegedy et al., 2016).
        val_sentences: about how many sentences each validation translates; a fixed random choice.
        beam: width of the beam search, in test and predict; 1 is greedy.
        length_penalty: exponent of the length normalisation in a beam search, from 0 to 1 (Wu et al., 2016).
        bleu_tokenize: sacrebleu's tokeniser for the standard BLEU of the test: "zh" for Chinese targets, "ja-mecab" and
            "ko-mecab" for Japanese and Korean, "char" for scripts without spaces, "13a" for all else.
        lr: peak learning rate; by default 0.006 in short runs, less in longer ones (`rate_of_run`), and 1 for lbfgs.
    """

    title = "translation"
    data_class = TranslationDataModule
    monitor = "val/bleu"
    monitor_mode = "max"
    default_lr = 0.003
    base_batch_size = 64
    predict_example = '"SENTENCE"'
    targets = "tokens"
    varying_dims = 2
    free_parameters: ClassVar[frozenset[str]] = Recipe.free_parameters | {
        *("beam", "length_penalty", "val_sentences", "bleu_tokenize"),
    }
    prediction_files: ClassVar[tuple[str, ...]] = (*Recipe.prediction_files, ".txt")

    network: AnyNetwork

    def __init__(
        self,
        source_vocab_size: int | None = None,
        target_vocab_size: int | None = None,
        label_smoothing: float = 0.1,
        val_sentences: int = 2000,
        beam: int = 5,
        length_penalty: float = 0.6,
        bleu_tokenize: BleuTokenizer = "13a",
        lr: float | None = None,
        weight_decay: float = 0.0,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("attention", None)  # Of older checkpoints.
        if source_vocab_size is None or target_vocab_size is None:
            raise UserError(
                "the sizes of the vocabularies were neither given nor found in the data; pass `source_vocab_size` and"
                " `target_vocab_size`, the lengths of data.source_vocabulary and data.target_vocabulary"
            )
        check_ranges(
            source_vocab_size=(source_vocab_size, COUNT),
            target_vocab_size=(target_vocab_size, COUNT),
            label_smoothing=(label_smoothing, SHARE),
            val_sentences=(val_sentences, COUNT),
            beam=(beam, Range(1, 1000, whole=True)),
            length_penalty=(length_penalty, Range(-10, 10)),
        )
        check_tokenizer(bleu_tokenize)
        super().__init__(lr=lr, weight_decay=weight_decay, **kwargs)
        self.val_scores, self.test_scores = TranslationScores(), TranslationScores()
        self.vocabularies: tuple[AnyVocabulary, AnyVocabulary] | None = None
        self._tested: list[TestedSentence] = []
        self._standard: dict[str, str] = {}
        self.normalisation: Normalisation = "unicode"

    @classmethod
    @override
    def settings_from_data(cls, data: pl.LightningDataModule) -> dict[str, Any]:
        """The sizes of the vocabularies, where the data has them."""
        if not isinstance(data, VocabularyData):
            return {}
        source, target = data.vocabularies()
        return {"source_vocab_size": len(source), "target_vocab_size": len(target)}

    @classmethod
    @override
    def rate_of_run(cls, samples: int, epochs: int, settings: Mapping[str, Any]) -> float:
        """0.2 over the square root of the updates that the run would make in batches of 64; 0.006 at most.

        Adam moves the vectors of rare tokens at random, by the rate times the square root of the updates. Where that
        product was 0.2 to 0.3 on the tutorial's pairs, BLEU was best; at 0.4 and 0.5 it was 10 to 20 lower.

        Example:
            >>> [Translator.rate_of_run(9_724, epochs, {}) for epochs in (1, 7, 24)]
            [0.006, 0.006, 0.0033]
        """
        return min(0.006, float(f"{0.2 / math.sqrt(samples * epochs / cls.base_batch_size):.2g}"))

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        return [*super().configure_callbacks(), TranslationSamples()]

    @override
    def headline(self, scores: dict[str, float]) -> dict[str, str]:
        rows = {}
        for part, how in (("val", "greedy, of tokens"), ("test", f"beam {self.hparams.beam}, of tokens")):
            if f"{part}/bleu" in scores:
                rows[f"{part} BLEU"] = f"{scores[f'{part}/bleu']:.2f} ({how})"
        shown = {"test chrF": "test/chrf", "test perplexity": "test/perplexity"}
        rows |= {title: f"{scores[name]:.2f}" for title, name in shown.items() if name in scores}
        if "test/exact_match" in scores:
            rows["test exact match"] = f"{100 * scores['test/exact_match']:.1f} %"
        return rows | self._standard

    @override
    def result_tables(self) -> dict[str, Table]:
        """The sources, translations and references of the last test, in the order of the file.

        The translations and the references by themselves, too, line by line: sacrebleu's command takes these.
        """
        columns = "source", "translation", "reference"
        rows = [dict(zip(columns, texts, strict=True)) for _, *texts in self._tested]
        if not rows:
            return {}
        lines = {"test_hypotheses.txt": Table(columns[1:2], rows), "test_references.txt": Table(columns[2:], rows)}
        return {TRANSLATIONS: Table(columns, rows)} | lines

    # Exports

    @override
    def graphs(self) -> list[Graph]:
        """The encoder, and one step of the decoder."""
        return translation_graphs(self.network, self.hparams.source_vocab_size, self.hparams.target_vocab_size)

    @override
    def export_metadata(self) -> dict[str, Any]:
        metadata = super().export_metadata()
        if self.vocabularies is None:
            return metadata
        metadata["normalisation"] = self.normalisation
        for side, vocabulary in zip(("source", "target"), self.vocabularies, strict=True):
            metadata[f"{side}_vocabulary"] = vocabulary.tokens
            if isinstance(vocabulary, SubwordVocabulary):
                # Sentencepiece's own file, as text.
                metadata[f"{side}_subwords"] = base64.b64encode(vocabulary.model).decode()
        return metadata

    @override
    def export_files(self) -> dict[str, str]:
        """A script that translates, which needs onnxruntime and numpy only."""
        if self.vocabularies is None:
            return {}
        return {"translate.py": Path(__file__).with_name("onnx_translate.py").read_text(encoding="utf-8")}

    # Vocabularies

    @override
    def setup(self, stage: str) -> None:
        """Take the vocabularies from the data; those of a checkpoint, which is read afterwards, replace them."""
        super().setup(stage)
        data = self.data_module()
        if (stage == "fit" or (stage != "predict" and self.vocabularies is None)) and isinstance(data, VocabularyData):
            self.vocabularies, self.normalisation = data.vocabularies(), data.normalisation

    def _check_vocabularies(self) -> None:
        if self.vocabularies is None:
            return
        sizes = self.hparams.source_vocab_size, self.hparams.target_vocab_size
        for vocabulary, size, side in zip(self.vocabularies, sizes, ("source", "target"), strict=True):
            if len(vocabulary) != size:
                raise UserError(
                    f"the network has {size:,} {side} tokens, and the data has {len(vocabulary):,}; pass the data and "
                    f"the settings that it was trained with, or {side}_vocab_size={len(vocabulary)} for a new network"
                )

    @override
    def on_fit_start(self) -> None:
        self._check_vocabularies()
        super().on_fit_start()

    on_validation_start = on_test_start = _check_vocabularies

    def _source_and_target(self) -> tuple[AnyVocabulary, AnyVocabulary]:
        if self.vocabularies is None:
            raise UserError(
                "the network has no vocabularies yet; train it on a TranslationDataModule, load a checkpoint, or set "
                "recipe.vocabularies = (source, target)"
            )
        return self.vocabularies

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.vocabularies is not None:
            checkpoint["vocabularies"] = [vocabulary.state for vocabulary in self.vocabularies]
            checkpoint["normalisation"] = self.normalisation

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if "vocabularies" in checkpoint:
            source, target = map(vocabulary_from_state, checkpoint["vocabularies"])
            self.vocabularies = source, target
            self.normalisation = checkpoint["normalisation"]

    # Training

    def _logits(self, batch: TranslationBatch) -> tuple[Tensor, Tensor]:
        """Logits of shape (tokens, target_vocab_size) and targets of shape (tokens,), without padding."""
        positions = target_positions(batch.target, batch.target_lengths)
        logits = self.network(batch.source, batch.source_lengths, batch.target, positions)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), batch.target[:, 1:].flatten()[positions]

    @override
    def training_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        if not len(batch.source):
            return {"loss": self._zero_loss(), "count": 0}
        logits, targets = self._logits(batch)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.hparams.label_smoothing)
        return {"loss": loss, "count": len(targets)}

    def _zero_loss(self) -> Tensor:
        """Zero that reaches every parameter: a rank without sentences takes part in the reduction of gradients."""
        return sum((p.sum() * 0 for p in self.network.parameters()), torch.zeros((), device=self.device))

    # Evaluation

    def _evaluation_step(
        self, scores: TranslationScores, batch: TranslationBatch, beam: int, chosen: Tensor | None = None
    ) -> dict[str, Any]:
        """Score a batch; its sentences, or those at `chosen`, are translated, too."""
        if not len(batch.source):
            return {}
        logits, targets = self._logits(batch)
        scores.loss.update(F.cross_entropy(logits, targets, reduction="sum"), len(targets))
        batch = batch if chosen is None else batch.select(chosen)
        if not len(batch.source):
            return {}
        found = self._search(batch.source, batch.source_lengths, beam)
        source, target = self._source_and_target()
        sources, references = self.sentences(batch)
        best = found.tokens[:, 0].tolist()
        translations = [*map(target.decode, best)]
        # Subwords are decoded to text, whose words and punctuation are not separated yet.
        tokenise = tokenizer(self.hparams.bleu_tokenize) if isinstance(target, SubwordVocabulary) else str
        scores.add([*map(tokenise, translations)], [*map(tokenise, references)])

        def attention(i: int) -> Tensor:
            return self._attention(batch, found, i)

        def tokens(i: int) -> tuple[list[str], list[str]]:
            return source.split(sources[i]), target.pieces(best[i])

        return {
            "sources": sources,
            "translations": translations,
            "references": references,
            "attention": attention,
            "tokens": tokens,
        }

    def _attention(self, batch: TranslationBatch, found: Translations, i: int) -> Tensor:
        """The attention weights of the best translation of sentence `i`, of shape (time, source)."""
        one = slice(i, i + 1)
        weights = attention_weights(self.network, batch.source[one], batch.source_lengths[one], found.tokens[one, 0])
        return weights[0].cpu()

    def sentences(self, batch: TranslationBatch) -> tuple[list[str], list[str]]:
        """The sources and the references of a batch as text, with unknown words where the data has them."""
        data = self.data_module()
        if batch.numbers is not None and isinstance(data, SentenceData):
            return data.source_sentences(batch.numbers), data.target_sentences(batch.numbers)
        sides = zip(self._source_and_target(), (batch.source, batch.target), strict=True)
        sources, references = ([vocabulary.decode(row) for row in side.tolist()] for vocabulary, side in sides)
        # No translation matches a word outside the vocabulary, not even one with <unk>.
        return sources, [text.replace(SPECIAL_TOKENS[UNK], "\ufffd") for text in references]

    def _log_scores(self, prefix: str, scores: TranslationScores) -> None:
        values = {f"{prefix}/{name}": value.float() for name, value in scores.compute(self.trainer.strategy).items()}
        # Equal on all ranks already: the maximum keeps the last digit, where a mean over ranks would round again.
        self.log_dict(values, sync_dist=True, reduce_fx="max")
        scores.reset()

    @override
    def validation_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        share = self.hparams.val_sentences / max(1, data_contract(self.data_module()).sizes.get("val", 0))
        chosen = None
        if batch.numbers is not None and share < 1:
            # By the sentence's number, so that the choice is the same on any number of ranks.
            chosen = (uniform(0, "validated sentences", 0, batch.numbers).squeeze(1) < share).nonzero().squeeze(1)
        return self._evaluation_step(self.val_scores, batch, beam=1, chosen=chosen)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_scores("val", self.val_scores)

    @override
    def test_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        found = self._evaluation_step(self.test_scores, batch, self.hparams.beam)
        if found:
            numbers, data = batch.numbers, self.data_module()
            sources, references = found["sources"], found["references"]
            if numbers is not None and isinstance(data, SentenceData):
                sources, references = data.source_texts(numbers), data.target_texts(numbers)
            places = range(len(self._tested), len(self._tested) + len(sources)) if numbers is None else numbers.tolist()
            self._tested += zip(places, sources, found["translations"], references, strict=True)
        return found

    @override
    def on_test_epoch_start(self) -> None:
        self._tested, self._standard = [], {}

    @override
    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_scores)
        self._log_standard_scores()

    def _log_standard_scores(self) -> None:
        """Log the scores of sacrebleu, which every rank computes from the sentences of all of them."""
        self._tested = sorted(row for rows in gather(self.trainer.strategy, self._tested) for row in rows)
        if not self._tested:
            return
        _, _, translations, references = zip(*self._tested, strict=True)
        for name, found in standard_scores(translations, references, self.hparams.bleu_tokenize).items():
            self.log(f"test/{name}", found.score, sync_dist=True, reduce_fx="max")
            self._standard[f"sacrebleu {found.title}"] = f"{found.score:.2f} ({found.signature})"

    # Translating

    def _search(self, source: Tensor, lengths: Tensor, beam: int) -> Translations:
        return beam_search(self.network, source, lengths, beam, alpha=self.hparams.length_penalty)

    @override
    def forward(self, source: Tensor) -> Tensor:
        """Tokens of shape (batch, time) for sources of shape (batch, source), by beam search."""
        lengths = (source != PAD).sum(1)
        return self._search(source, lengths, self.hparams.beam).tokens[:, 0]

    @override
    def predict_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        """The sentences' numbers, and the best translation of each with its score."""
        found = self._search(batch.source, batch.source_lengths, self.hparams.beam)
        numbers = (torch.arange(len(batch.source)) if batch.numbers is None else batch.numbers).tolist()
        return {"numbers": numbers, "tokens": found.tokens[:, 0], "scores": found.scores[:, 0]}

    @override
    def prediction_rows(self, outputs: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each translation, in the order of the sentences, whatever the order of the batches.

        Args:
            names: the sentences, with words outside the vocabulary in brackets.
        """
        target = self._source_and_target()[1]
        each = (
            row for batch in outputs for row in zip(batch["numbers"], batch["tokens"], batch["scores"], strict=True)
        )
        return [
            {
                "sentence": names[number],
                "translation": target.decode(tokens.tolist()),
                "score": float(score),
                "note": None,
            }
            for number, tokens, score in sorted(each, key=itemgetter(0))
        ]

    @override
    def prediction_lines(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """The translation of each sentence, in their order; empty where there is none."""
        return [row["translation"] or "" for row in rows]

    @override
    def no_prediction(self, name: str) -> dict[str, Any]:
        return {"sentence": name, "translation": None, "score": None}

    @torch.no_grad()
    def translate(self, sentences: Sequence[str]) -> list[str]:
        """Translate sentences with the vocabularies and the normalisation of the checkpoint.

        Args:
            sentences: in the source language, as written; one without a word gives an empty translation.
        """
        source_vocabulary, target_vocabulary = self._source_and_target()
        lines = normalise_lines([sentence.replace("\n", " ") for sentence in sentences], self.normalisation)
        translations = [""] * len(lines)
        by_length = sorted((i for i, line in enumerate(lines) if line), key=lambda i: lines[i].count(" "))
        rows = [torch.tensor(source_vocabulary.encode(lines[i])) for i in by_length]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        training = self.training
        self.eval()
        for places in batches_within_memory(lengths, _SENTENCES_AT_ONCE):
            chosen = [rows[place] for place in places]
            source = nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=PAD)
            for place, tokens in zip(places.tolist(), self(source.to(self.device)).tolist(), strict=True):
                translations[by_length[place]] = target_vocabulary.decode(tokens)
        self.train(training)
        return translations
