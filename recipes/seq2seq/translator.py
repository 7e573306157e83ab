"""The base of translation recipes: cross-entropy on target tokens, beam search, BLEU and chrF."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from callbacks.drawing.translation_samples import TranslationSamples
from datamodules.contract import data_contract
from datamodules.errors import UserError
from datamodules.loading.randomness import uniform
from datamodules.ranges import COUNT, SHARE, Range, check_ranges
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.packed_sentences import TranslationBatch
from datamodules.translation.text import PAD, SPECIAL_TOKENS, UNK, Normalisation, Vocabulary, normalise_lines
from recipes.graphs import Graph
from recipes.recipe import Recipe, RecipeParameters
from recipes.seq2seq.data import SentenceData, VocabularyData
from recipes.seq2seq.decoding import Translations, attention_weights, beam_search
from recipes.seq2seq.graphs import translation_graphs
from recipes.seq2seq.network import Seq2SeqNet, target_positions
from recipes.seq2seq.predictions import MOST_PANELS, check_image_file, draw_attention, translation_rows
from recipes.seq2seq.scores import TranslationScores

__all__ = ["Translator", "TranslatorParameters", "teacher_forcing_share"]

ForcingSchedule = Literal["constant", "linear"]

_SENTENCES_AT_ONCE = 256


def teacher_forcing_share(final: float, schedule: ForcingSchedule, progress: float) -> float:
    """The share of the decoder's inputs that are true tokens, when the share `progress` of the run is done.

    Example:
        >>> teacher_forcing_share(0.5, "linear", progress=0.5)
        0.75
    """
    return final if schedule == "constant" else 1 - (1 - final) * min(1.0, progress)


class TranslatorParameters(RecipeParameters):
    """The parameters of a translator, as ``self.hparams`` holds them."""

    source_vocab_size: int
    target_vocab_size: int
    label_smoothing: float
    teacher_forcing: float
    forcing_schedule: ForcingSchedule
    val_sentences: int
    beam: int
    length_penalty: float
    nbest: int
    attention: str | None


class Translator(Recipe):
    """The base of the translation recipes: override `build_network`, which returns what `Seq2SeqNet` offers.

    Batches are `TranslationBatch`es. Validation translates greedily, the test and `predict` by beam search.

    Args:
        source_vocab_size: tokens in the source vocabulary; by default that of the data.
        target_vocab_size: tokens in the target vocabulary; by default that of the data.
        label_smoothing: share of the target spread over all tokens (Szegedy et al., 2016).
        teacher_forcing: share of the decoder's inputs in training that are the true tokens; the others are its own
            predictions (scheduled sampling, Bengio et al., 2015). Below 1 it takes a step per token, so it is slower.
        forcing_schedule: "linear" goes from 1 to `teacher_forcing` over the run.
        val_sentences: about how many sentences each validation translates; a fixed random choice.
        beam: width of the beam search, in test and predict; 1 is greedy.
        length_penalty: exponent of the length normalisation in a beam search, from 0 to 1 (Wu et al., 2016).
        nbest: translations of each sentence that predict prints.
        attention: image file that predict writes the attention weights to, such as out.png.
        lr: peak learning rate; by default 0.002, and 1 for lbfgs.
    """

    title = "translation"
    data_class = TranslationDataModule
    monitor = "val/bleu"
    monitor_mode = "max"
    default_lr = 0.002
    base_batch_size = 64
    predict_example = '"SENTENCE"'
    targets = "tokens"
    varying_dims = 2
    free_parameters: ClassVar[frozenset[str]] = Recipe.free_parameters | {
        *("beam", "length_penalty", "nbest", "val_sentences"),
    }
    call_parameters: ClassVar[frozenset[str]] = frozenset({"attention"})

    hparams: TranslatorParameters
    network: Seq2SeqNet

    def __init__(
        self,
        source_vocab_size: int | None = None,
        target_vocab_size: int | None = None,
        label_smoothing: float = 0.1,
        teacher_forcing: float = 1.0,
        forcing_schedule: ForcingSchedule = "linear",
        val_sentences: int = 2000,
        beam: int = 5,
        length_penalty: float = 0.6,
        nbest: int = 1,
        attention: str | None = None,
        lr: float | None = None,
        weight_decay: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if source_vocab_size is None or target_vocab_size is None:
            raise UserError(
                "the sizes of the vocabularies were neither given nor found in the data; pass `source_vocab_size` and"
                " `target_vocab_size`, the lengths of data.source_vocabulary and data.target_vocabulary"
            )
        check_ranges(
            source_vocab_size=(source_vocab_size, COUNT),
            target_vocab_size=(target_vocab_size, COUNT),
            label_smoothing=(label_smoothing, SHARE),
            teacher_forcing=(teacher_forcing, SHARE),
            val_sentences=(val_sentences, COUNT),
            beam=(beam, Range(1, 1000, whole=True)),
            length_penalty=(length_penalty, Range(-10, 10)),
        )
        if not 1 <= nbest <= beam:
            raise UserError(
                f"a beam search with beam={beam} does not find nbest={nbest} translations; "
                f"pass beam={max(1, nbest)} nbest={max(1, nbest)}"
            )
        check_image_file(attention)
        super().__init__(lr=lr, weight_decay=weight_decay, **kwargs)
        if self.hparams.compile and (teacher_forcing < 1 or self.hparams.get("input_feeding")):
            raise UserError(
                "compile=True: a decoder that takes a step per token (`teacher_forcing` below 1, `input_feeding`) would"
                " be compiled anew for each length; pass compile=False"
            )
        self.val_scores, self.test_scores = TranslationScores(), TranslationScores()
        self.vocabularies: tuple[Vocabulary, Vocabulary] | None = None
        self.normalisation: Normalisation = "unicode"

    @classmethod
    @override
    def settings_from_data(cls, data: pl.LightningDataModule) -> dict[str, Any]:
        """The sizes of the vocabularies, where the data has them."""
        if not isinstance(data, VocabularyData):
            return {}
        source, target = data.vocabularies()
        return {"source_vocab_size": len(source), "target_vocab_size": len(target)}

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        return [*super().configure_callbacks(), TranslationSamples()]

    @override
    def headline(self, scores: dict[str, float]) -> dict[str, str]:
        rows = {}
        for part, how in (("val", "greedy"), ("test", f"beam {self.hparams.beam}")):
            if f"{part}/bleu" in scores:
                rows[f"{part} BLEU"] = f"{scores[f'{part}/bleu']:.2f} ({how})"
        shown = {"test chrF": "test/chrf", "test perplexity": "test/perplexity"}
        rows |= {title: f"{scores[name]:.2f}" for title, name in shown.items() if name in scores}
        if "test/exact_match" in scores:
            rows["test exact match"] = f"{100 * scores['test/exact_match']:.1f} %"
        return rows

    # Exports

    @override
    def graphs(self, include_preprocessing: bool = True) -> list[Graph]:
        """The encoder, and one step of the decoder."""
        return translation_graphs(self.network, self.hparams.source_vocab_size, self.hparams.target_vocab_size)

    @override
    def export_metadata(self) -> dict[str, Any]:
        metadata = super().export_metadata()
        if self.vocabularies is None:
            return metadata
        source, target = (vocabulary.tokens for vocabulary in self.vocabularies)
        return metadata | {
            "source_vocabulary": source,
            "target_vocabulary": target,
            "normalisation": self.normalisation,
        }

    @override
    def export_files(self, kind: str) -> dict[str, str]:
        """For onnx a script that translates, which needs onnxruntime and numpy only."""
        if kind != "onnx" or self.vocabularies is None:
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

    def _source_and_target(self) -> tuple[Vocabulary, Vocabulary]:
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
            checkpoint["vocabularies"] = [list(vocabulary.tokens) for vocabulary in self.vocabularies]
            checkpoint["normalisation"] = self.normalisation

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if "vocabularies" in checkpoint:
            source, target = checkpoint["vocabularies"]
            self.vocabularies = Vocabulary(source), Vocabulary(target)
            self.normalisation = checkpoint["normalisation"]

    # Training

    def _teacher_forced(self, batch: TranslationBatch) -> Tensor | None:
        """Where the decoder's input is the true token, or None for everywhere: a function of epoch and sentence."""
        settings = self.hparams
        if settings.teacher_forcing == 1:
            return None
        progress = self.global_step / self.updates_in_run()
        share = teacher_forcing_share(settings.teacher_forcing, settings.forcing_schedule, progress)
        if share == 1:
            return None
        size = batch.target.shape[1] - 1
        if batch.numbers is None:
            return torch.rand(len(batch.target), size, device=batch.target.device) < share
        seed = data_contract(self.data_module()).seed
        draws = uniform(seed, "teacher forcing", self.current_epoch, batch.numbers, size)
        return (draws < share).to(batch.target.device, non_blocking=True)

    def _logits(self, batch: TranslationBatch, teacher_forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits of shape (tokens, target_vocab_size) and targets of shape (tokens,), without padding."""
        positions = target_positions(batch.target, batch.target_lengths)
        logits = self.network(batch.source, batch.source_lengths, batch.target, positions, teacher_forced)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), batch.target[:, 1:].flatten()[positions]

    @override
    def training_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        if not len(batch.source):
            return {"loss": self._zero_loss(), "count": 0}
        logits, targets = self._logits(batch, self._teacher_forced(batch))
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
        translations = [self._source_and_target()[1].decode(row) for row in found.tokens[:, 0].tolist()]
        sources, references = self.sentences(batch)
        scores.texts.update(translations, references)

        def attention(i: int) -> Tensor | None:
            return self._attention(batch, found, i)

        return {"sources": sources, "translations": translations, "references": references, "attention": attention}

    def _attention(self, batch: TranslationBatch, found: Translations, i: int) -> Tensor | None:
        """The attention weights of the best translation of sentence `i`, of shape (time, source); None without any."""
        one = slice(i, i + 1)
        weights = attention_weights(self.network, batch.source[one], batch.source_lengths[one], found.tokens[one, 0])
        return None if weights is None else weights[0].cpu()

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
        values = {f"{prefix}/{name}": value.float() for name, value in scores.compute().items()}
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
        return self._evaluation_step(self.test_scores, batch, self.hparams.beam)

    @override
    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_scores)

    # Translating

    def _search(self, source: Tensor, lengths: Tensor, beam: int, nbest: int = 1) -> Translations:
        return beam_search(self.network, source, lengths, beam, nbest, self.hparams.length_penalty)

    @override
    def forward(self, source: Tensor) -> Tensor:
        """Tokens of shape (batch, time) for sources of shape (batch, source), by beam search."""
        lengths = (source != PAD).sum(1)
        return self._search(source, lengths, self.hparams.beam).tokens[:, 0]

    @override
    def predict_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        """The sentences' numbers, and the best translations of each with their scores.

        Where `attention` names a file, the attention weights of the first sentences too.
        """
        found = self._search(batch.source, batch.source_lengths, self.hparams.beam, self.hparams.nbest)
        numbers = (torch.arange(len(batch.source)) if batch.numbers is None else batch.numbers).tolist()
        output = {"numbers": numbers, "tokens": found.tokens, "scores": found.scores}
        if self.hparams.attention is not None:
            output["attention"] = [
                self._attention(batch, found, i) if number < MOST_PANELS else None for i, number in enumerate(numbers)
            ]
        return output

    @override
    def prediction_rows(self, outputs: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each translation, in the order of the sentences; writes the image that `attention` names.

        Args:
            names: the sentences, with words outside the vocabulary in brackets.
        """
        decode = self._source_and_target()[1].decode
        if self.hparams.attention is not None:
            draw_attention(self.hparams.attention, outputs, names, decode)
        return translation_rows(outputs, names, decode)

    @override
    def no_prediction(self, name: str) -> dict[str, Any]:
        return {"sentence": name, "rank": None, "translation": None, "score": None}

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
        training = self.training
        self.eval()
        for start in range(0, len(by_length), _SENTENCES_AT_ONCE):
            chosen = by_length[start : start + _SENTENCES_AT_ONCE]
            rows = [torch.tensor(source_vocabulary.encode(lines[i])) for i in chosen]
            source = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
            for i, tokens in zip(chosen, self(source.to(self.device)).tolist(), strict=True):
                translations[i] = target_vocabulary.decode(tokens)
        self.train(training)
        return translations
