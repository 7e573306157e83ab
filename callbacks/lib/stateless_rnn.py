"""Recurrent layers whose dropout between the layers is a function of the sample."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from callbacks.lib.sample_noise import StatelessLayer, dropout_factors

__all__ = ["StatelessGRU", "StatelessLSTM"]


def _packed_rows(packed: PackedSequence) -> tuple[Tensor, int]:
    """The row of each entry of a packed batch in a flattened (batch, time), and the longest time."""
    sizes = packed.batch_sizes
    steps = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    samples = torch.arange(len(steps)) - (sizes.cumsum(0) - sizes)[steps]
    device = packed.data.device
    steps, samples = steps.to(device, non_blocking=True), samples.to(device, non_blocking=True)
    if packed.sorted_indices is not None:
        samples = packed.sorted_indices[samples]
    return samples * len(sizes) + steps, len(sizes)


class _StatelessRNN(StatelessLayer, nn.RNNBase):
    """Recurrent layers whose dropout between the layers is a function of the sample.

    With such noise the layers run one after the other, by torch's own kernels. On a GPU that costs time, which has not
    been measured: cuDNN gets a call for each layer, and torch copies the layer's weights into one block each time and
    warns of it. Modules of one layer each, with `StatelessDropout` between them, do not have that cost.
    """

    @override
    def forward(self, input: Any, hx: Any = None) -> Any:
        packed = input if isinstance(input, PackedSequence) else None
        data: Tensor = input if packed is None else packed.data
        if not self.training or self.p_between == 0:
            return super().forward(input, hx)
        if packed is not None:
            samples = int(packed.batch_sizes[0])
        else:
            samples = data.shape[0 if self.batch_first else 1] if data.dim() == 3 else -1
        address = self._address(data, samples)
        if address is None:
            return super().forward(input, hx)
        return self._run_layers(data, packed, hx, *address)

    @property
    def p_between(self) -> float:
        """The probability with which outputs of a layer that another follows are dropped."""
        return self.dropout if self.num_layers > 1 else 0.0

    def _run_layers(
        self, data: Tensor, packed: PackedSequence | None, hx: Any, keys: Tensor, layer: int, call: int
    ) -> Any:
        """Run one layer after the other, with dropout between them."""
        directions = 2 if self.bidirectional else 1
        if hx is None:
            shape = (self.num_layers * directions, len(keys))
            sizes = (self.proj_size or self.hidden_size, self.hidden_size)
            states = tuple(data.new_zeros(*shape, size) for size in (sizes if self.mode == "LSTM" else sizes[:1]))
        else:
            states = tuple(hx) if self.mode == "LSTM" else (hx,)
            if packed is not None and packed.sorted_indices is not None:
                states = tuple(state.index_select(1, packed.sorted_indices) for state in states)
        rows, time = (None, data.shape[1 if self.batch_first else 0]) if packed is None else _packed_rows(packed)
        run: Any = {"LSTM": torch.lstm, "GRU": torch.gru}[self.mode]
        weights, ends = self.all_weights, []
        for number in range(self.num_layers):
            here = slice(number * directions, (number + 1) * directions)
            parts = [state[here].contiguous() for state in states]
            start = parts if self.mode == "LSTM" else parts[0]
            settings: Any = ([w for direction in weights[here] for w in direction], self.bias, 1, 0.0, True)
            if packed is None:
                data, *end = run(data, start, *settings, self.bidirectional, self.batch_first)
            else:
                data, *end = run(data, packed.batch_sizes, start, *settings, self.bidirectional)
            ends.append(end)
            if number + 1 < self.num_layers:
                data = data * self._factors(data, keys, layer, call, number, rows, time)
        final = [torch.cat(end) for end in zip(*ends)]
        if packed is not None:
            if packed.unsorted_indices is not None:
                final = [end.index_select(1, packed.unsorted_indices) for end in final]
            return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices), (
                tuple(final) if self.mode == "LSTM" else final[0]
            )
        return data, tuple(final) if self.mode == "LSTM" else final[0]

    def _factors(
        self, data: Tensor, keys: Tensor, layer: int, call: int, part: int, rows: Tensor | None, time: int
    ) -> Tensor:
        size = data.shape[-1]
        if rows is not None:
            return dropout_factors(keys, size, self.dropout, layer, call, part, rows, time, data.dtype)
        factors = dropout_factors(keys, time * size, self.dropout, layer, call, part, dtype=data.dtype)
        factors = factors.view(len(keys), time, size)
        return factors if self.batch_first else factors.transpose(0, 1)


class StatelessGRU(_StatelessRNN, nn.GRU):
    """`nn.GRU` whose dropout between layers is a function of the sample, as that of `StatelessDropout`."""


class StatelessLSTM(_StatelessRNN, nn.LSTM):
    """`nn.LSTM` whose dropout between layers is a function of the sample, as that of `StatelessDropout`."""
