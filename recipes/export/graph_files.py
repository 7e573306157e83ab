"""Files of a network with its computation: TorchScript, ONNX, and torch.export's pt2."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from recipes.export.weight_files import as_text
from recipes.graphs import Graph
from recipes.version import __version__

__all__ = ["GraphRunner", "write_graph"]

GraphRunner = Callable[..., dict[str, Tensor]]
"""Runs a file: takes a graph's inputs in their order, and returns its outputs by name."""

_METADATA_FILE = "metadata.json"
_ONNX_LIMIT = 2_000_000_000  # Bytes: what protobuf can hold, less the graph.


def _write_torchscript(graph: Graph, path: Path, metadata: Mapping[str, Any]) -> GraphRunner:
    traced = torch.jit.trace(graph.module, graph.example(2), strict=False)  # strict refuses dictionaries.
    torch.jit.save(traced, str(path), _extra_files={_METADATA_FILE: json.dumps(metadata)})
    loaded: GraphRunner = torch.jit.load(str(path))
    return loaded


def _dynamic_shapes(graph: Graph) -> tuple[dict[int, Any], ...]:
    names = sorted({name for put in graph.inputs for name in put.dynamic.values()})
    dims = {name: torch.export.Dim(name) for name in names}
    return tuple({axis: dims[name] for axis, name in put.dynamic.items()} for put in graph.inputs)


@contextmanager
def _loops_of_any_length() -> Iterator[None]:
    """Trace GRU and LSTM layers for any length; torch.export's own loop over the tokens fixes that of the example.

    The file holds whole layers, not these loops: they only tell torch.export the shapes.
    """
    from torch.export import _patches  # As torch.onnx does; no public name offers it.

    def forget() -> None:
        for op in (torch.ops.aten.gru.input, torch.ops.aten.lstm.input):
            op._dispatch_cache.clear()  # Else what was traced first in a process is traced ever after.

    try:
        with _patches.register_gru_while_loop_decomposition(), _patches.register_lstm_while_loop_decomposition():
            forget()
            yield
    finally:
        forget()


def _write_pt2(graph: Graph, path: Path, metadata: Mapping[str, Any]) -> GraphRunner:
    recurrent = any(isinstance(module, nn.RNNBase) for module in graph.module.modules())
    try:
        with _loops_of_any_length() if recurrent else nullcontext():
            program = torch.export.export(graph.module, graph.example(2), dynamic_shapes=_dynamic_shapes(graph))
    except Exception as error:
        if recurrent:
            raise UserError("this torch.export unrolls recurrent layers for one length; pass --format onnx") from error
        raise
    with path.open("wb") as file:  # By name it has to end in .pt2.
        torch.export.save(program, file, extra_files={_METADATA_FILE: json.dumps(metadata)})
    with path.open("rb") as file:
        loaded: GraphRunner = torch.export.load(file).module()
    return loaded


def _write_onnx(graph: Graph, path: Path, metadata: Mapping[str, Any]) -> GraphRunner:
    size = sum(tensor.nbytes for tensor in graph.module.state_dict().values())
    if size > _ONNX_LIMIT:
        # The weights would be written to a second file, which a rename does not move.
        raise UserError(f"an onnx file holds 2 GB at most, and the weights are {size / 1e9:.1f} GB; pass --format pt2")
    example = graph.example(2)
    names, outputs = [put.name for put in graph.inputs], list(graph.module(*example))
    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": _dynamic_shapes(graph), "verbose": False}
    program = torch.onnx.export(graph.module, example, input_names=names, output_names=outputs, **options)
    assert program is not None
    model = program.model
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # It names the folders of this machine.
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


_WRITERS = {"torchscript": _write_torchscript, "pt2": _write_pt2, "onnx": _write_onnx}


def write_graph(graph: Graph, path: Path, kind: str, metadata: Mapping[str, Any]) -> GraphRunner:
    """Write a graph, and return what runs the file.

    Args:
        kind: torchscript, onnx or pt2.

    Raises:
        UserError: the format cannot hold it.
    """
    try:
        return _WRITERS[kind](graph, path, metadata)
    except (UserError, OSError):
        raise
    except Exception as error:  # What torch's exporters make of a network may be anything.
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"torch cannot write the {graph.name or 'network'} as {kind} ({type(error).__name__}: {reason}); pass"
            " another --format"
        ) from error
