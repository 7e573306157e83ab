"""A recurrent layer as one operation of a compiled graph.

torch.compile ends a graph at each `nn.GRU` and `nn.LSTM`. With ``torch._dynamo.config.allow_rnn`` it unrolls them
instead, and compiles each length of sentences anew. Here torch's kernel is one operation for any length. Its backward
pass is written out, because that kernel keeps what it needs in autograd's graph, which a compiled graph does not have:
all gates are computed again in two products, so that a step back in time is one small product.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["recurrent_layer"]


@torch.library.custom_op("lightning_recipes::recurrent_layer", mutates_args=())
def recurrent_layer(mode: str, data: Tensor, states: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The outputs, of shape (batch, time, hidden), and final states, (1, batch, hidden), of a layer of one direction.

    Args:
        mode: "GRU" or "LSTM".
        data: of shape (batch, time, size).
        states: the first one, and the cell's of an LSTM; of shape (1, batch, hidden).
        weights: those of the input and of the state, then their biases if there are any.
    """
    run: Any = {"LSTM": torch.lstm, "GRU": torch.gru}[mode]
    start = states if mode == "LSTM" else states[0]
    outputs, *ends = run(data, start, weights, len(weights) > 2, 1, 0.0, True, False, True)
    return [outputs.contiguous(), *(end.contiguous() for end in ends)]


@torch.library.custom_op("lightning_recipes::recurrent_layer_backward", mutates_args=())
def _backward(
    mode: str, gradients: list[Tensor], outputs: Tensor, data: Tensor, states: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """The gradients of data, states and weights, from those of the outputs and of the final states."""
    dtype = torch.promote_types(data.dtype, torch.float32)
    of_outputs, *of_ends = (gradient.to(dtype) for gradient in gradients)
    inputs, before = data.to(dtype), torch.cat((states[0].transpose(0, 1), outputs[:, :-1]), 1).to(dtype)
    of_input, of_state, *biases = (weight.to(dtype) for weight in weights)
    bias_of_input, bias_of_state = biases or (None, None)
    of_inputs = torch.nn.functional.linear(inputs, of_input, bias_of_input).unflatten(2, (-1, outputs.shape[2]))
    of_states = torch.nn.functional.linear(before, of_state, bias_of_state).unflatten(2, (-1, outputs.shape[2]))
    by_time = _gru_gradients if mode == "GRU" else _lstm_gradients
    into_inputs, into_states, ends = by_time(
        of_outputs, of_ends, of_inputs, of_states, before, [state.to(dtype)[0] for state in states], of_state
    )
    found = [into_inputs @ of_input, *(end.unsqueeze(0) for end in ends)]
    for into, layer_input in ((into_inputs, inputs), (into_states, before)):
        found.append(into.flatten(0, 1).t() @ layer_input.flatten(0, 1))
    found += [into.sum((0, 1)) for into in (into_inputs, into_states)] if biases else []
    like = [data, *states, *weights]
    return [gradient.to(tensor.dtype).contiguous() for gradient, tensor in zip(found, like, strict=True)]


def _gru_gradients(
    of_outputs: Tensor,
    of_ends: list[Tensor],
    of_inputs: Tensor,
    of_states: Tensor,
    before: Tensor,
    states: list[Tensor],
    weight: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of the gates, of shape (batch, time, 3 * hidden), as they reach inputs and states; and of the states.

    Args:
        of_inputs: the inputs' part of the gates before their functions, of shape (batch, time, 3, hidden).
        of_states: the states' part of the same.
        before: the state before each step, of shape (batch, time, hidden).
        weight: the states' weight.
    """
    reset = torch.sigmoid(of_inputs[:, :, 0] + of_states[:, :, 0])
    update = torch.sigmoid(of_inputs[:, :, 1] + of_states[:, :, 1])
    new = torch.tanh(of_inputs[:, :, 2] + reset * of_states[:, :, 2])
    by_new = (1 - update) * (1 - new * new)
    by_reset, by_update = by_new * of_states[:, :, 2] * reset * (1 - reset), (before - new) * update * (1 - update)
    into_inputs = torch.stack((by_reset, by_update, by_new), 2)
    into_states = torch.stack((by_reset, by_update, by_new * reset), 2)
    gradient, at_steps = of_ends[0][0], torch.empty_like(of_outputs)
    for step in reversed(range(of_outputs.shape[1])):
        gradient = gradient + of_outputs[:, step]
        at_steps[:, step] = gradient
        gates = (gradient.unsqueeze(1) * into_states[:, step]).flatten(1)
        gradient = torch.addmm(gradient * update[:, step], gates, weight)
    at_steps = at_steps.unsqueeze(2)
    return (into_inputs * at_steps).flatten(2), (into_states * at_steps).flatten(2), [gradient]


def _lstm_gradients(
    of_outputs: Tensor,
    of_ends: list[Tensor],
    of_inputs: Tensor,
    of_states: Tensor,
    before: Tensor,
    states: list[Tensor],
    weight: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """As `_gru_gradients`, of four gates; ``states[1]`` is the cell's before the first step."""
    sums = of_inputs + of_states
    enter, forget, leave = (torch.sigmoid(sums[:, :, gate]) for gate in (0, 1, 3))
    new, cell, cells = torch.tanh(sums[:, :, 2]), states[1], [states[1]]
    for step in range(sums.shape[1]):
        cell = forget[:, step] * cell + enter[:, step] * new[:, step]
        cells.append(cell)
    cell_before, shown = torch.stack(cells[:-1], 1), torch.tanh(torch.stack(cells[1:], 1))
    into_cell = leave * (1 - shown * shown)
    by_cell = torch.stack((new * enter * (1 - enter), cell_before * forget * (1 - forget), enter * (1 - new * new)), 2)
    by_output = (shown * leave * (1 - leave)).unsqueeze(2)
    gradient, of_cell = of_ends[0][0], of_ends[1][0]
    gates = torch.empty_like(sums)
    for step in reversed(range(sums.shape[1])):
        gradient = gradient + of_outputs[:, step]
        of_cell = of_cell + gradient * into_cell[:, step]
        gates[:, step, :3] = by_cell[:, step] * of_cell.unsqueeze(1)
        gates[:, step, 3:] = by_output[:, step] * gradient.unsqueeze(1)
        gradient, of_cell = gates[:, step].flatten(1) @ weight, of_cell * forget[:, step]
    return gates.flatten(2), gates.flatten(2), [gradient, of_cell]


@recurrent_layer.register_fake
def _(mode: str, data: Tensor, states: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    outputs = data.new_empty(*data.shape[:2], states[0].shape[2])
    return [outputs, *(torch.empty_like(state, memory_format=torch.contiguous_format) for state in states)]


@_backward.register_fake
def _(
    mode: str, gradients: list[Tensor], outputs: Tensor, data: Tensor, states: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (data, *states, *weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    mode, data, states, weights = inputs
    ctx.mode, ctx.states = mode, len(states)
    ctx.save_for_backward(output[0], data, *states, *weights)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    outputs, data, *rest = ctx.saved_tensors
    found = _backward(ctx.mode, gradients, outputs, data, rest[: ctx.states], rest[ctx.states :])
    return None, found[0], found[1 : 1 + ctx.states], found[1 + ctx.states :]


recurrent_layer.register_autograd(_differentiate, setup_context=_save)
