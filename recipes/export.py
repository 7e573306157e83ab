"""Export of a checkpoint's network; each file is compared with the network before it gets its name."""

import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.lib.writing import whole_or_nothing
from datamodules.contract import OneCall, marked_parameters
from datamodules.errors import UserError
from datamodules.images.augmentation import Normalise
from recipes.base import Recipe
from recipes.graphs import Graph, network_graph
from recipes.inputs import preprocessing
from recipes.version import __version__
from recipes.weights import read_weights

__all__ = ["Exported", "export"]

_ENDINGS = {
    "safetensors": ".safetensors",
    "state-dict": ".pt",
    "onnx": ".onnx",
}
_WEIGHTS = ("safetensors", "state-dict")
_BATCHES = (2, 1, 5)
_TOLERANCE = 1e-4
_ONNX_LIMIT = 2_000_000_000  # Bytes: what protobuf can hold, less the graph.

GraphRunner = Callable[..., dict[str, Tensor]]
"""Runs a file: takes a graph's inputs in their order, and returns its outputs by name."""


@runtime_checkable
class _NamesOutputs(Protocol):
    """A recipe that names the outputs of its network."""

    def named_outputs(self, outputs: Tensor) -> dict[str, Tensor]:
        """The outputs of an exported graph by name, from the output of the network."""


@runtime_checkable
class _HasGraphs(Protocol):
    """A recipe whose network is not exported as one graph for images."""

    def graphs(self) -> list[Graph]:
        """What is exported with its computation."""


@runtime_checkable
class _HasFiles(Protocol):
    """A recipe whose export of several graphs holds further files."""

    def export_files(self) -> dict[str, str]:
        """Texts that belong into the folder of an export of several graphs, by the name of the file."""


@runtime_checkable
class _HasMetadata(Protocol):
    """A recipe whose users have to know more than the constructor's arguments and the preprocessing."""

    def export_metadata(self) -> dict[str, Any]:
        """What is added to the metadata of exported files."""


def _named_outputs(recipe: Recipe, outputs: Tensor) -> dict[str, Tensor]:
    return recipe.named_outputs(outputs) if isinstance(recipe, _NamesOutputs) else {"outputs": outputs}


def _graphs(recipe: Recipe) -> list[Graph]:
    """The recipe's own, else its network for inputs of the shape of its `example_input_array`.

    It takes uint8 images, where their preprocessing is known.
    """
    if isinstance(recipe, _HasGraphs):
        return recipe.graphs()
    example = recipe.example_input_array
    if not isinstance(example, Tensor):
        return []
    return [network_graph(recipe.network, example, preprocessing(recipe), partial(_named_outputs, recipe))]


def _metadata(recipe: Recipe) -> dict[str, Any]:
    """What the users of an exported file have to know.

    ``hyper_parameters`` are the arguments of the constructor. Of images it has the names that timm gives them: ``mean``
    and ``std`` of pixels from 0 to 1, ``input_size`` as (channels, height, width).
    """
    of_one_call = marked_parameters(type(recipe), OneCall)
    arguments = {name: value for name, value in recipe.hparams.items() if name not in of_one_call}
    metadata: dict[str, Any] = {"recipe": recipe.title, "version": __version__, "hyper_parameters": arguments}
    prepares, example = preprocessing(recipe), recipe.example_input_array
    if isinstance(prepares, Normalise) and isinstance(example, Tensor):
        metadata |= {"mean": prepares.mean, "std": prepares.std, "input_size": tuple(example.shape[1:])}
        metadata["layout"] = "NCHW"
    return metadata | (recipe.export_metadata() if isinstance(recipe, _HasMetadata) else {})


@dataclass(frozen=True)
class Exported:
    """What was written, what it takes, and the result of comparing it with the network."""

    path: Path
    inputs: dict[str, str]
    check: str


def _load(recipe: Recipe, checkpoint_path: str) -> dict[str, Any]:
    """Load a checkpoint into a recipe on the CPU, in the dtype of the checkpoint.

    Raises:
        UserError: weights are NaN.
    """
    checkpoint: dict[str, Any] = load_plain(checkpoint_path)
    weights = checkpoint["state_dict"]
    if broken := next((name for name, value in weights.items() if torch.isnan(value).any()), None):
        raise UserError(f"{broken} in {checkpoint_path} is NaN: the training diverged; pass an earlier checkpoint")
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        recipe.network.to(kinds.pop())
    recipe.on_load_checkpoint(checkpoint)
    recipe.load_state_dict(weights)
    recipe.eval()
    return checkpoint


def _errors(graph: Graph, other: Callable[..., dict[str, Tensor]]) -> list[float]:
    """How far the outputs of `other` are off, for several batch sizes, relative to the largest value of each output."""
    errors: list[float] = []
    for batch in _BATCHES:
        inputs = graph.example(batch)
        expected, found = graph.module(*inputs), other(*inputs)
        for name, value in expected.items():
            error = (value.double() - found[name].double()).abs()
            if value.numel():  # A decoder's state may be empty before the first step.
                errors.append((error.max() / value.double().abs().max().clamp(min=1e-6)).item())
    return errors


def _agreement(kind: str, errors: Sequence[float], tolerance: float) -> str:
    """A sentence about the largest of the errors, which has to be within the tolerance."""
    worst = torch.tensor(errors).max().item()  # Unlike Python's, NaN where one is NaN.
    if not worst <= tolerance:
        raise UserError(
            f"the outputs of the {kind} file differ from the network's by {worst:.1e}, relative to their size"
        )
    found = f"outputs differ by at most {worst:.1e}, relative to their size" if worst else "equal outputs"
    return f"{found}, for batches of {', '.join(map(str, _BATCHES))}"


def _check_packages(kind: str) -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if kind == "onnx" and missing:
        raise UserError(f"onnx needs {', '.join(missing)}; run pip install 'lightning-recipes[onnx]'")


def _as_text(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata for formats that hold texts: strings as they are, all else as JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}


def _write_weights(network: nn.Module, path: Path, kind: str, metadata: Mapping[str, Any]) -> None:
    """Write the state dict of a network, under its names, with the metadata beside it."""
    # Tied weights are one tensor under two names; safetensors needs a tensor for each.
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}
    if kind == "safetensors":
        from safetensors.torch import save

        path.write_bytes(save(weights, _as_text(metadata)))  # `save_file` lets nobody else read its file.
    else:
        torch.save({"state_dict": weights, **metadata}, path)


def _check_weights(recipe: Recipe, path: Path) -> nn.Module:
    """A new network with the weights of a file.

    Raises:
        UserError: they are not those of the recipe, to the bit.
    """
    network = recipe.build_network()
    network.to(next(p.dtype for p in recipe.network.parameters()))
    network.load_state_dict(read_weights(path))
    for name, tensor in recipe.network.state_dict().items():
        if not torch.equal(network.state_dict()[name], tensor):
            raise UserError(f"{path} does not hold {name} as the checkpoint does; the disk may be damaged")
    network.to(memory_format=torch.channels_last if recipe.hparams.channels_last else torch.preserve_format)
    return network.eval()


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
    model.metadata_props.update(_as_text(metadata))
    program.save(str(path), external_data=False)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> dict[str, Tensor]:
        feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return dict(zip(outputs, map(torch.from_numpy, session.run(outputs, feeds)), strict=True))

    return run


def _write_graph(graph: Graph, path: Path, metadata: Mapping[str, Any]) -> GraphRunner:
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


@contextmanager
def _part_of(path: Path) -> Iterator[Path]:
    """A file that takes the place of `path` in the end."""
    with whole_or_nothing(path) as part:
        part.touch()  # Where that fails, exporters would raise errors of their own.
        yield part


def _export_weights(recipe: Recipe, path: Path, kind: str, metadata: dict[str, Any]) -> Exported:
    if (path.suffix == ".safetensors") != (kind == "safetensors"):
        raise UserError(f"--output {path}: a {kind} file ends in {_ENDINGS[kind]}")
    with _part_of(path) as part:
        _write_weights(recipe.network, part, kind, metadata)
        network, example = _check_weights(recipe, part), recipe.example_input_array
        if not isinstance(example, Tensor):
            return Exported(path, {}, "every tensor equal to the checkpoint's")
        expected, found = (
            network_graph(each, example, None, partial(_named_outputs, recipe)) for each in (recipe.network, network)
        )
        return Exported(path, {}, _agreement(kind, _errors(expected, found.module), tolerance=0.0))


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _export_graphs(recipe: Recipe, path: Path, graphs: list[Graph], metadata: dict[str, Any]) -> Exported:
    """Write a file for each graph: all of them and what belongs to them get their names, or none does."""
    inputs = {put.name: put.text for graph in graphs for put in graph.inputs}
    metadata = metadata | {"inputs": inputs}
    texts: dict[str, str] = {}
    files = [path]
    if len(graphs) > 1:
        if path.is_file():
            raise UserError(f"--output {path} is a file; {recipe.title} is exported to a folder of several files")
        files = [path / f"{graph.name}.onnx" for graph in graphs]
        texts = {"metadata.json": json.dumps(metadata, indent=1, ensure_ascii=False)}
        texts |= recipe.export_files() if isinstance(recipe, _HasFiles) else {}
    errors: list[float] = []
    with ExitStack() as stack:
        if len(graphs) > 1:
            stack.callback(_remove_empty, path)
        for graph, file in zip(graphs, files, strict=True):
            part = stack.enter_context(_part_of(file))
            errors += _errors(graph, _write_graph(graph, part, metadata))
        for name, text in texts.items():
            stack.enter_context(whole_or_nothing(path / name)).write_text(text, encoding="utf-8")
        return Exported(path, inputs, _agreement("onnx", errors, _TOLERANCE))


@torch.no_grad()
def export(recipe: Recipe, checkpoint_path: str, kind: str, output: str | None = None) -> Exported:
    """Write the network of a checkpoint, and compare the outputs of the files with those of the network.

    Args:
        recipe: built with the checkpoint's settings.
        kind: safetensors or state-dict for the weights alone, under the names of `recipe.network`; onnx with the
            computation, for any batch size. Its graph takes uint8 images, where the checkpoint knows how they are
            normalised.
        output: the file, or the folder where a network has several graphs; by default beside the checkpoint.

    Raises:
        UserError: weights are NaN, the recipe or this installation cannot write the format, or a file has other
            outputs.
    """
    _check_packages(kind)
    checkpoint = _load(recipe, checkpoint_path)
    graphs = [] if kind in _WEIGHTS else _graphs(recipe)
    if kind not in _WEIGHTS and not graphs:
        raise UserError(
            f"{recipe.title} cannot be written as {kind}: it has no example_input_array with the shape of the network's"
            " input; pass --format safetensors"
        )
    ending = _ENDINGS[kind] if len(graphs) <= 1 else f"-{kind}"
    beside = Path(checkpoint_path)
    path = Path(output) if output else beside.with_name(beside.stem + ending)
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}")
    if len(graphs) <= 1 and path.is_dir():
        raise UserError(f"--output {path} is a folder; name a file in it")
    metadata = json.loads(json.dumps(_metadata(recipe) | {"config": checkpoint.get("config")}, default=str))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if kind in _WEIGHTS:
                return _export_weights(recipe, path, kind, metadata)
            return _export_graphs(recipe, path, graphs, metadata)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}; pass another --output") from error
