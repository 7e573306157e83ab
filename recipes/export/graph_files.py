"""Files of a network with its computation: ONNX."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError
from recipes.export.weight_files import as_text
from recipes.graphs import Graph
from recipes.version import __version__

__all__ = ["GraphRunner", "write_graph"]

GraphRunner = Callable[..., dict[str, Tensor]]
"""Runs a file: takes a graph's inputs in their order, and returns its outputs by name."""

_ONNX_LIMIT = 2_000_000_000  # Bytes: what protobuf can hold, less the graph.


def _dynamic_shapes(graph: Graph) -> tuple[dict[int, Any], ...]:
    names = sorted({name for put in graph.inputs for name in put.dynamic.values()})
    dims = {name: torch.export.Dim(name) for name in names}
    return tuple({axis: dims[name] for axis, name in put.dynamic.items()} for put in graph.inputs)


def _write_onnx(graph: Graph, path: Path, metadata: Mapping[str, Any]) -> GraphRunner:
    size = sum(tensor.nbytes for tensor in graph.module.state_dict().values())
    if size > _ONNX_LIMIT:
        # The weights would be written to a second file, which a rename does not move.
        raise UserError(
            f"an onnx file holds 2 GB at most, and the weights are {size / 1e9:.1f} GB; pass --format safetensors"
        )
    example = graph.example(2)
    names, outputs = [put.name for put in graph.inputs], list(graph.module(*example))
    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": _dynamic_shapes(graph), "verbose": False}
    # Else a second recurrent network of a process is traced by the loop of the first, for the length of its example.
    torch.ops.aten.gru.input._dispatch_cache.clear()
    program = torch.onnx.export(graph.module, example, input_names=names, output_names=outputs, **options)
    assert program is not None
    model = program.model
    recurrent = any(node.op_type == "GRU" for node in model.graph.all_nodes())
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # It names the folders of this machine.
        for value in node.outputs if recurrent else ():
            if value.shape is not None:  # torch writes the length of the example, as if no other were taken.
                value.shape = type(value.shape)(None if isinstance(size, int) else size for size in value.shape)
    for value, put in zip(model.graph.inputs, graph.inputs, strict=True):
        value.doc_string = put.text
    model.producer_name, model.producer_version = "lightning-recipes", __version__
    model.metadata_props.update(as_text(metadata))
    program.save(str(path), external_data=False)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> dict[str, Tensor]:
        feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return dict(zip(outputs, map(torch.from_numpy, session.run(outputs, feeds)), strict=True))

    return run


def write_graph(graph: Graph, path: Path, metadata: Mapping[str, Any]) -> GraphRunner:
    """Write a graph, and return what runs the file.

    Raises:
        UserError: the format cannot hold it.
    """
    try:
        return _write_onnx(graph, path, metadata)
    except (UserError, OSError):
        raise
    except Exception as error:  # What torch's exporter makes of a network may be anything.
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"torch cannot write the {graph.name or 'network'} as onnx ({type(error).__name__}: {reason}); pass"
            " --format safetensors"
        ) from error
