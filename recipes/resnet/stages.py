"""A network as a sequence of stages, found by following its forward pass.

Freezing, learning rates per layer, cached features and Grad-CAM refer to stages. torch.fx records which operation of
the forward pass uses which value; wherever a single value goes on, the pass can be cut in two.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from datamodules.errors import UserError

__all__ = ["NetworkStages", "Stage", "run_stages", "stages_of"]

Stage = tuple[str, Sequence[nn.Module]]
"""A name, and the modules that run one after the other."""

_ENOUGH = 4
"""Stages before the head, from which on a large one stays in one piece: ResNets have that many, and the stem."""


def run_stages(stages: Sequence[Stage], inputs: Tensor) -> Tensor:
    """Pass a batch through stages."""
    for _, modules in stages:
        for module in modules:
            inputs = module(inputs)
    return inputs


@dataclass(frozen=True)
class NetworkStages:
    """The stages of a network, from the images to the head, which is the last.

    Args:
        stages: run one after the other they are the forward pass, where `obstacle` is empty; else the parts of the
            network in the order in which they run.
        last_block: name of the last module with weights, before the head, whose output is not pooled to a vector.
        has_maps: its output has the shape (batch, channels, height, width), as Grad-CAM needs it.
        obstacle: why the stages are not the forward pass.
    """

    stages: list[Stage]
    last_block: str
    has_maps: bool
    obstacle: str

    def line(self) -> str:
        """The stages in one line.

        >>> stages = [(name, []) for name in ("stem", "layer1", "layer2", "layer3", "pool", "fc")]
        >>> NetworkStages(stages, "layer3", True, "").line()
        'stages of the network: stem, layer1, layer2, layer3, pool, fc'
        """
        names = [name for name, _ in self.stages]
        if len(names) > 12:
            names = [*names[:3], f"... ({len(names) - 6} more)", *names[-3:]]
        line = f"stages of the network: {', '.join(names)}"
        if self.obstacle:
            line += f"; these are its modules in the order in which they run, because {self.obstacle}"
        return line if self.has_maps else f"{line}; no Grad-CAM, because {self.last_block} gives no maps"


@dataclass(frozen=True)
class _Part:
    """A step of the forward pass.

    Args:
        name: of the first module that it calls, or of a function.
        module: what runs.
        layers: the modules of the network that it calls.
        shapes: of an example of what it takes and gives.
    """

    name: str
    module: nn.Module
    layers: Sequence[nn.Module]
    shapes: tuple[torch.Size, torch.Size] = (torch.Size(), torch.Size())

    @property
    def weighs(self) -> bool:
        """Whether it holds weights, not only a norm, an embedding of positions, or nothing."""
        return any(p.ndim > 1 for layer in self.layers for p in layer.parameters())

    @property
    def size(self) -> int:
        """The number of parameters in its layers."""
        return sum(p.numel() for layer in self.layers for p in layer.parameters())

    @property
    def is_one_layer(self) -> bool:
        """Whether it calls a single module of the network, perhaps with further arguments."""
        return len(self.layers) == 1


class _Stretch(nn.Module):
    """Some operations of a network, as a module that holds the layers and parameters in them.

    They are looked up in the network at each call, so that it may have moved to another device.
    """

    def __init__(self, outer: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        named = [(str(node.target), node.op) for node in graph.nodes]
        self.layers = nn.ModuleList(outer.get_submodule(name) for name, op in named if op == "call_module")
        attributes = [operator.attrgetter(name)(outer) for name, op in named if op == "get_attr"]
        self.own = nn.ParameterList(each for each in attributes if isinstance(each, nn.Parameter))
        self.interpreter = fx.Interpreter(outer, graph=graph)
        for module in (self, self.layers, self.own):
            module.training = False  # They act the same in both modes, and none is set later.

    @override
    def forward(self, inputs: Any) -> Any:
        return self.interpreter.run(inputs)


class _Tracer(fx.Tracer):
    """Records the calls of modules, and what happens between them inside those that are opened."""

    def __init__(self, opened: Collection[nn.Module]) -> None:
        super().__init__()
        self.opened = opened

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.opened


@contextmanager
def _in_mode(network: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode for a while; afterwards each layer has its own mode."""
    modes = [(layer, layer.training) for layer in network.modules()]
    for layer, _ in modes:
        layer.training = training
    try:
        yield
    finally:
        for layer, before in modes:
            layer.training = before


def _graph_of(network: nn.Module, opened: Collection[nn.Module]) -> tuple[fx.Graph, nn.Module]:
    """The operations of the forward pass, and the module that their names begin at.

    Raises:
        Exception: any, where torch.fx cannot follow it; ValueError where training takes another way.
    """
    outer = nn.Sequential(network)  # It passes one argument, whatever further ones `network` takes.
    graphs = []
    for training in (True, False):
        with _in_mode(network, training):
            graphs.append(_Tracer(opened).trace(outer))
    if str(graphs[0]) != str(graphs[1]):
        raise ValueError("it computes otherwise in training")
    return graphs[1], outer


def _cut(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """The value that goes in and the operations, for each stretch of a graph that takes and gives a single value.

    Raises:
        ValueError: the network gives several values.
    """
    (images,) = (node for node in graph.nodes if node.op == "placeholder")
    steps = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    order = {node: number for number, node in enumerate(steps)}
    last_use = {
        node: max((order.get(user, len(steps)) for user in node.users), default=-1) for node in [images, *steps]
    }
    alive, value, stretch = {images}, images, []
    for number, node in enumerate(steps):
        stretch.append(node)
        alive = {each for each in (*alive, node) if last_use[each] > number}
        if alive == {node}:
            yield value, stretch
            value, stretch = node, []
    if stretch:
        raise ValueError("it gives several values")


def _part(outer: nn.Module, value: fx.Node, nodes: Sequence[fx.Node]) -> _Part:
    """A stretch of the graph as a module: the network's own where it is one call."""
    targets = [str(node.target) for node in nodes if node.op == "call_module"]
    name, layers = str(nodes[-1]), [outer.get_submodule(target) for target in targets]
    if targets:
        name = targets[0].partition(".")[2]
    if len(nodes) == 1 and layers and nodes[0].args == (value,) and not nodes[0].kwargs:
        return _Part(name, layers[0], layers)
    graph = fx.Graph()
    copies = {value: graph.placeholder("inputs")}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # A parameter, which each stretch fetches by itself.
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(copies[nodes[-1]])
    return _Part(name, _Stretch(outer, graph), layers)


def _parts_of(network: nn.Module, opened: Collection[nn.Module]) -> list[_Part]:
    graph, outer = _graph_of(network, opened)
    return [_part(outer, value, nodes) for value, nodes in _cut(graph)]


def _children_of(network: nn.Module, opened: Collection[nn.Module]) -> list[_Part]:
    """The modules directly inside those that are opened, and inside lists, which are never called."""
    parts = []

    def descend(outer: nn.Module, path: str) -> None:
        for name, layer in outer.named_children():
            if layer in opened or isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
                descend(layer, f"{path}{name}.")
            else:
                parts.append(_Part(f"{path}{name}", layer, [layer]))

    descend(network, "")
    return parts or [_Part("network", network, [network])]


def _opened_up(network: nn.Module, split: Callable[[nn.Module, Collection[nn.Module]], list[_Part]]) -> list[_Part]:
    """The network in parts: the head is opened as far as possible, large parts before it until there are enough.

    Args:
        split: gives the parts where some modules are opened, or raises any exception.
    """
    opened = {network}
    parts, closed = split(network, opened), set()

    def counts(parts: Sequence[_Part]) -> tuple[int, int]:
        weighing = [part for part in parts if part.weighs]
        return len(weighing), sum(not part.is_one_layer for part in weighing)

    while weighing := [part for part in parts if part.weighs]:
        *trunk, head = weighing
        trunk = sorted(trunk, key=lambda part: part.size, reverse=True) if len(trunk) < _ENOUGH else []
        candidates = [part.module for part in (head, *trunk) if not isinstance(part.module, _Stretch)]
        layer = next((each for each in candidates if each not in closed and any(each.children())), None)
        if layer is None:
            break
        try:
            finer = split(network, opened | {layer})
        except Exception:  # Whatever torch.fx cannot follow raises.
            finer = []
        # Blocks with a shortcut fall into pieces that are no modules of the network.
        (more, mixed), (now, mixed_now) = counts(finer), counts(parts)
        if more >= now and mixed <= mixed_now:
            opened.add(layer)
            parts = finer
        else:
            closed.add(layer)
    return parts


def _run(parts: Sequence[_Part], value: Tensor) -> tuple[list[_Part], Tensor]:
    """Run parts one after the other, and note the shapes.

    Raises:
        ValueError: one passes on something else than a tensor.
    """
    ran = []
    for part in parts:
        result = part.module(value)
        if not isinstance(result, Tensor):
            raise ValueError(f"{part.name} gives several values")
        ran.append(replace(part, shapes=(value.shape, result.shape)))
        value = result
    return ran, value


def _in_order_of_calls(parts: Sequence[_Part], network: nn.Module, inputs: Tensor) -> list[_Part]:
    """The parts in the order in which they first run, before them those that do not."""
    seen: dict[nn.Module, tuple[torch.Size, torch.Size]] = {}

    def note(layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        firsts = (next((leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)), None) for x in (given, output))
        size, result = (torch.Size() if first is None else first.shape for first in firsts)
        seen.setdefault(layer, (size, result))

    handles = [part.module.register_forward_hook(note) for part in parts]
    try:
        network(inputs)
    finally:
        for handle in handles:
            handle.remove()
    ran = [replace(next(p for p in parts if p.module is layer), shapes=shapes) for layer, shapes in seen.items()]
    return [part for part in parts if part.module not in seen] + ran


def _grouped(parts: Sequence[_Part]) -> list[tuple[str, list[_Part]]]:
    """Parts in stages: each begins with weights, and takes along the norms, activations and pooling behind them.

    What runs between the last norm or weight and the head is "pool", what comes before the second weights "stem" where
    it is several parts.
    """
    weighing = [number for number, part in enumerate(parts) if part.weighs]
    if len(weighing) < 2:
        return [(parts[min(weighing, default=0)].name, list(parts))]
    *trunk, head = weighing
    pool = 1 + max(number for number in range(head) if list(parts[number].module.parameters()))
    bounds = [0, *trunk[1:], pool, head, len(parts)]
    names = [*(parts[number].name for number in trunk), "pool", parts[head].name]
    stages = [(name, list(parts[a:b])) for name, (a, b) in zip(names, pairwise(bounds), strict=True) if a < b]
    if len(stages[0][1]) > 1:
        stages[0] = ("stem", stages[0][1])
    return stages


def _positions(shape: torch.Size) -> int:
    return shape[2:].numel() if len(shape) > 2 else 0


def _last_block(stages: Sequence[tuple[str, list[_Part]]]) -> _Part:
    """The last module with weights, before the head, whose output is not pooled to a vector."""
    found = before = stages[0][1][0]
    for _, parts in stages[:-1]:
        part = next((part for part in parts if part.weighs), None)
        if part is None or not part.shapes[1]:
            continue
        size, result = (_positions(shape) for shape in part.shapes)
        if not result or size == 1 < _positions(before.shapes[1]):
            break
        before = part
        if part.is_one_layer:
            found = part
    return found


def _reason(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:120]


def stages_of(network: nn.Module, example: Tensor) -> NetworkStages:
    """The stages of any network that maps images to logits.

    The forward pass is followed by torch.fx, cut, and run in evaluation mode with random images, piece by piece and as
    a whole; a network for which that fails is cut into its modules, in the order in which they run. No state changes.

    Args:
        example: an input of the network, of shape (1, 3, height, width); its values do not matter.

    Raises:
        UserError: the network cannot take such images.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
        >>> [name for name, _ in stages_of(network, torch.zeros(1, 3, 8, 8)).stages]
        ['0', 'pool', '3']
    """
    images = torch.rand(example.shape, generator=torch.Generator().manual_seed(1))
    images = images.to(next(network.parameters(), example))
    with torch.no_grad(), _in_mode(network, training=False):
        try:
            expected = network(images)
        except Exception as error:
            size = " x ".join(map(str, images.shape[2:]))
            raise UserError(
                f"the network cannot take images of {size} pixels ({_reason(error)}); pass another `image_size`, or"
                " another architecture"
            ) from error
        obstacle = ""
        try:
            parts, found = _run(_opened_up(network, _parts_of), images)
            if not torch.equal(found, expected):
                obstacle = "one after the other they compute something else"
            elif 2 * max(0 if part.is_one_layer else part.size for part in parts) > sum(part.size for part in parts):
                obstacle = "most of them pass on several values"
        except Exception as error:
            obstacle = f"torch.fx cannot follow the forward pass ({_reason(error)})"
        if obstacle:
            parts = _in_order_of_calls(_opened_up(network, _children_of), network, images)
    stages = _grouped(parts)
    block = _last_block(stages)
    result = block.shapes[1]
    # Images are square, and so are maps; some transformers have their channels last.
    has_maps = len(result) == 4 and result[2] == result[3]
    return NetworkStages(
        [(name, [part.module for part in parts]) for name, parts in stages], block.name, has_maps, obstacle
    )
