"""Export of a checkpoint's network; each file is compared with the network before it gets its name."""

import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.lib.writing import atomic_write
from datamodules.contract import OneCall, marked_parameters
from datamodules.errors import UserError, first_line
from datamodules.images.normalise import Normalise
from recipes.base import Recipe
from recipes.inputs import preprocessing
from recipes.version import __version__, install_command
from recipes.weights import read_weights

_ENDINGS = {"safetensors": ".safetensors", "state-dict": ".pt", "onnx": ".onnx"}
_BATCHES = (2, 1, 5)
_TOLERANCE = 1e-4


class _Graph(nn.Module):
    """A network behind its preprocessing, with named outputs, as other programs run it.

    Its input is called ``images`` and takes uint8 where the preprocessing is known; it is ``inputs`` where it is not.
    """

    def __init__(self, recipe: Recipe, network: nn.Module, example: Tensor, prepares: nn.Module | None = None) -> None:
        super().__init__()
        self.network, self.preprocessing, self.outputs = network, prepares, recipe.named_outputs
        self.dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
        self.sizes = tuple(example.shape[1:])
        self.generator = torch.Generator().manual_seed(1)
        layout = f"of shape ({', '.join(map(str, ('batch', *self.sizes)))})"
        if prepares is None:
            self.input, kind = "inputs", str(self.dtype).removeprefix("torch.")
            self.text = f"{kind} {layout}, as the network takes it"
        else:
            self.input, self.text = "images", f"uint8 {layout}: channels first, pixels from 0 to 255"
        self.eval()

    @override
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if self.preprocessing is not None:
            images = self.preprocessing(images)
        return self.outputs(self.network(images.to(self.dtype)))

    def example(self, batch: int) -> Tensor:
        """Random inputs."""
        if self.preprocessing is not None:
            return torch.randint(256, (batch, *self.sizes), dtype=torch.uint8, generator=self.generator)
        return torch.randn((batch, *self.sizes), generator=self.generator).to(self.dtype)


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
    return metadata | recipe.export_metadata()


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


def _check_outputs(kind: str, graph: _Graph, other: Callable[[Tensor], dict[str, Tensor]], tolerance: float) -> str:
    """How far the outputs of a file are off, relative to the largest value of each output, for several batch sizes.

    Raises:
        UserError: further than the tolerance.
    """
    errors = []
    for batch in _BATCHES:
        inputs = graph.example(batch)
        expected, found = graph(inputs), other(inputs)
        for name, value in expected.items():
            error = (value.double() - found[name].double()).abs()
            errors.append((error.max() / value.double().abs().max().clamp(min=1e-6)).item())
    worst = torch.tensor(errors).max().item()  # Unlike Python's, NaN where one is NaN.
    if not worst <= tolerance:
        raise UserError(
            f"the outputs of the {kind} file differ from the network's by {worst:.1e}, relative to their size"
        )
    found_text = f"outputs differ by at most {worst:.1e}, relative to their size" if worst else "equal outputs"
    return f"{found_text}, for batches of {', '.join(map(str, _BATCHES))}"


def _as_text(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata for formats that hold texts: strings as they are, all else as JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}


def _write_weights(recipe: Recipe, path: Path, kind: str, metadata: Mapping[str, Any]) -> str:
    """Write the state dict of the network, under its names, with the metadata beside it; returns what was checked.

    Raises:
        UserError: a new network with these weights is not the same to the bit.
    """
    # Tied weights are one tensor under two names; safetensors needs a tensor for each.
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in recipe.network.state_dict().items()}
    if kind == "safetensors":
        from safetensors.torch import save

        path.write_bytes(save(weights, _as_text(metadata)))  # `save_file` lets nobody else read its file.
    else:
        torch.save({"state_dict": weights, **metadata}, path)
    network = recipe.build_network()
    network.to(next(p.dtype for p in recipe.network.parameters()))
    network.load_state_dict(read_weights(path))
    for name, tensor in recipe.network.state_dict().items():
        if not torch.equal(network.state_dict()[name], tensor):
            raise UserError(f"{path} does not hold {name} as the checkpoint does; the disk may be damaged")
    network.to(memory_format=torch.channels_last if recipe.hparams.channels_last else torch.preserve_format)
    example = recipe.example_input_array
    if not isinstance(example, Tensor):
        return "every tensor equal to the checkpoint's"
    graph, other = (_Graph(recipe, each, example) for each in (recipe.network, network))
    return _check_outputs(kind, graph, other, tolerance=0.0)


def _write_onnx(graph: _Graph, path: Path, metadata: Mapping[str, Any]) -> str:
    """Write a graph for any batch size; returns what was checked."""
    import onnxruntime

    example = graph.example(2)
    outputs = list(graph(example))
    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim("batch")},), "verbose": False}
    try:
        program = torch.onnx.export(graph, (example,), input_names=[graph.input], output_names=outputs, **options)
        assert program is not None
        model = program.model
        for node in model.graph.all_nodes():
            node.metadata_props.clear()  # It names the folders of this machine.
        model.graph.inputs[0].doc_string = graph.text
        model.producer_name, model.producer_version = "lightning-recipes", __version__
        model.metadata_props.update(_as_text(metadata))
        program.save(str(path), external_data=False)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except OSError:
        raise
    except Exception as error:  # What the exporter and onnxruntime make of a network may be anything.
        raise UserError(
            f"the network cannot be written as onnx ({first_line(error)}); pass format='safetensors'"
        ) from error

    def run(inputs: Tensor) -> dict[str, Tensor]:
        found = session.run(outputs, {graph.input: inputs.numpy()})
        return dict(zip(outputs, map(torch.from_numpy, found), strict=True))

    return _check_outputs("onnx", graph, run, _TOLERANCE)


@torch.no_grad()
def export(recipe: Recipe, checkpoint_path: str, kind: str, output: str | None = None) -> Exported:
    """Write the network of a checkpoint, and compare the outputs of the file with those of the network.

    Args:
        recipe: built with the checkpoint's settings.
        kind: safetensors or state-dict for the weights alone, under the names of `recipe.network`; onnx with the
            computation, for any batch size. Its graph takes uint8 images, where the checkpoint knows how they are
            normalised.
        output: the file; by default beside the checkpoint.

    Raises:
        UserError: weights are NaN, the recipe or this installation cannot write the format, or the file has other
            outputs.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if kind == "onnx" and missing:
        raise UserError(f"onnx needs {', '.join(missing)}; run {install_command('onnx')}")
    example = recipe.example_input_array
    if kind == "onnx" and not isinstance(example, Tensor):
        raise UserError(
            f"{recipe.title} cannot be written as onnx: it has no example_input_array with the shape of the network's"
            " input; pass format='safetensors'"
        )
    path = Path(output) if output else Path(checkpoint_path).with_suffix(_ENDINGS[kind])
    if (path.suffix == ".safetensors") != (kind == "safetensors"):
        raise UserError(f"output={str(path)!r}: a {kind} file ends in {_ENDINGS[kind]}")
    if path.is_dir():
        raise UserError(f"output={str(path)!r} is a folder; name a file in it")
    checkpoint = _load(recipe, checkpoint_path)
    metadata = json.loads(json.dumps(_metadata(recipe) | {"config": checkpoint.get("config")}, default=str))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with atomic_write(path) as part:
                part.touch()  # Where that fails, exporters would raise errors of their own.
                if not isinstance(example, Tensor) or kind != "onnx":
                    return Exported(path, {}, _write_weights(recipe, part, kind, metadata))
                # In float32 whatever the training's precision: onnxruntime has no other convolution for CPUs.
                graph = _Graph(recipe, recipe.network.float(), example, preprocessing(recipe))
                metadata["inputs"] = {graph.input: graph.text}
                return Exported(path, metadata["inputs"], _write_onnx(graph, part, metadata))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}; pass another `output`") from error
