"""Export of a checkpoint's network; each file is compared with the network before it gets its name."""

import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.lib.writing import whole_or_nothing
from datamodules.errors import UserError
from recipes.export.graph_files import write_graph
from recipes.export.weight_files import check_weights, write_weights
from recipes.graphs import Graph, network_graph
from recipes.recipe import Recipe

__all__ = ["Exported", "export"]

_ENDINGS = {
    "safetensors": ".safetensors",
    "state-dict": ".pt",
    "onnx": ".onnx",
}
_WEIGHTS = ("safetensors", "state-dict")
_BATCHES = (2, 1, 5)
_TOLERANCE = 1e-4


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
        write_weights(recipe.network, part, kind, metadata)
        network, example = check_weights(recipe, part), recipe.example_input_array
        if not isinstance(example, Tensor):
            return Exported(path, {}, "every tensor equal to the checkpoint's")
        expected, found = (
            network_graph(each, example, None, recipe.named_outputs) for each in (recipe.network, network)
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
        texts = {"metadata.json": json.dumps(metadata, indent=1, ensure_ascii=False), **recipe.export_files()}
    errors: list[float] = []
    with ExitStack() as stack:
        if len(graphs) > 1:
            stack.callback(_remove_empty, path)
        for graph, file in zip(graphs, files, strict=True):
            part = stack.enter_context(_part_of(file))
            errors += _errors(graph, write_graph(graph, part, metadata))
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
    graphs = [] if kind in _WEIGHTS else recipe.graphs()
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
    metadata = json.loads(json.dumps(recipe.export_metadata() | {"config": checkpoint.get("config")}, default=str))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if kind in _WEIGHTS:
                return _export_weights(recipe, path, kind, metadata)
            return _export_graphs(recipe, path, graphs, metadata)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}; pass another --output") from error
