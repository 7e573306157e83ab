"""Translation: a recurrent encoder and a decoder with attention, trained in minutes on two CPU cores."""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from recipes.seq2seq.decoding import beam_search
    from recipes.seq2seq.network import Seq2SeqNet
    from recipes.seq2seq.recipe import Seq2SeqTranslator

__all__ = ["Seq2SeqNet", "Seq2SeqTranslator", "beam_search"]

__getattr__ = lazy_names(
    __name__,
    {
        "Seq2SeqNet": "recipes.seq2seq.network",
        "Seq2SeqTranslator": "recipes.seq2seq.recipe",
        "beam_search": "recipes.seq2seq.decoding",
    },
)
