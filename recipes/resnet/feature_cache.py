"""While only the head trains, its inputs for an image never change: they are computed once.

Frozen layers take no backward pass already; this saves their forward pass, and reading the images, in every epoch.
"""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from callbacks.freezing import FreezeLayers
from callbacks.lib.durations import Duration
from callbacks.lib.hooks import callbacks_of
from callbacks.lib.layers import evaluating
from datamodules.contract import data_contract
from datamodules.errors import UserError
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.notes import inform, warn
from recipes.resnet.layers import layers_of, random_images


def _may_differ(layer: nn.Module) -> bool:
    """Whether a layer computes otherwise now than in evaluation, as far as is known: BatchNorm, dropout, and others."""
    plain = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, _DropoutNd)
    return layer.training and (not plain or next(layer.parameters(), None) is not None)


def first_changing_layer(network: nn.Module, head: str) -> str:
    """The name of a layer outside of the head that trains, or acts otherwise in training; empty where there is none."""
    inside = set(network.get_submodule(head).modules())
    for name, layer in network.named_modules():
        around = not name or head.startswith(f"{name}.")
        trains = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        if layer not in inside and (trains or (not around and _may_differ(layer))):
            return name or "the network"
    return ""


class _Reached(Exception):
    """Ends a forward pass before the head; it has the head's inputs."""


def inputs_of(network: nn.Module, head: str, images: Tensor) -> Tensor:
    """What a network passes on to its head; the head does not run.

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
    """Why the logits are not the head's output for inputs that stay the same; empty where they are."""
    device = images.device
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            features = inputs_of(network, head, images)
            with evaluating(network):
                same = torch.equal(features, inputs_of(network, head, images))
                ends = torch.equal(network(images), network.get_submodule(head)(features))
        except ValueError as error:
            return str(error)
    return "" if same and ends else f"{head} does not end the forward pass" if same else "training takes another way"


def head_to_train(network: nn.Module, images: Tensor) -> tuple[str, str]:
    """The name of the part at the end of a network that trains while all before it stays; or why there is none."""
    name, reasons = layers_of(network)[-1][0], []
    while name:
        moving = first_changing_layer(network, name)
        reason = f"{moving} trains before {name}" if moving else _cannot_continue(network, name, images)
        if not reason:
            return name, ""
        reasons.append(reason)
        name = name.rpartition(".")[0]  # Such as a classifier of several layers.
    return "", reasons[0]


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all ranks, which may have different numbers of them: (n, ...) of each rank to (sum of n, ...)."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    longest = int(max(counts))
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts)])


def _images_of(trainer: pl.Trainer) -> ImageFolderDataModule:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, ImageFolderDataModule):
        raise UserError("`cache_features` needs an ImageFolderDataModule, whose images are numbered")
    return data


class FeatureCache(pl.Callback):
    """Trains and validates on the inputs of the head, which are computed once, while everything before it is frozen.

    The module has ``network`` and ``cached_head``, as `ResNetFineTuner`; the data is an `ImageFolderDataModule`. Every
    epoch has to see the same images, so augmentation is refused. Features have the precision of the run; the ranks
    share the work. Results are those without the cache up to rounding. Where layers before the head train, and where
    the features do not fit the data's ``cache_gb``, images are read as ever.

    Runs on: `on_train_start` (a resumed run begins there, in the middle of an epoch) and `on_train_epoch_start`, behind
    `FreezeLayers`, and `on_validation_start`; `on_train_end` and `on_exception` undo it.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Linear(2, 2).requires_grad_(False).eval(), nn.ReLU(), nn.Linear(2, 2))
        >>> first_changing_layer(network, "2"), first_changing_layer(network.requires_grad_(True), "2")
        ('', '0')
    """

    def __init__(self) -> None:
        # The trainable parameters at the last decision, also where nothing was cached.
        self._settled: list[bool] | None = None
        self._computed: dict[str, tuple[Tensor, Tensor]] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if _images_of(trainer).augments:
            raise UserError(
                "cached features need the same images in every epoch, and these are augmented; "
                'pass augment="none", or leave `cache_features` out'
            )
        for callback in callbacks_of(trainer):
            if isinstance(callback, FreezeLayers):
                for name, when in (callback.unfreeze or {}).items():
                    start = Duration.parse(when)
                    if start.unit != "epochs" or start.value != int(start.value):
                        raise UserError(
                            f"cached features change between epochs only, and {name} is unfrozen at {when!r}; "
                            f'write it in whole epochs, as in "2 epochs", or leave `cache_features` out'
                        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trains = [parameter.requires_grad for parameter in pl_module.network.parameters()]
        if trains != self._settled:
            self.on_train_end(trainer, pl_module)
            self._settled = trains
            self._decide(trainer, pl_module)
        self._serve(trainer, pl_module, "train", trainer.train_dataloader)

    on_train_epoch_start = on_train_start

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not earlier: Lightning may create this loader only now, or again.
        self._serve(trainer, pl_module, "val", trainer.val_dataloaders)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for loader in (trainer.train_dataloader, trainer.val_dataloaders):
            if loader:
                loader.use_features(None, None)
        self._computed = {}
        pl_module.cached_head, self._settled = "", None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _decide(self, trainer: pl.Trainer, pl_module: Any) -> None:
        data, images = _images_of(trainer), random_images(pl_module.network, pl_module.example_input_array)
        head, reason = head_to_train(pl_module.network, images)
        if not head:
            warn("features are not cached, because %s; images are read in each epoch", reason)
            return
        example = self._features(trainer, pl_module, head, images)
        size, limit = example.nbytes * sum(data_contract(data).sizes.values()), data.hparams["cache_gb"]
        shape = " x ".join(map(str, example.shape[1:]))
        what = f"inputs of {head}: {shape} numbers per image, {size / 2**20:,.1f} MiB"
        if size > limit * 2**30:
            inform("%s are more than cache_gb=%s, so the images are read in each epoch", what, limit)
            return
        pl_module.cached_head = head
        inform("training on cached %s", what)

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
        features, numbers = [], []
        for images, _, rows in _images_of(trainer).numbered_batches(part, trainer.global_rank, trainer.world_size):
            features.append(self._features(trainer, pl_module, head, images))
            numbers.append(rows)
        return gather_rows(torch.cat(features)), gather_rows(torch.cat(numbers))
