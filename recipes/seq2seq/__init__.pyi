from .attention import AttentionMap as AttentionMap
from .attention import translate as translate
from .decoding import beam_search as beam_search
from .network import Seq2SeqNet as Seq2SeqNet
from .network import TranslationNetwork as TranslationNetwork
from .recipe import Seq2SeqTranslator as Seq2SeqTranslator
from .transformer import TransformerNet as TransformerNet
