"""The output of frozen layers for an image never changes: it is computed once, and the rest is trained on that.

Frozen layers take no backward pass already; this saves their forward pass, and reading the images, in every epoch.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from callbacks.freezing import FreezeLayers
from callbacks.lib.durations import Duration
from callbacks.lib.trainer_attributes import callbacks_of, datamodule_of
from datamodules.contract import data_contract
from datamodules.errors import UserError
from recipes.resnet.stages import Stage, run_stages

__all__ = ["FeatureCache", "FeatureLoader", "NumberedImages", "frozen_stages", "gather_rows"]

log = logging.getLogger("lightning_recipes")
_inform = rank_zero_only(log.info)


@runtime_checkable
class NumberedImages(Protocol):
    """A data module whose images are numbered, as `ImageFolderDataModule`."""

    hparams: Mapping[str, Any]
    """With ``cache_gb``, the memory that features may take."""

    @property
    def augments(self) -> bool:
        """Whether the images of an epoch differ from those of another."""

    def numbered_batches(self, part: str, rank: int, world_size: int) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """Images, labels and sample numbers of a rank's share of a part, without augmentation."""


@runtime_checkable
class FeatureLoader(Protocol):
    """A loader that can yield features in place of images."""

    def use_features(self, features: Tensor | None, numbers: Tensor | None) -> None:
        """Yield the rows of `features` for the samples with these numbers; with None images again."""


def _may_differ(layer: nn.Module) -> bool:
    """Whether a layer computes otherwise now than in evaluation, as far as is known: BatchNorm, dropout, and others."""
    plain = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, _DropoutNd)
    return layer.training and (not plain or next(layer.parameters(), None) is not None)


def frozen_stages(stages: Sequence[Stage]) -> int:
    """The number of leading stages whose output for an image stays the same until a layer is unfrozen."""
    for number, (_, modules) in enumerate(stages):
        trains = any(p.requires_grad for module in modules for p in module.parameters())
        if trains or any(_may_differ(layer) for module in modules for layer in module.modules()):
            return number
    return len(stages)


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


def _images_of(trainer: pl.Trainer) -> NumberedImages:
    data = datamodule_of(trainer)
    if not isinstance(data, NumberedImages):
        raise UserError("`cache_features` needs an ImageFolderDataModule, whose images are numbered")
    return data


class FeatureCache(pl.Callback):
    """Trains and validates on the features of the frozen stages, which are computed once per phase of the freezing.

    The module has ``stages()`` and ``first_stage``, as `ResNetFineTuner`; the data is `NumberedImages` with loaders
    that are `FeatureLoader`s. Every epoch has to see the same images, so augmentation is refused. Features have the
    precision of the run; the ranks share the work. Results are those without the cache up to rounding. Features that
    do not fit the data's ``cache_gb`` are not kept.

    Runs on: `on_train_start` (a resumed run begins there, in the middle of an epoch) and `on_train_epoch_start`, behind
    `FreezeLayers`, and `on_validation_start`; `on_train_end` and `on_exception` undo it.

    Example:
        >>> from torch import nn
        >>> stages = [("trunk", [nn.Linear(2, 2).requires_grad_(False).eval(), nn.ReLU()]), ("head", [nn.Linear(2, 2)])]
        >>> frozen_stages(stages)
        1
    """

    def __init__(self) -> None:
        # The number of stages in the last decision, also where they were not cached.
        self._settled = 0
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
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._refresh(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._refresh(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not earlier: Lightning may create this loader only now, or again.
        self._serve(trainer, pl_module, "val", trainer.val_dataloaders)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release(trainer, pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release(trainer, pl_module)

    def _refresh(self, trainer: pl.Trainer, pl_module: Any) -> None:
        stages = pl_module.stages()
        count = frozen_stages(stages[:-1])
        # Stages without parameters are not worth a cache.
        if not any(list(m.parameters()) for _, modules in stages[:count] for m in modules):
            count = 0
        if count != self._settled:
            self._release(trainer, pl_module)
            self._settled = count
            if count:
                self._decide(trainer, pl_module, stages, count)
        self._serve(trainer, pl_module, "train", trainer.train_dataloader)

    def _decide(self, trainer: pl.Trainer, pl_module: Any, stages: Sequence[Stage], count: int) -> None:
        data = _images_of(trainer)
        example = self._features(trainer, pl_module, count, pl_module.example_input_array.to(pl_module.device))
        size, limit = example.nbytes * sum(data_contract(data).sizes.values()), data.hparams["cache_gb"]
        shape = " x ".join(map(str, example.shape[1:]))
        what = f"features of {stages[count - 1][0]}: {shape} numbers per image, {size / 2**20:,.1f} MiB"
        if size > limit * 2**30:
            _inform("%s are more than cache_gb=%s, so the images are read in each epoch", what, limit)
            return
        pl_module.first_stage = count
        _inform("training on cached %s", what)

    def _serve(self, trainer: pl.Trainer, pl_module: Any, part: str, loader: Any) -> None:
        """Make a loader yield features while the module expects them."""
        if pl_module.first_stage and loader:
            if part not in self._computed:
                self._computed[part] = self._compute(trainer, pl_module, part, pl_module.first_stage)
            loader.use_features(*self._computed[part])

    def _features(self, trainer: pl.Trainer, pl_module: Any, count: int, images: Tensor) -> Tensor:
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            return run_stages(pl_module.stages()[:count], trainer.precision_plugin.convert_input(images))

    def _compute(self, trainer: pl.Trainer, pl_module: Any, part: str, count: int) -> tuple[Tensor, Tensor]:
        features, numbers = [], []
        for images, _, rows in _images_of(trainer).numbered_batches(part, trainer.global_rank, trainer.world_size):
            features.append(self._features(trainer, pl_module, count, images))
            numbers.append(rows)
        return gather_rows(torch.cat(features)), gather_rows(torch.cat(numbers))

    def _release(self, trainer: pl.Trainer, pl_module: Any) -> None:
        loaders: tuple[Any, ...] = (trainer.train_dataloader, trainer.val_dataloaders)
        for loader in loaders:
            if isinstance(loader, FeatureLoader):
                loader.use_features(None, None)
        self._computed = {}
        pl_module.first_stage = self._settled = 0
