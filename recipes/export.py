"""Export of a checkpoint's network: each file is compared with the network before it gets its name."""

import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.checkpointing.writing import atomic_write
from datamodules.contract import Transient, marked_parameters
from datamodules.errors import UserError, first_line, spelled
from datamodules.images.augmentation import Normalize
from datamodules.images.decoding import evaluation_square
from recipes import photograph_graph
from recipes.base import Recipe
from recipes.inputs import preprocessing
from recipes.version import __version__, install_command
from recipes.weights import read_weights

_ENDINGS = {"safetensors": ".safetensors", "state-dict": ".pt", "onnx": ".onnx", "pt2": ".pt2"}
_GRAPHS = ("onnx", "pt2")
_BATCHES = (2, 1, 5)
_TOLERANCE = 1e-4
_PHOTOGRAPHS = ((37, 51), (300, 200), (97, 640))
# onnxruntime rounds a few pixels in some millions to the other neighbor.
_PHOTOGRAPH_TOLERANCE = 1e-2


class _Graph(nn.Module):
    """Network with its preprocessing and named outputs, as other programs run it.

    The input is ``images``, of uint8, if the preprocessing is known, else ``inputs``.
    """

    def __init__(self, recipe: Recipe, network: nn.Module, example: Tensor, prepares: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network
        self.preprocessing = prepares
        self.outputs = recipe.named_outputs
        self.dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
        self.sizes = tuple(example.shape[1:])
        self.generator = torch.Generator().manual_seed(1)
        layout = f"of shape ({', '.join(map(str, ('batch', *self.sizes)))})"
        if prepares is None:
            self.input = "inputs"
            self.text = f"{str(self.dtype).removeprefix('torch.')} {layout}, as the network takes it"
        else:
            self.input = "images"
            self.text = f"uint8 {layout}: channels first, pixels from 0 to 255"
        self.eval()

    @override
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if self.preprocessing is not None:
            images = self.preprocessing(images)
        return self.outputs(self.network(images.to(self.dtype)))

    def example(self, batch: int) -> Tensor:
        """Return random inputs."""
        if self.preprocessing is not None:
            return torch.randint(256, (batch, *self.sizes), dtype=torch.uint8, generator=self.generator)
        return torch.randn((batch, *self.sizes), generator=self.generator).to(self.dtype)


def _metadata(recipe: Recipe) -> dict[str, Any]:
    """Return the metadata that users of an exported file need.

    ``hyper_parameters`` are the arguments of the constructor. The preprocessing of images has timm's names: ``mean``
    and ``std`` for pixels from 0 to 1, and ``input_size`` as (channels, height, width).
    """
    excluded = marked_parameters(type(recipe), Transient)
    arguments = {name: value for name, value in recipe.hparams.items() if name not in excluded}
    metadata: dict[str, Any] = {"recipe": recipe.title, "version": __version__, "hyper_parameters": arguments}
    preprocess = preprocessing(recipe)
    example = recipe.example_input_array
    if isinstance(preprocess, Normalize) and isinstance(example, Tensor):
        metadata |= {"mean": preprocess.mean, "std": preprocess.std, "input_size": tuple(example.shape[1:])}
        metadata["layout"] = "NCHW"
    return metadata | recipe.export_metadata()


@dataclass(frozen=True)
class Exported:
    """The path of an exported file, its inputs, and the result of the comparison with the network."""

    path: Path
    inputs: dict[str, str]
    check: str


def _load(recipe: Recipe, checkpoint_path: str) -> dict[str, Any]:
    """Load a checkpoint into a recipe on the CPU, in the dtype of the checkpoint.

    Raises:
        UserError: a weight is NaN.
    """
    checkpoint: dict[str, Any] = load_plain(checkpoint_path)
    weights = checkpoint["state_dict"]
    for name, value in weights.items():
        if torch.isnan(value).any():
            raise UserError(f"{name} in {checkpoint_path} is NaN: the training diverged; pass an earlier checkpoint")
    # After bf16-true and 64-true, the weights are not float32.
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        recipe.network.to(dtypes.pop())
    recipe.on_load_checkpoint(checkpoint)
    recipe.load_state_dict(weights)
    recipe.eval()
    return checkpoint


def _check_outputs(kind: str, graph: _Graph, run_file: Callable[[Tensor], dict[str, Tensor]], tolerance: float) -> str:
    """Return the difference of a file's outputs relative to the largest value, in words, for several batch sizes.

    Raises:
        UserError: they differ by more than the tolerance.
    """
    errors = []
    for batch in _BATCHES:
        inputs = graph.example(batch)
        expected = graph(inputs)
        outputs = run_file(inputs)
        for name, value in expected.items():
            error = (value.double() - outputs[name].double()).abs()
            errors.append((error.max() / value.double().abs().max().clamp(min=1e-6)).item())
    worst = torch.tensor(errors).max().item()  # torch's maximum is NaN if an error is NaN; Python's may not be.
    if not worst <= tolerance:  # Also true for NaN.
        raise UserError(
            f"the outputs of the {kind} file differ from the network's by {worst:.1e}, relative to their size"
        )
    summary = f"outputs differ by at most {worst:.1e}, relative to their size" if worst else "equal outputs"
    return f"{summary}, for batches of {', '.join(map(str, _BATCHES))}"


def _as_text(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata for formats that store texts: strings are unchanged, other values become JSON."""
    texts = {}
    for name, value in metadata.items():
        texts[name] = value if isinstance(value, str) else json.dumps(value)
    return texts


def _write_weights(recipe: Recipe, path: Path, kind: str, metadata: Mapping[str, Any]) -> str:
    """Write the state dict of the network with its metadata; return the result of its check.

    Raises:
        UserError: a tensor in the file is not equal to the network's to the bit.
    """
    # safetensors rejects tensors that share memory, as tied weights do, so each name gets its own copy.
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in recipe.network.state_dict().items()}
    if kind == "safetensors":
        from safetensors.torch import save

        path.write_bytes(save(weights, _as_text(metadata)))  # `save_file` creates files with mode 0600.
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
    graph = _Graph(recipe, recipe.network, example)
    loaded = _Graph(recipe, network, example)
    return _check_outputs(kind, graph, loaded, tolerance=0.0)


def _check_photographs(graph: _Graph, run_file: Callable[[Tensor], dict[str, Tensor]]) -> str:
    """Compare a file that crops and resizes with the network; return the sizes of the compared images, in words.

    Raises:
        UserError: the outputs differ.
    """
    for height, width in _PHOTOGRAPHS:
        coarse = torch.rand(1, 3, 5, 7, generator=graph.generator)
        image = (255 * F.interpolate(coarse, (height, width), mode="bicubic")[0].clamp(0, 1)).to(torch.uint8)
        outputs = run_file(image.permute(1, 2, 0).unsqueeze(0).contiguous())
        for name, value in graph(evaluation_square(image, graph.sizes[-1]).unsqueeze(0)).items():
            if not torch.allclose(value, outputs[name], rtol=_PHOTOGRAPH_TOLERANCE, atol=_PHOTOGRAPH_TOLERANCE):
                raise UserError(f"the {name} of the onnx file differ for an image of {height} x {width} pixels")
    return f"and for images of {', '.join(f'{height} x {width}' for height, width in _PHOTOGRAPHS)} pixels"


def _write_onnx(graph: _Graph, path: Path, metadata: Mapping[str, Any], kept: float | None) -> str:
    """Write an ONNX graph for any batch size, or for an image of any size; return the result of its check.

    Args:
        graph: the network.
        path: the file.
        metadata: metadata of the file.
        kept: share of the short side that the graph keeps of an image of any size; None: the graph takes batches of
            images of the network's size.
    """
    import onnx
    import onnxruntime

    example = graph.example(2)
    outputs = list(graph(example))
    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim("batch")},), "verbose": False}
    try:
        program = torch.onnx.export(graph, (example,), input_names=[graph.input], output_names=outputs, **options)
        assert program is not None
        model = program.model
        for node in model.graph.all_nodes():
            node.metadata_props.clear()  # The exporter's properties name folders of this machine.
        model.graph.inputs[0].doc_string = graph.text
        model.producer_name = "lightning-recipes"
        model.producer_version = __version__
        model.metadata_props.update(_as_text(metadata))
        program.save(str(path), external_data=False)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        of_photograph = None
        if kept is not None:
            photograph_model = onnx.load(path)
            photograph_graph.add_photograph_input(photograph_model, graph.sizes[-1], kept)
            onnx.checker.check_model(photograph_model, full_check=True)
            onnx.save(photograph_model, path)
            of_photograph = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except OSError:
        raise
    except Exception as error:  # The exporter and onnxruntime may raise any exception for a network.
        raise UserError(
            f"the network cannot be written as onnx ({first_line(error)}); pass {spelled('format', 'safetensors')}"
        ) from error

    def run(inputs: Tensor) -> dict[str, Tensor]:
        arrays = session.run(outputs, {graph.input: inputs.numpy()})
        return dict(zip(outputs, map(torch.from_numpy, arrays), strict=True))

    def run_on_photograph(image: Tensor) -> dict[str, Tensor]:
        assert of_photograph is not None
        arrays = of_photograph.run(outputs, {photograph_graph.INPUT: image.numpy()})
        return dict(zip(outputs, map(torch.from_numpy, arrays), strict=True))

    checked = _check_outputs("onnx", graph, run, _TOLERANCE)
    return checked if kept is None else f"{checked}, {_check_photographs(graph, run_on_photograph)}"


def _write_pt2(graph: _Graph, path: Path, metadata: Mapping[str, Any]) -> str:
    """Write a graph for any batch size in the format of `torch.export.load`; return the result of its check."""
    try:
        shapes = ({0: torch.export.Dim("batch")},)
        program = torch.export.export(graph, (graph.example(2),), dynamic_shapes=shapes)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # Stack traces name folders of this machine.
        with path.open("wb") as file:
            torch.export.save(program, file, extra_files={"metadata.json": json.dumps(metadata)})
        with path.open("rb") as file:  # torch warns of a path that does not end in .pt2, such as this temporary one.
            loaded = torch.export.load(file).module()
    except OSError:
        raise
    except Exception as error:  # The exporter may raise any exception for a network.
        raise UserError(
            f"the network cannot be written as pt2 ({first_line(error)}); pass {spelled('format', 'safetensors')}"
        ) from error
    return _check_outputs("pt2", graph, loaded, _TOLERANCE)


def _kept_of_photograph(recipe: Recipe, graph: str | None) -> float | None:
    """Return the share of the short side that a graph of one image keeps; None for a graph of batches.

    Raises:
        UserError: the recipe has no graph of one image.
    """
    kept = recipe.photograph_crop() if isinstance(preprocessing(recipe), Normalize) else None
    if graph == "image" and kept is None:
        raise UserError(
            f"{recipe.title} does not know how the images of this checkpoint were cropped and normalized",
            setting="graph",
            value=graph,
            to_type=f"pass {spelled('graph', 'batch')}",
        )
    return None if graph == "batch" else kept


@torch.no_grad()
def export(
    recipe: Recipe,
    checkpoint_path: str,
    kind: str,
    output: str | None = None,
    graph: Literal["image", "batch"] | None = None,
) -> Exported:
    """Write the network of a checkpoint, and compare the outputs of the file and of the network.

    Args:
        recipe: the recipe, built with the checkpoint's settings.
        checkpoint_path: the checkpoint.
        kind: safetensors or state-dict for the weights alone, under the names of `recipe.network`; onnx or pt2 with the
            computation. Its graph takes uint8 images if the checkpoint has their normalization.
        output: the file to write; by default beside the checkpoint.
        graph: input of an onnx file: "image" for one RGB image of any size, which the graph crops and resizes, or
            "batch" for any number of images of the network's size. None: "image" if the recipe has
            `Recipe.photograph_crop`.

    Raises:
        UserError: weights are NaN, the recipe or this installation cannot write the format or the graph, or the
            outputs of the file differ from the network's.
    """
    packages = ("onnx", "onnxscript", "onnxruntime")
    missing_packages = [name for name in packages if importlib.util.find_spec(name) is None]
    if kind == "onnx" and missing_packages:
        raise UserError(f"onnx needs {', '.join(missing_packages)}; run {install_command('onnx')}")
    example = recipe.example_input_array
    if kind in _GRAPHS and not isinstance(example, Tensor):
        raise UserError(
            f"{recipe.title} cannot be written as {kind}: it has no example_input_array with the shape of the network's"
            f" input; pass {spelled('format', 'safetensors')}"
        )
    path = Path(output) if output else Path(checkpoint_path).with_suffix(_ENDINGS[kind])
    if (path.suffix == ".safetensors") != (kind == "safetensors"):
        raise UserError(f"a {kind} file ends in {_ENDINGS[kind]}", setting="output", value=str(path))
    if path.is_dir():
        raise UserError(f"{spelled('output', str(path))} is a folder; name a file in it")
    checkpoint = _load(recipe, checkpoint_path)
    kept = _kept_of_photograph(recipe, graph) if kind == "onnx" else None
    metadata = json.loads(json.dumps(_metadata(recipe) | {"config": checkpoint.get("config")}, default=str))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with atomic_write(path) as temporary:
                temporary.touch()  # Raises an OSError if the folder is not writable; exporters raise other errors.
                if not isinstance(example, Tensor) or kind not in _GRAPHS:
                    return Exported(path, {}, _write_weights(recipe, temporary, kind, metadata))
                # In float32 for every precision of training: onnxruntime has float32 convolutions only on CPUs.
                network = _Graph(recipe, recipe.network.float(), example, preprocessing(recipe))
                metadata["inputs"] = {network.input: network.text}
                if kept is not None:
                    metadata["inputs"] = {photograph_graph.INPUT: photograph_graph.DESCRIPTION}
                    metadata["layout"] = "NHWC"
                if kind == "pt2":
                    return Exported(path, metadata["inputs"], _write_pt2(network, temporary, metadata))
                return Exported(path, metadata["inputs"], _write_onnx(network, temporary, metadata, kept))
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{path} cannot be written: {reason}; pass another {spelled('output')}") from error
