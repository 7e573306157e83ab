"""The translation recipe as a LightningModule."""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from typing_extensions import override

from datamodules.errors import UserError
from datamodules.ranges import SIZE, Range, check_ranges
from recipes.seq2seq.network import AnyNetwork
from recipes.seq2seq.recurrent import Seq2SeqNet
from recipes.seq2seq.transformer import TransformerNet
from recipes.seq2seq.translator import Translator

__all__ = ["Seq2SeqTranslator"]

NetworkName = Literal["rnn", "transformer"]
_NETWORKS: dict[str, type[AnyNetwork]] = {"rnn": Seq2SeqNet, "transformer": TransformerNet}


def _parameters(network: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_NETWORKS[network]).parameters


class Seq2SeqTranslator(Translator):
    """Translates with a recurrent network or a Transformer; override `build_network` to train your own.

    Args:
        network: "rnn" is a recurrent encoder and decoder with attention (Luong et al., 2015), "transformer" has layers
            of attention (Vaswani et al., 2017), pre-norm, and a peak learning rate of 0.001 by default.
        hidden_size: width of embeddings and layers: of the decoder, and of the encoder's two directions together,
            even; or of a Transformer, a multiple of `heads`.
        num_layers: layers of encoder and decoder; by default 1 (rnn) or 3 (transformer).
        heads: attention heads of a layer (transformer).
        feedforward_size: width inside the feed-forward networks (transformer).
        dropout: share of the inputs and outputs of the recurrent layers, or of what a Transformer's layer adds, that is
            dropped in training.
    """

    title = "seq2seq"
    trainer_defaults: ClassVar[dict[str, Any]] = {"max_epochs": 24}

    def __init__(
        self,
        network: NetworkName = "rnn",
        hidden_size: int = 256,
        num_layers: int | None = None,
        heads: int = 4,
        feedforward_size: int = 512,
        dropout: float = 0.3,
        **kwargs: Any,
    ) -> None:
        if network not in _NETWORKS:
            raise UserError(f"no network={network!r}; expected one of {', '.join(get_args(NetworkName))}")
        given, of_others = dict(locals()), {name for other in _NETWORKS for name in _parameters(other)}
        for name in of_others - set(_parameters(network)):
            default = inspect.signature(Seq2SeqTranslator).parameters[name].default
            if given[name] != default:
                raise UserError(f"{name}={given[name]!r}: network={network!r} has no {name}; leave it at {default!r}")
        if network == "rnn" and (hidden_size < 2 or hidden_size % 2):
            raise UserError(f"hidden_size={hidden_size} cannot be halved between two directions; pass an even number")
        check_ranges(
            hidden_size=(hidden_size, SIZE),
            heads=(heads, SIZE),
            feedforward_size=(feedforward_size, SIZE),
            dropout=(dropout, Range(0, 1, below=True)),
        )
        if num_layers is not None:
            check_ranges(num_layers=(num_layers, Range(1, 100, whole=True)))
        super().__init__(**kwargs)

    @classmethod
    @override
    def rate_of_run(cls, samples: int, epochs: int, settings: Mapping[str, Any]) -> float:
        if settings.get("network") == "transformer":
            return 0.001
        return super().rate_of_run(samples, epochs, settings)

    @override
    def build_network(self) -> AnyNetwork:
        """Returns the network, whose parameters are those of the recipe of the same names."""
        settings = {name: self.hparams[name] for name in _parameters(self.hparams.network)}
        return _NETWORKS[self.hparams.network](**{name: value for name, value in settings.items() if value is not None})
