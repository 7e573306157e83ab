"""Dropout whose mask is a function of the sample, and what turns the layers of a network into it."""

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from callbacks.lib.sample_noise import StatelessLayer, dropout_factors, number_layers
from callbacks.lib.stateless_rnn import StatelessGRU, StatelessLSTM
from datamodules.errors import UserError

__all__ = ["StatelessDropout", "StatelessDropout1d", "StatelessDropout2d", "StatelessDropout3d", "stateless_dropout"]


def _is_channels_last(input: Tensor) -> bool:
    last = torch.channels_last
    return input.dim() == 4 and not input.is_contiguous() and input.is_contiguous(memory_format=last)


class StatelessDropout(StatelessLayer, nn.Dropout):
    """`nn.Dropout` whose noise is a function of the sample, under `SeedControl` or within `sample_noise`.

    Elsewhere, and where the samples are not known, it is `nn.Dropout`. Elements of a sample are numbered in the order
    of the dimensions that are not the batch. So in (batch, time, hidden) padding at the end of time changes no mask of
    the other elements. Further calls in one forward pass draw further masks. Arguments are those of `nn.Dropout`.
    """

    batch_dim: int = 0
    """The dimension of the input that holds the samples."""

    @override
    def forward(self, input: Tensor, rows: Tensor | None = None, time: int = 1) -> Tensor:
        """Drop elements of the input.

        Args:
            rows: for an input of shape (rows, ...) that is part of a flattened (batch, time, ...): which rows these
                are, int64 of shape (rows,).
            time: rows of a sample, where `rows` is given.
        """
        if not self.training or self.p == 0 or not input.is_floating_point():
            return super().forward(input)
        dim, shape = self.batch_dim if rows is None else 0, input.shape
        samples = None if rows is not None else shape[dim] if len(shape) > dim else -1
        address = self._address(input, samples)
        if address is None:
            return super().forward(input)
        keys, layer, call = address
        if rows is None and dim == 0 and _is_channels_last(input):
            # The same factors in the layout of the input; a product of two layouts is slower.
            batch, channels, height, width = shape
            numbers = torch.arange(channels * height * width, dtype=torch.int32, device=input.device)
            numbers = numbers.view(channels, -1).t().flatten()
            factors = dropout_factors(keys, numbers, self.p, layer, call, dtype=input.dtype)
            factors = factors.view(batch, height, width, channels).permute(0, 3, 1, 2)
        else:
            rest = shape[:dim] + shape[dim + 1 :]
            factors = dropout_factors(keys, rest.numel(), self.p, layer, call, rows=rows, time=time, dtype=input.dtype)
            factors = factors.view(shape[dim], *rest).movedim(0, dim)
        return input.mul_(factors) if self.inplace else input * factors


class _StatelessFeatureDropout(StatelessLayer, _DropoutNd):
    """Drops whole channels of inputs of shape (batch, channels, ...)."""

    dims: int
    """Of an input with a batch."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or not input.is_floating_point():
            return self._torch_forward(input)
        shape = input.shape
        address = self._address(input, shape[0] if len(shape) == self.dims else -1)
        if address is None:
            return self._torch_forward(input)
        keys, layer, call = address
        factors = dropout_factors(keys, shape[1], self.p, layer, call, dtype=input.dtype)
        factors = factors.view(*shape[:2], *[1] * (self.dims - 2))
        return input.mul_(factors) if self.inplace else input * factors

    def _torch_forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        return output


class StatelessDropout1d(_StatelessFeatureDropout, nn.Dropout1d):
    """`nn.Dropout1d` whose noise is a function of the sample, as that of `StatelessDropout`."""

    dims = 3


class StatelessDropout2d(_StatelessFeatureDropout, nn.Dropout2d):
    """`nn.Dropout2d` whose noise is a function of the sample, as that of `StatelessDropout`."""

    dims = 4


class StatelessDropout3d(_StatelessFeatureDropout, nn.Dropout3d):
    """`nn.Dropout3d` whose noise is a function of the sample, as that of `StatelessDropout`."""

    dims = 5


_STATELESS: dict[type[nn.Module], type[StatelessLayer]] = {
    nn.Dropout: StatelessDropout,
    nn.Dropout1d: StatelessDropout1d,
    nn.Dropout2d: StatelessDropout2d,
    nn.Dropout3d: StatelessDropout3d,
    nn.GRU: StatelessGRU,
    nn.LSTM: StatelessLSTM,
}


def _refusal(layer: nn.Module) -> str:
    """Why the noise of a layer cannot be addressed by sample; empty where it can or there is none."""
    if type(layer) in _STATELESS or isinstance(layer, StatelessLayer):
        return ""
    if isinstance(layer, nn.MultiheadAttention):
        reason = "torch draws it inside the attention; set its `dropout` to 0 and drop its output instead"
        return reason if layer.dropout else ""
    if isinstance(layer, nn.RNNBase):
        reason = "only nn.GRU and nn.LSTM are run a layer at a time; use single layers with nn.Dropout between them"
        return reason if layer.dropout and layer.num_layers > 1 else ""
    if isinstance(layer, _DropoutNd):
        return "it has a forward pass of its own; use nn.Dropout, nn.Dropout1d, 2d or 3d" if layer.p else ""
    return "torch draws it inside; use another activation" if isinstance(layer, nn.RReLU) else ""


Network = TypeVar("Network", bound=nn.Module)


def stateless_dropout(module: Network) -> Network:
    """Makes the noise of a module's layers a function of the sample, in place; returns the module.

    It changes the class of each `nn.Dropout`, `nn.Dropout1d`, `2d`, `3d`, `nn.GRU` and `nn.LSTM` and nothing else:
    parameters, hooks, names and modes stay. Without `SeedControl` or `sample_noise` they act as before. What a
    ``forward`` draws by functions, as ``F.dropout``, is not found. Layers can be traced, compiled and exported, but not
    scripted (``torch.jit.script``).

    Raises:
        UserError: a layer draws noise that cannot be addressed by sample; nothing is changed.

    Example:
        >>> stateless_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
        Sequential(
          (0): Linear(in_features=2, out_features=2, bias=True)
          (1): StatelessDropout(p=0.1, inplace=False)
        )
    """
    refused = [
        f"{name or 'the module'} ({type(layer).__name__}): {reason}"
        for name, layer in module.named_modules()
        if (reason := _refusal(layer))
    ]
    if refused:
        raise UserError(f"noise that cannot be addressed by sample, in {'; in '.join(refused)}")
    layers = list(module.modules())
    for layer in layers:
        if type(layer) in _STATELESS:
            layer.__class__ = _STATELESS[type(layer)]
    for layer in layers:
        if isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            for child in layer.children():
                if isinstance(child, StatelessDropout):
                    child.batch_dim = 0 if layer.self_attn.batch_first else 1
    number_layers(module)
    return module
