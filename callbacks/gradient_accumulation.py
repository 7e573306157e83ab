"""Gradient accumulation: an update is the mean over all targets, bit-identical on any number of devices.

Lightning divides every loss by the full factor and gives micro-batches and ranks the same weight, so a short window is
updated too weakly (#19987) and a sentence in a short batch counts more than one in a long batch (#20350).
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.freezing import rewrap_ddp
from callbacks.lib.lightning_internals import process_training_loader, set_sampler_epoch
from callbacks.lib.update_step import UpdateStep
from callbacks.lib.updates import flattened, loader_batch_size, resumable_loaders
from callbacks.update_loop import UpdateLoop, install_update_loop
from datamodules.errors import UserError
from datamodules.loading.updates import GroupedUpdates, StatefulGroupedUpdates
from datamodules.notes import warn


def steps_for_samples(samples: int, at_once: int, found: str) -> int:
    """The micro-batches of each device in an update of so many samples.

    Args:
        at_once: samples that all devices hold in a micro-batch each.
        found: what asks for the samples, for the error.

    Raises:
        UserError: they do not divide.

    Example:
        >>> steps_for_samples(1024, at_once=256, found="global_batch_size=1024")
        4
    """
    steps, rest = divmod(samples, at_once)
    if steps and not rest:
        return steps
    sizes = " or ".join(f"{size}" for size in (steps * at_once, (steps + 1) * at_once) if size)
    raise UserError(
        f"{found}: {samples} samples of an update are no multiple of the {at_once} that all devices process at once;"
        f" expected {sizes}, or another `batch_size` of the loader"
    )


class GradientAccumulation(pl.Callback):
    """Makes each update the mean over all its targets, bit-identical on any number of devices and nodes.

    Runs on: `setup`, where it tells `UpdateLoop` the size of an update.

    `training_step` returns its mean loss and may add ``count``, the number of targets behind that mean (tokens
    that are not padding, say; an int, or a tensor of no dimension, which is never read back from the device). Without
    it the batch size counts. Logs stay the mean of the micro-batch. A count of 0 takes a micro-batch out, even if its
    loss is NaN.

    Gradients are added in an order that follows from the micro-batches' numbers (`callbacks.GradientSum`), and running
    statistics of BatchNorm are updated in the order of the numbers. So weights and buffers have the same bits on any
    number of ranks if the micro-batches have numbers: with a `DataLoader` over a data set with a length and a sampler
    of torch, and with the loaders of `datamodules`. With other loaders they are equal within rounding, and a note says
    so. On
    one device with one micro-batch per update all this is left to PyTorch.

    Whatever the number of micro-batches, an update is one step of the loop: `batch_idx`, limits and intervals count
    updates, and the module's `on_after_backward` finds the gradient of the whole update. An optimizer that calls its
    closure again, such as LBFGS, computes the whole update again.

    Memory: the gradients of log2(micro-batches of a rank) + 1 micro-batches during an update.

    Args:
        steps: micro-batches per update on each device.
        global_batch_size: samples per update on all devices; the number of micro-batches follows, and the last of them
            may be short. A loader without numbers needs a multiple of what the devices hold at once.

    Checkpoints hold the size of an update: a run resumed on other devices keeps it, and its position in the epoch.

    Raises:
        UserError: an update has fewer micro-batches than there are devices, `global_batch_size` does not divide, both
            arguments are given, something else also accumulates, or the strategy is neither one device nor DDP.

    Example:
        >>> trainer = pl.Trainer(callbacks=[GradientAccumulation(global_batch_size=1024)], logger=False)
    """

    def __init__(self, steps: int = 1, global_batch_size: int | None = None) -> None:
        super().__init__()
        if type(steps) is not int or steps < 1:
            raise UserError(f"accumulation of {steps!r} micro-batches: expected a whole number above 0")
        if global_batch_size is not None and steps != 1:
            raise UserError(
                f"accumulation of {steps} micro-batches and global_batch_size={global_batch_size}: pass one of them"
            )
        self.steps = steps
        self.global_batch_size = global_batch_size
        self._items: int | None = None
        """Items of an update on all devices, where its loader numbers micro-batches: samples, or batches."""
        self._samples: int | None = None
        """Samples of an update on all devices, for other loaders that say how many are in a batch."""
        self._is_outdated = False
        self._is_restored = False
        """Whether the checkpoint says how many these are. Otherwise they follow from the loaders, whenever made."""
        self._loop: UpdateLoop | None = None
        self._divided: list[Any] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._items = None
        self._samples = None
        self._is_outdated = False
        self._is_restored = False
        if not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__} optimises manually, so only its training_step can accumulate: remove"
                " GradientAccumulation, or set automatic_optimization = True"
            )
        self._loop = install_update_loop(trainer)
        self._step.sums_gradients = True
        self._step.has_several = False
        self._loop.prepare_loaders = lambda loaders: self._divide(trainer, loaders)

    @property
    def _step(self) -> UpdateStep:
        assert self._loop is not None
        return self._loop.step

    def _divide(self, trainer: pl.Trainer, loaders: Any) -> Any:
        """Make loaders whose items are updates."""
        dealing = resumable_loaders(loaders)
        if not dealing:
            return self._group(trainer, loaders)
        if len(dealing) < len(flattened(loaders)):
            return self._keep(loaders)
        if len(dealing) > 1 and self.global_batch_size is not None:
            loader_batch_size(loaders)  # Which raises.
        for loader in dealing:
            if not self._is_restored or self._items is None:
                if self.global_batch_size is None:
                    self._items = loader.items_of(self.steps * loader.world_size)
                else:
                    self._items = loader.items_of_samples(self.global_batch_size)
            loader.divide_updates(self._items)
            self._step.has_several = self._step.has_several or loader.division.micro_batches > 1
        self._divided = dealing
        return loaders

    def _keep(self, loaders: Any) -> Any:
        """Loaders of which some number their micro-batches: together they are one micro-batch, which is an update."""
        if self.steps > 1:
            raise UserError(
                f"GradientAccumulation({self.steps}) and training loaders of which some do not number their"
                " micro-batches: pass steps=1, or loaders of datamodules only"
            )
        return loaders

    def _group(self, trainer: pl.Trainer, loaders: Any) -> Any:
        """Updates of loaders that deal no micro-batches by their numbers."""
        size = self._size_of_group(trainer, loaders)
        if size == 1:
            return loaders
        self._step.has_several = True
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        # Where several devices train, each reads its part.
        combined.flattened = [process_training_loader(trainer, loader) for loader in combined.flattened]
        if isinstance(loaders, CombinedLoader) or len(combined.flattened) > 1:
            batches: Any = _Combined(combined)
        else:
            batches = combined.flattened[0]
        is_stateful = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        kind = StatefulGroupedUpdates if is_stateful else GroupedUpdates

        def set_epoch(epoch: int) -> None:
            for loader in combined.flattened:
                set_sampler_epoch(loader, epoch)

        return kind(batches, size, trainer.global_rank, trainer.world_size, set_epoch)

    def _size_of_group(self, trainer: pl.Trainer, loaders: Any) -> int:
        """Micro-batches of each device in an update."""
        if self.global_batch_size is not None:
            at_once = loader_batch_size(loaders) * trainer.world_size
            return steps_for_samples(self.global_batch_size, at_once, f"global_batch_size={self.global_batch_size}")
        try:
            at_once = sum(map(loader_batch_size, flattened(loaders))) * trainer.world_size
        except UserError:  # One does not say.
            return self.steps
        if not self._is_restored or self._samples is None:
            self._samples = self.steps * at_once
        found = "the run began with other devices or batches than those of now"
        return steps_for_samples(self._samples, at_once, found)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        averages = isinstance(trainer.strategy.model, DistributedDataParallel) or trainer.world_size == 1
        if not averages or trainer.strategy.handles_gradient_accumulation:
            raise UserError(
                f"{type(trainer.strategy).__name__} reduces gradients in its own way, which GradientAccumulation cannot"
                ' weigh: pass strategy="ddp", or remove the callback'
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_outdated:  # A test may load it.
            raise UserError(
                "the checkpoint is of a version that counted micro-batches, and this one counts updates: start a new"
                " run from its weights"
            )
        rewrap_ddp(trainer, pl_module)  # Where `configure_optimizers` has frozen layers.

    def _release(self, *args: Any, **kwargs: Any) -> None:
        for loader in self._divided:
            loader.divide_updates(None)
        self._divided = []
        if self._loop is not None:
            self._step.sums_gradients = False
            self._step.has_several = False
            self._loop.prepare_loaders = None
            self._loop = None

    on_exception = teardown = _release

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "global_batch_size": self.global_batch_size,
            "items": self._items,
            "samples": self._samples,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "asked" in state_dict:
            self._is_outdated = True
            return
        names = ("steps", "global_batch_size")
        if all(state_dict[name] == getattr(self, name) for name in names):
            self._items = state_dict["items"]
            self._samples = state_dict["samples"]
            self._is_restored = True
            return
        before = ", ".join(f"{name}={state_dict[name]}" for name in names)
        now = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        warn(
            f"warning: GradientAccumulation found {before} in the checkpoint and has {now}: unless both make the same"
            " updates, this is another experiment from here on"
        )


class _Combined:
    """The batches of several loaders, as `training_step` gets them."""

    def __init__(self, loaders: CombinedLoader) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return len(self.loaders)

    def __iter__(self) -> Any:
        for batch, _, _ in self.loaders:
            yield batch
