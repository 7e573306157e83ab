"""The translation recipe as a LightningModule."""

import inspect
from typing import Any, ClassVar

from typing_extensions import override

from datamodules.errors import UserError
from datamodules.ranges import SIZE, Range, check_ranges
from recipes.seq2seq.attention import AttentionName
from recipes.seq2seq.network import CellName, Seq2SeqNet
from recipes.seq2seq.translator import Translator

__all__ = ["Seq2SeqTranslator"]


class Seq2SeqTranslator(Translator):
    """Translates with a recurrent encoder and decoder, and attention; override `build_network` to train your own.

    Args:
        hidden_size: width of the decoder, and of the encoder's two directions together; must be even.
        embedding_size: width of the token embeddings.
        num_layers: recurrent layers of encoder and decoder.
        cell: kind of the recurrent layers.
        attention_type: additive (Bahdanau et al., 2015), general, dot or location (Luong et al., 2015), or none
            (Sutskever et al., 2014).
        positions: tokens of a sentence that location attention weighs; it ignores those after them.
        dropout: share of the inputs and outputs of the recurrent layers that is dropped in training.
        tie_embeddings: the output layer shares its weights with the target embedding (Press and Wolf, 2017).
        input_feeding: the decoder's input includes its last attentional vector (Luong et al., 2015); it takes a step
            per token, so it is slower.
    """

    title = "seq2seq"
    trainer_defaults: ClassVar[dict[str, Any]] = {"max_epochs": 24}

    def __init__(
        self,
        hidden_size: int = 256,
        embedding_size: int = 256,
        num_layers: int = 1,
        cell: CellName = "gru",
        attention_type: AttentionName = "dot",
        positions: int = 50,
        dropout: float = 0.3,
        tie_embeddings: bool = True,
        input_feeding: bool = False,
        **kwargs: Any,
    ) -> None:
        if hidden_size < 2 or hidden_size % 2:
            raise UserError(f"hidden_size={hidden_size} cannot be halved between two directions; pass an even number")
        check_ranges(
            hidden_size=(hidden_size, SIZE),
            embedding_size=(embedding_size, SIZE),
            num_layers=(num_layers, Range(1, 100, whole=True)),
            positions=(positions, SIZE),
            dropout=(dropout, Range(0, 1, below=True)),
        )
        if attention_type == "none" and kwargs.get("attention") is not None:
            raise UserError(f"attention={kwargs['attention']!r}: a decoder without attention has no weights to draw")
        if attention_type == "none" and kwargs.get("unknown_words") == "copy":
            raise UserError('unknown_words="copy": a decoder without attention does not tell which word to copy')
        super().__init__(**kwargs)

    @override
    def build_network(self) -> Seq2SeqNet:
        """Returns the network, whose parameters are those of the recipe of the same names."""
        return Seq2SeqNet(**{name: self.hparams[name] for name in inspect.signature(Seq2SeqNet).parameters})
