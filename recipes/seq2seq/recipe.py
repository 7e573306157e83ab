"""Translation of sentences: cross-entropy over target tokens, AdamW with a one-cycle schedule, for 24 epochs.

    python -m recipes.seq2seq --data-file eng-fra.txt.zip --reverse --normalization tutorial --prefixes tutorial \
        --max-length 10 --val-sentences 100

63.0 BLEU on the test sentences of the tutorial's 11,445 pairs, French to English (mean of seeds 1, 2 and 3, beam of 5);
144 s of training on one thread of an otherwise idle AMD EPYC (bf16); measured on 23 November 2026 (README.md).

Logged are train/loss of updates, after each epoch val/loss, val/bleu and the other scores of `TranslationScores`, and
by the test the same under test/ with sacrebleu's BLEU and chrF.
"""

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from datamodules import TranslationDataModule
from datamodules.contract import Changeable, Transient, data_contract
from datamodules.errors import UserError, spelled
from datamodules.lightning import OptimizerLRScheduler, pl
from datamodules.ranges import COUNT, SHARE, SIZE, Range, check_choice, check_ranges
from datamodules.translation.loaders import TranslationBatch
from datamodules.translation.text import PAD, Normalization, SubwordVocabulary, normalize_lines, vocabulary_from_state
from recipes.base import Recipe
from recipes.evaluation_tables import Headline
from recipes.optim import build_optimizer, parameter_groups
from recipes.schedules import ScheduleName, build_schedule

from .attention import AttentionMap, AttentionWriter, add_examples, attention_maps, forget_examples
from .decoding import Vocabularies, beam_search, sentences_of
from .network import Seq2SeqNet, TranslationNetwork, target_positions
from .scores import BleuTokenizer, DetokenizedScores, TranslationScores, sentences_to_translate
from .transformer import TransformerNet
from .vocabularies import check_given, check_sizes, known, load_vocabularies, vocabulary_metadata

NetworkName = Literal["rnn", "transformer"]


def rate_of_run(network: str, samples: int, epochs: float) -> float:
    """Return the default peak learning rate: 0.001 for a Transformer, else a function of the run's length.

    The function is 0.2 divided by the square root of the number of updates in batches of 64, but at most 0.006. Adam
    moves the vectors of rare tokens at random, by the rate times the square root of the number of updates. On the
    tutorial's pairs, BLEU was best if this product was 0.2 to 0.3; at 0.4 and 0.5, BLEU was 10 to 20 lower.

    Args:
        samples: the size of the training set.

    Example:
        >>> [rate_of_run("rnn", 9_724, epochs) for epochs in (1, 7, 24)]
        [0.006, 0.006, 0.0033]
    """
    if network == "transformer":
        return 0.001
    updates = samples * epochs / Seq2SeqTranslator.base_batch_size
    rate = 0.2 / math.sqrt(updates)
    two_digits = float(f"{rate:.2g}")
    return min(0.006, two_digits)


class Seq2SeqTranslator(Recipe):
    """Translation with a recurrent network or a Transformer; override `build_network` to train your own network.

    Batches are `TranslationBatch`es. Validation translates greedily, the test and `predict` by beam search.

    Args:
        network: "rnn" is a recurrent encoder and decoder with attention (Luong et al., 2015), "transformer" has layers
            of attention (Vaswani et al., 2017), pre-norm, and a peak learning rate of 0.001 by default.
        hidden_size: width of embeddings and layers. In a recurrent network, an even number, also the width of the
            encoder's two directions together; in a Transformer, a multiple of `heads`.
        num_layers: layers of encoder and decoder; by default 1 (rnn) or 3 (transformer).
        heads: attention heads of a layer (transformer).
        feedforward_size: width inside the feed-forward networks (transformer).
        dropout: dropout rate of the inputs and outputs of the recurrent layers, or of the residual branches of a
            Transformer.
        source_vocab_size: number of tokens in the source vocabulary; by default the size in the data.
        target_vocab_size: number of tokens in the target vocabulary; by default the size in the data.
        label_smoothing: share of the target spread over all tokens (Szegedy et al., 2016).
        val_sentences: approximate number of sentences that each validation translates; a fixed random choice.
        beam: width of the beam search, in test and predict; 1 is greedy.
        length_penalty: exponent of the length normalization in a beam search, from 0 to 1 (Wu et al., 2016).
        bleu_tokenize: sacrebleu's tokenizer for the standard BLEU of the test: "zh" for Chinese targets, "char" for
            other scripts without spaces, "13a" for other languages.
        teacher_forcing: share of the training micro-batches in which the decoder reads the target (Williams and Zipser,
            1989); in the rest it reads its own predictions, step by step, which takes longer.
        attention: HTML or PNG file into which predict draws the attention of each translation over its source.
        lr: peak learning rate; by default 0.003, or on the command line a function of the run's length (`rate_of_run`).
    """

    title = __name__.split(".")[-2]  # The name of this folder, so that a copy of the folder is a new recipe.
    data_class = TranslationDataModule
    trainer_defaults: ClassVar[dict[str, Any]] = {"max_epochs": 24}
    monitor = "val/bleu"
    monitor_mode = "max"
    base_batch_size = 64
    predict_example = '"SENTENCE"'
    targets = "tokens"
    varying_dims = 2
    prediction_columns: ClassVar[tuple[str, ...]] = ("sentence", "translation", "score")
    prediction_files: ClassVar[tuple[str, ...]] = (*Recipe.prediction_files, ".txt")

    network: TranslationNetwork

    def __init__(
        self,
        network: NetworkName = "rnn",
        hidden_size: int = 256,
        num_layers: int | None = None,
        heads: int = 4,
        feedforward_size: int = 512,
        dropout: float = 0.3,
        source_vocab_size: int | None = None,
        target_vocab_size: int | None = None,
        optimizer: str = "adamw",
        lr: float | None = None,
        weight_decay: float = 0.0,
        schedule: ScheduleName = "one_cycle",
        label_smoothing: float = 0.1,
        val_sentences: Changeable[int] = 2000,
        beam: Changeable[int] = 5,
        length_penalty: Changeable[float] = 0.6,
        bleu_tokenize: Changeable[BleuTokenizer] = "13a",
        teacher_forcing: float = 1.0,
        attention: Transient[str | None] = None,
        **kwargs: Any,
    ) -> None:
        check_given(source_vocab_size, target_vocab_size)
        check_choice("network", network, get_args(NetworkName))
        if network == "rnn" and (heads, feedforward_size) != (4, 512):
            raise UserError(
                f"{spelled('heads', heads)} and {spelled('feedforward_size', feedforward_size)}:"
                f" {spelled('network', 'rnn')} has neither; leave them at 4 and 512"
            )
        check_choice("bleu_tokenize", bleu_tokenize, get_args(BleuTokenizer))
        check_ranges(
            hidden_size=(hidden_size, SIZE),
            num_layers=(num_layers, Range(1, 100, whole=True)),
            heads=(heads, SIZE),
            feedforward_size=(feedforward_size, SIZE),
            dropout=(dropout, Range(0, 1, below=True)),
            source_vocab_size=(source_vocab_size, COUNT),
            target_vocab_size=(target_vocab_size, COUNT),
            label_smoothing=(label_smoothing, SHARE),
            val_sentences=(val_sentences, COUNT),
            beam=(beam, Range(1, 1000, whole=True)),
            length_penalty=(length_penalty, Range(-10, 10)),
            teacher_forcing=(teacher_forcing, Range(0, 1)),
        )
        lr = 0.003 if lr is None else lr
        super().__init__(optimizer=optimizer, lr=lr, weight_decay=weight_decay, schedule=schedule, **kwargs)
        self.hparams.update(lr=lr)
        self.hparams.pop("attention", None)  # A file of one call of predict, which must not be in a checkpoint.
        self.attention_writer = AttentionWriter(attention)
        self.attention_maps: dict[int, AttentionMap] | None = None if attention is None else {}
        """The attention of predicted sentences by their number; None if it was not requested."""
        self.val_scores = TranslationScores()
        self.test_scores = TranslationScores()
        self.detokenized = DetokenizedScores()
        self.vocabularies: Vocabularies | None = None
        self.normalization: Normalization = "unicode"

    @override
    def build_network(self) -> TranslationNetwork:
        """Build the network from the recipe's hyperparameters."""
        options = self.hparams
        sizes = (options.source_vocab_size, options.target_vocab_size, options.hidden_size)
        if options.network == "rnn":
            return Seq2SeqNet(*sizes, options.num_layers or 1, options.dropout)
        return TransformerNet(*sizes, options.num_layers or 3, options.heads, options.feedforward_size, options.dropout)

    @override
    def training_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        """Return the mean loss over the target tokens, and their number."""
        share = self.hparams.teacher_forcing
        # `SeedControl` has seeded the generator for this micro-batch, so the draw is the same on any split.
        is_forced = share >= 1 or float(torch.rand(())) < share
        logits, targets = self._logits_and_targets(batch, is_forced)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.hparams.label_smoothing)
        return {"loss": loss, "count": len(targets)}

    def _logits_and_targets(self, batch: TranslationBatch, is_forced: bool = True) -> tuple[Tensor, Tensor]:
        """Return logits of shape (tokens, target_vocab_size) and targets of shape (tokens,), without padding."""
        positions = target_positions(batch.target, batch.target_lengths)
        network = self.network if is_forced else self.network.free_running
        logits = network(batch.source, batch.source_lengths, batch.target, positions)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), batch.target[:, 1:].flatten()[positions]

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        # Norms and biases are in a separate group without weight decay.
        groups = parameter_groups(self.parameters(), self.hparams.weight_decay)
        optimizer = build_optimizer(groups, self)
        return build_schedule(optimizer, self)

    def _evaluation_step(
        self, scores: TranslationScores, batch: TranslationBatch, beam: int, chosen: Tensor | None = None
    ) -> dict[str, Any]:
        """Score a batch, and translate its sentences, or only the sentences at `chosen`."""
        if not len(batch.source):
            return {}
        logits, targets = self._logits_and_targets(batch)
        scores.loss.update(F.cross_entropy(logits, targets, reduction="sum"), len(targets))
        batch = batch if chosen is None else batch.select(chosen)
        if not len(batch.source):
            return {}
        result = beam_search(self.network, batch.source, batch.source_lengths, beam, alpha=self.hparams.length_penalty)
        source, target = known(self.vocabularies)
        sources, references = sentences_of(batch, (source, target), self.data_module())
        translations = [*map(target.decode, result.tokens[:, 0].tolist())]
        # Subwords are decoded to plain text, in which punctuation is still attached to words.
        tokenize = self.hparams.bleu_tokenize if isinstance(target, SubwordVocabulary) else None
        scores.add(translations, references, tokenize)
        texts = {"sources": sources, "translations": translations, "references": references}
        return {"tokens": result.tokens[:, 0], **texts}

    def _log_scores(self, prefix: str, scores: TranslationScores) -> None:
        values = {f"{prefix}/{name}": value.float() for name, value in scores.compute(self.trainer.strategy).items()}
        # The values are equal on all ranks. A maximum over ranks keeps every bit; a mean would round again.
        self.log_dict(values, sync_dist=True, reduce_fx="max")
        scores.reset()

    @override
    def validation_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        sentences = data_contract(self.data_module()).sizes.get("val", 0)
        chosen = sentences_to_translate(batch.numbers, self.hparams.val_sentences / max(1, sentences))
        return self._evaluation_step(self.val_scores, batch, beam=1, chosen=chosen)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_scores("val", self.val_scores)

    @override
    def on_test_epoch_start(self) -> None:
        self.detokenized.reset()
        forget_examples(self.figures)

    @override
    def test_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        outputs = self._evaluation_step(self.test_scores, batch, self.hparams.beam)
        if outputs:
            self.detokenized.add(outputs, batch.numbers, self.data_module())
            add_examples(self.figures, self.network, batch, outputs["tokens"], self.vocabularies)
        return outputs

    @override
    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_scores)
        scores = self.detokenized.compute(self.trainer.strategy, self.hparams.bleu_tokenize)
        self.log_dict({f"test/{name}": score for name, score in scores.items()}, sync_dist=True, reduce_fx="max")
        self.tables = self.detokenized.tables()

    @override
    def headline(self, scores: dict[str, float]) -> list[Headline]:
        return self.detokenized.headline(scores, self.hparams.beam)

    @override
    def forward(self, source: Tensor) -> Tensor:
        """Return tokens of shape (batch, time) for sources of shape (batch, source), by beam search."""
        lengths = (source != PAD).sum(1)
        result = beam_search(self.network, source, lengths, self.hparams.beam, alpha=self.hparams.length_penalty)
        return result.tokens[:, 0]

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        return [*super().configure_callbacks(), self.attention_writer]

    @override
    def predict_step(self, batch: TranslationBatch, batch_idx: int) -> dict[str, Any]:
        """Return the sentences' numbers, and the best translation of each with its score."""
        beam = self.hparams.beam
        result = beam_search(self.network, batch.source, batch.source_lengths, beam, alpha=self.hparams.length_penalty)
        numbers = torch.arange(len(batch.source)) if batch.numbers is None else batch.numbers
        if self.attention_maps is not None:
            maps = attention_maps(self.network, batch, result.tokens[:, 0], self.vocabularies)
            self.attention_maps |= dict(zip(numbers.tolist(), maps, strict=True))
        return {"numbers": numbers.tolist(), "tokens": result.tokens[:, 0], "scores": result.scores[:, 0]}

    @override
    def prediction_rows(self, outputs: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return a row for each translation, in the order of the sentences, for any order of the batches.

        The column ``normalized`` is the sentence as the network reads it, with words outside the vocabulary in
        brackets.

        Args:
            names: the sentences as they were typed.
        """
        source, target = known(self.vocabularies)
        unordered = [row for batch in outputs for row in zip(*batch.values(), strict=True)]
        translations = sorted(unordered, key=itemgetter(0))
        normalized = normalize_lines([names[i] for i, *_ in translations], self.normalization)
        rows: list[dict[str, Any]] = []
        for (i, tokens, score), text in zip(translations, normalized, strict=True):
            row = {"sentence": names[i], "translation": target.decode(tokens.tolist()), "score": float(score)}
            rows.append(row | {"normalized": source.mark_unknown(text), "note": None})
        return rows

    @classmethod
    @override
    def settings_from_data(cls, data: pl.LightningDataModule, **settings: Any) -> dict[str, Any]:
        """Return the sizes of the data's vocabularies, and the learning rate for the length of the run."""
        from_data: dict[str, Any] = {}
        if isinstance(data, TranslationDataModule):
            data.vocabularies()
            load_vocabularies(data, settings.get("weights"), settings.get("weights_skip"))
            source, target = data.vocabularies()
            from_data = {"source_vocab_size": len(source), "target_vocab_size": len(target)}
        samples = data_contract(data).sizes.get("train")
        epochs = settings.get("max_epochs")
        if samples and epochs == -1:
            epochs = settings.get("max_steps", -1) * cls.base_batch_size / samples
        if samples and epochs and epochs > 0:
            from_data["lr"] = rate_of_run(settings.get("network", "rnn"), samples, epochs)
        return from_data

    @override
    def initialize_weights(self, resumes: bool) -> None:
        data = self.data_module()
        if not (self.has_weights or resumes) and isinstance(data, TranslationDataModule):
            load_vocabularies(data, self.hparams.weights, self.hparams.weights_skip)
        super().initialize_weights(resumes)

    def _set_vocabularies(self) -> None:
        data = self.data_module()
        if isinstance(data, TranslationDataModule):
            self.vocabularies = data.vocabularies()
            self.normalization = data.normalization

    @override
    def on_fit_start(self) -> None:
        """Set the vocabularies of the training data; a run that resumes has the vocabularies of its checkpoint."""
        if self.trainer.ckpt_path is None:
            self._set_vocabularies()
        self.on_validation_start()

    @override
    def on_validation_start(self) -> None:
        """Reject data whose vocabularies have other sizes than the network's.

        An evaluation without a checkpoint takes the vocabularies from the data. Learning them again takes seconds.
        """
        if self.vocabularies is None:
            self._set_vocabularies()
        check_sizes(self.vocabularies, self.hparams.source_vocab_size, self.hparams.target_vocab_size)

    on_test_start = on_validation_start

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.vocabularies is not None:
            checkpoint["vocabularies"] = [vocabulary.state for vocabulary in self.vocabularies]
            checkpoint["normalization"] = self.normalization

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if "vocabularies" in checkpoint:
            source, target = map(vocabulary_from_state, checkpoint["vocabularies"])
            self.vocabularies = (source, target)
            self.normalization = checkpoint["normalization"]

    @override
    def export_metadata(self) -> dict[str, Any]:
        """Return the vocabularies and the normalization, if they are known."""
        return vocabulary_metadata(self.vocabularies, self.normalization) if self.vocabularies else {}
