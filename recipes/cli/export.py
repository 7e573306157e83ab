"""Export of a checkpoint's network to a file for other programs; the file is verified before it gets its name."""

import importlib.util
import json
import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from callbacks.checkpointing.plain_loading import load_plain
from datamodules.errors import UserError
from recipes.recipe import Recipe

__all__ = ["Exported", "export"]

_ENDINGS = {
    "safetensors": ".safetensors",
    "state-dict": ".pt",
    "torchscript": ".torchscript.pt",
    "onnx": ".onnx",
    "pt2": ".pt2",
}
_ONNX_LIMIT = 2_000_000_000  # Bytes: what protobuf can hold, less the graph.
_BATCHES = (2, 1, 5)


@dataclass(frozen=True)
class Exported:
    """A file that was written, and the result of comparing it with the network."""

    path: Path
    check: str


def _load(recipe: Recipe, checkpoint_path: str) -> dict[str, Any]:
    """Load a checkpoint into a recipe on the CPU, in the dtype of the checkpoint."""
    checkpoint: dict[str, Any] = load_plain(checkpoint_path)
    weights = checkpoint["state_dict"]
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        recipe.network.to(kinds.pop())
    recipe.on_load_checkpoint(checkpoint)
    recipe.load_state_dict(weights)
    recipe.eval()
    return checkpoint


def _examples(recipe: Recipe) -> list[Tensor]:
    """Random inputs of several batch sizes, of the shape of the recipe's example."""
    example = recipe.example_input_array
    if not isinstance(example, Tensor):
        return []
    generator = torch.Generator().manual_seed(1)
    dtype = next((p.dtype for p in recipe.network.parameters() if p.is_floating_point()), torch.float32)
    return [torch.randn((n, *example.shape[1:]), generator=generator).to(dtype) for n in _BATCHES]


def _metadata(checkpoint: dict[str, Any]) -> dict[str, str]:
    """Settings and class names, as text, for users of the weights."""
    known = {key: checkpoint[key] for key in ("config", "class_names") if key in checkpoint}
    return {key: json.dumps(value, default=str) for key, value in known.items()}


def _weights(network: nn.Module) -> dict[str, Tensor]:
    # Tied weights are one tensor under two names; safetensors needs a tensor for each.
    return {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}


def _write_weights(network: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(_weights(network), path, metadata)
    else:
        torch.save(_weights(network), path)


def _read_weights(recipe: Recipe, path: Path) -> Callable[[Tensor], Tensor]:
    """A new network with the weights of a file, which must equal those of the recipe bit by bit."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        weights = load_file(path)
    else:
        weights = torch.load(path, weights_only=True)
    network = recipe.build_network()
    network.to(next(p.dtype for p in recipe.network.parameters()))
    network.load_state_dict(weights)
    for name, tensor in recipe.network.state_dict().items():
        if not torch.equal(network.state_dict()[name], tensor):
            raise UserError(f"{path} does not hold {name} as the checkpoint does; the disk may be damaged")
    network.to(memory_format=torch.channels_last if recipe.hparams.channels_last else torch.preserve_format)
    return network.eval()


def _write_graph(network: nn.Module, example: Tensor, path: Path, kind: str) -> Callable[[Tensor], Tensor]:
    """Write a network with its computation, for any batch size. Returns a function that runs the file."""
    if kind == "torchscript":
        torch.jit.save(torch.jit.trace(network, example), str(path))
        loaded: Callable[[Tensor], Tensor] = torch.jit.load(str(path))
        return loaded
    dynamic = ({0: torch.export.Dim("batch")},)
    if kind == "pt2":
        torch.export.save(torch.export.export(network, (example,), dynamic_shapes=dynamic), str(path))
        return torch.export.load(str(path)).module()
    size = sum(tensor.nbytes for tensor in network.state_dict().values())
    if size > _ONNX_LIMIT:
        # The weights would be written to a second file, which a rename does not move.
        raise UserError(f"an onnx file holds 2 GB at most, and the weights are {size / 1e9:.1f} GB; pass --format pt2")
    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": dynamic, "external_data": False, "verbose": False}
    torch.onnx.export(network, (example,), str(path), **options)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda inputs: torch.from_numpy(session.run(None, {name: inputs.numpy()})[0])


def _largest_error(recipe: Recipe, other: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> float:
    errors: list[float] = []
    for batch in inputs:
        expected, found = recipe.network(batch), other(batch)
        errors.append((expected - found).abs().max().item() / max(1e-6, expected.abs().max().item()))
    return max(errors)


def _check_possible(recipe: Recipe, kind: str) -> None:
    """Refuse a format that the recipe or this installation cannot write."""
    if kind in ("safetensors", "state-dict"):
        return
    if not isinstance(recipe.example_input_array, Tensor):
        reason = recipe.no_graph or "it has no example_input_array with the shape of the network's input"
        raise UserError(f"{recipe.title} cannot be written as {kind}: {reason}; pass --format safetensors")
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if kind == "onnx" and missing:
        raise UserError(f"onnx needs {', '.join(missing)}; run pip install 'lightning-recipes[onnx]'")


@torch.no_grad()
def export(recipe: Recipe, checkpoint_path: str, kind: str, output: str | None = None) -> Exported:
    """Write the network of a checkpoint, and compare the outputs of the file with those of the network.

    Args:
        recipe: built with the checkpoint's settings.
        kind: safetensors or state-dict for the weights alone, under the names of `recipe.network`; torchscript, onnx or
            pt2 (`torch.export`) with the computation, for any batch size.
        output: the file; by default beside the checkpoint.

    Raises:
        UserError: the recipe or this installation cannot write the format, or the file has other outputs.
    """
    _check_possible(recipe, kind)
    path = Path(output) if output else Path(checkpoint_path).with_suffix(_ENDINGS[kind])
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}")
    if kind in ("safetensors", "state-dict") and (path.suffix == ".safetensors") != (kind == "safetensors"):
        raise UserError(f"--output {path}: a {kind} file ends in {_ENDINGS[kind]}")
    checkpoint = _load(recipe, checkpoint_path)
    inputs = _examples(recipe)
    # A name that nobody knows before: somebody else's folder may hold links.
    part = path.with_name(f".{secrets.token_hex(4)}.part.{path.name}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind in ("safetensors", "state-dict"):
                _write_weights(recipe.network, part, _metadata(checkpoint))
                other, tolerance = _read_weights(recipe, part), 0.0
            else:
                other, tolerance = _write_graph(recipe.network, inputs[0], part, kind), 1e-4
        error = _largest_error(recipe, other, inputs) if inputs else 0.0
        if not error <= tolerance:
            raise UserError(
                f"the outputs of the {kind} file differ from the network's by {error:.1e}, relative to their size"
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    if not inputs:
        return Exported(path, "every tensor equal to the checkpoint's")
    sizes = ", ".join(map(str, _BATCHES))
    return Exported(path, f"outputs differ by at most {error:.1e}, relative to their size, for batches of {sizes}")
