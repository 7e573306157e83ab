"""Cache of the head's inputs, which are constant for an image while only the head trains.

Frozen layers need no backward pass. The cache also saves, in every epoch, their forward pass and reading the images.

Tested in `tests/recipes/resnet/test_recipe.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from callbacks.freezing import FreezeLayers, evaluating
from callbacks.lib.lightning_internals import callbacks_of
from callbacks.lib.updates import Duration
from datamodules.contract import data_contract
from datamodules.errors import UserError, spelled
from datamodules.lightning import pl
from datamodules.notes import inform, warn

from .layers import layers_of, random_images


def _may_differ(layer: nn.Module) -> bool:
    """Return whether the outputs of a layer may differ from evaluation, as with BatchNorm and dropout in training."""
    # A layer of torch without parameters and dropout has no training mode; other layers may have one.
    is_plain = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, _DropoutNd)
    return layer.training and (not is_plain or next(layer.parameters(), None) is not None)


def first_changing_layer(network: nn.Module, head: str) -> str:
    """Return the name of the first layer before the head that trains or behaves differently in training, or ""."""
    head_modules = set(network.get_submodule(head).modules())
    for name, layer in network.named_modules():
        contains_head = not name or head.startswith(f"{name}.")
        trains = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        if layer not in head_modules and (trains or (not contains_head and _may_differ(layer))):
            return name or "the network"
    return ""


class _Reached(Exception):
    """Exception that ends a forward pass before the head; it carries the head's inputs."""


def inputs_of(network: nn.Module, head: str, images: Tensor) -> Tensor:
    """Return the inputs of the head; the head does not run.

    Raises:
        ValueError: the head does not run once on one tensor.

    Example:
        >>> inputs_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "1", torch.ones(1, 2, 2))
        tensor([[1., 1., 1., 1.]])
    """

    def stop(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        raise _Reached(*inputs)

    handle = network.get_submodule(head).register_forward_pre_hook(stop)
    try:
        network(images)
    except _Reached as reached:
        if len(reached.args) == 1 and isinstance(reached.args[0], Tensor):
            return reached.args[0]
    finally:
        handle.remove()
    raise ValueError(f"{head} does not take one tensor")


def _cannot_continue(network: nn.Module, head: str, images: Tensor) -> str:
    """Return why the logits do not follow from constant inputs of the head; "" if they do."""
    device = images.device
    # Forked, so that layers such as dropout do not advance the random state of the run.
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            features = inputs_of(network, head, images)
            with evaluating(network):
                is_constant = torch.equal(features, inputs_of(network, head, images))
                ends_forward = torch.equal(network(images), network.get_submodule(head)(features))
        except ValueError as error:
            return str(error)
    if not is_constant:
        return "the forward pass differs in training"
    return "" if ends_forward else f"{head} does not end the forward pass"


def head_to_train(network: nn.Module, images: Tensor) -> tuple[str, str]:
    """Return the trainable module at the end of an otherwise fixed network, or the reason for its absence."""
    name = layers_of(network)[-1][0]
    reasons = []
    while name:
        changing_layer = first_changing_layer(network, name)
        reason = f"{changing_layer} trains before {name}" if changing_layer else _cannot_continue(network, name, images)
        if not reason:
            return name, ""
        reasons.append(reason)
        name = name.rpartition(".")[0]  # The module around it, such as a classifier of several layers.
    return "", reasons[0]


def gather_rows(rows: Tensor) -> Tensor:
    """Gather the rows of all ranks: (n, ...) to (sum of n, ...); n may differ between ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    # Shorter tensors are padded, because `all_gather` needs equal shapes.
    longest = int(max(counts))
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([rows_of_rank[: int(count)] for rows_of_rank, count in zip(gathered, counts)])


def _batches(trainer: pl.Trainer, part: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Return an iterator of this rank's (images, labels, sample numbers) of a part, equal in every epoch.

    Raises:
        UserError: the data have no such batches.
    """
    data = data_contract(getattr(trainer, "datamodule", None))
    try:
        return data.numbered_batches(part, trainer.global_rank, trainer.world_size)
    except UserError as error:
        raise UserError(
            f"cached features need the same images in every epoch, and {error.problem}",
            to_type=f"{error.to_type}, or leave {spelled('cache_features')} out",
        ) from error


class FeatureCache(pl.Callback):
    """Callback that computes the head's inputs once, and trains and validates on them while all other layers are
    frozen.

    The module has ``network`` and ``cached_head``, as in `ResNetFineTuner`; the data module has ``numbered_batches``.
    Augmentation is rejected, because all epochs must have the same images. Features have the precision of the run, and
    the ranks share the work. The cache changes results only by rounding. Images are read in each epoch if layers before
    the head train, or if the features do not fit into the data's ``cache_gb``.

    Runs on: `on_train_start` (a resumed run may begin within an epoch) and `on_train_epoch_start`, after
    `FreezeLayers`, and `on_validation_start`; `on_train_end` and `on_exception` undo the changes.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Linear(2, 2).requires_grad_(False).eval(), nn.ReLU(), nn.Linear(2, 2))
        >>> first_changing_layer(network, "2"), first_changing_layer(network.requires_grad_(True), "2")
        ('', '0')
    """

    def __init__(self) -> None:
        # Whether each parameter was trainable at the last decision, with or without cached features.
        self._trainable: list[bool] | None = None
        self._computed: dict[str, tuple[Tensor, Tensor]] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        _batches(trainer, "train")  # Rejects augmentation before the training.
        for callback in callbacks_of(trainer):
            if isinstance(callback, FreezeLayers):
                for name, when in (callback.unfreeze or {}).items():
                    start = Duration.parse(when)
                    if start.unit != "epochs" or start.value != int(start.value):
                        raise UserError(
                            f"cached features change between epochs only, and {name} is unfrozen at {when!r}; write it"
                            f' in whole epochs, as in "2 epochs", or leave {spelled("cache_features")} out'
                        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trains = [parameter.requires_grad for parameter in pl_module.network.parameters()]
        # Layers were frozen or unfrozen since the last decision, so cached features may be wrong.
        if trains != self._trainable:
            self.on_train_end(trainer, pl_module)
            self._trainable = trains
            self._decide(trainer, pl_module)
        self._serve(trainer, pl_module, "train", trainer.train_dataloader)

    on_train_epoch_start = on_train_start

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in `on_train_start`: Lightning may create this loader only now, or recreate it.
        self._serve(trainer, pl_module, "val", trainer.val_dataloaders)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for loader in (trainer.train_dataloader, trainer.val_dataloaders):
            if loader:
                loader.use_features(None, None)
        self._computed = {}
        pl_module.cached_head = ""
        self._trainable = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _decide(self, trainer: pl.Trainer, pl_module: Any) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        images = random_images(pl_module.network, pl_module.example_input_array)
        head, reason = head_to_train(pl_module.network, images)
        if not head:
            warn("features are not cached, because %s; images are read in each epoch", reason)
            return
        example = self._features(trainer, pl_module, head, images)
        size = example.nbytes * sum(data_contract(data).sizes.values())
        limit = data.hparams["cache_gb"]
        shape = " x ".join(map(str, example.shape[1:]))
        description = f"inputs of {head}: {shape} numbers per image, {size / 2**20:,.1f} MiB"
        if size > limit * 2**30:
            inform("%s are more than cache_gb=%s, so the images are read in each epoch", description, limit)
            return
        pl_module.cached_head = head
        inform("training on cached %s", description)

    def _serve(self, trainer: pl.Trainer, pl_module: Any, part: str, loader: Any) -> None:
        """Make a loader yield features while the module expects them."""
        if pl_module.cached_head and loader:
            if part not in self._computed:
                self._computed[part] = self._compute(trainer, pl_module, part, pl_module.cached_head)
            loader.use_features(*self._computed[part])

    def _features(self, trainer: pl.Trainer, pl_module: Any, head: str, images: Tensor) -> Tensor:
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            return inputs_of(pl_module.network, head, trainer.precision_plugin.convert_input(images))

    def _compute(self, trainer: pl.Trainer, pl_module: Any, part: str, head: str) -> tuple[Tensor, Tensor]:
        features = []
        numbers = []
        for images, _, rows in _batches(trainer, part):
            features.append(self._features(trainer, pl_module, head, images))
            numbers.append(rows)
        return gather_rows(torch.cat(features)), gather_rows(torch.cat(numbers))
