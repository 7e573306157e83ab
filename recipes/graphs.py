"""What an export holds of a network's computation: graphs, whose inputs and outputs have names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["Graph", "GraphInput", "network_graph"]


@dataclass(frozen=True)
class GraphInput:
    """An input of a graph.

    Args:
        name: in the file.
        text: its type, shape and values, for the users of the file.
        dynamic: the dimensions that may have any size, by name, as in ``{0: "batch"}``.
    """

    name: str
    text: str
    dynamic: Mapping[int, str]


@dataclass(frozen=True)
class Graph:
    """A network, or a part of it, as other programs run it.

    Args:
        module: takes the inputs in their order, and returns the outputs by name.
        inputs: in their order.
        example: makes random inputs of a batch size.
        name: tells the graphs of a network apart; empty where there is one.
    """

    module: nn.Module
    inputs: tuple[GraphInput, ...]
    example: Callable[[int], tuple[Tensor, ...]]
    name: str = ""


class _Pipeline(nn.Module):
    """A network behind its preprocessing, with named outputs."""

    def __init__(
        self, network: nn.Module, preprocessing: nn.Module | None, outputs: Callable[[Tensor], dict[str, Tensor]]
    ) -> None:
        super().__init__()
        self.network, self.preprocessing, self.outputs = network, preprocessing, outputs
        self.dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
        self.eval()

    @override
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if self.preprocessing is not None:
            images = self.preprocessing(images)
        return self.outputs(self.network(images.to(self.dtype)))


def network_graph(
    network: nn.Module,
    example: Tensor,
    preprocessing: nn.Module | None,
    outputs: Callable[[Tensor], dict[str, Tensor]],
) -> Graph:
    """A network of one input, for any batch size.

    Args:
        example: an input of the network, of shape (1, ...).
        preprocessing: what maps uint8 images to the network's inputs; the graph's input is then called ``images``.
            Where it is not known, None, the input is called ``inputs``.
        outputs: gives the network's outputs their names.
    """
    sizes = tuple(example.shape[1:])
    pipeline = _Pipeline(network, preprocessing, outputs)
    generator = torch.Generator().manual_seed(1)
    layout = f"of shape ({', '.join(map(str, ('batch', *sizes)))})"
    kind = str(pipeline.dtype).removeprefix("torch.")
    if preprocessing is None:
        name, text = "inputs", f"{kind} {layout}, as the network takes it"
    else:
        name, text = "images", f"uint8 {layout}: channels first, pixels from 0 to 255"

    def random(batch: int) -> tuple[Tensor]:
        if name == "images":
            return (torch.randint(256, (batch, *sizes), dtype=torch.uint8, generator=generator),)
        return (torch.randn((batch, *sizes), generator=generator).to(pipeline.dtype),)

    return Graph(pipeline, (GraphInput(name, text, {0: "batch"}),), random)
