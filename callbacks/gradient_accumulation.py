"""Gradient accumulation: each update is the mean over all targets, bit-identical on any number of devices.

Lightning divides every loss by the full factor and gives micro-batches and ranks the same weight. So a short window
makes too small an update (#19987), and a sentence in a short batch counts more than one in a long batch (#20350).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.freezing import rewrap_ddp
from callbacks.lib.lightning_internals import OneLightningCallback
from callbacks.lib.loaded_updates import grouped, numbered_loaders, unknown_batch_size, update_loaders
from callbacks.lib.threads import ThreadsBeforeLaunch
from callbacks.lib.update_step import UpdateStep
from callbacks.lib.updates import flattened
from callbacks.update_loop import UpdateLoop, install_update_loop
from datamodules.errors import UserError, spelled
from datamodules.lightning import pl
from datamodules.notes import warn
from datamodules.ranges import COUNT, check_ranges, check_types


def steps_for_samples(samples: int, at_once: int, found: str) -> int:
    """Return the number of micro-batches per device in an update of `samples`.

    Args:
        at_once: number of samples in one micro-batch on each of the devices.
        found: first words of the error message.

    Raises:
        UserError: `samples` is not a multiple of `at_once`.

    Example:
        >>> steps_for_samples(1024, at_once=256, found="global_batch_size=1024")
        4
    """
    steps, remainder = divmod(samples, at_once)
    if steps and not remainder:
        return steps
    sizes = " or ".join(f"{size}" for size in (steps * at_once, (steps + 1) * at_once) if size)
    raise UserError(
        f"{found}: {samples} samples of an update are no multiple of the {at_once} that all devices process at once;"
        f" expected {sizes}, or another {spelled('batch_size')} of the loader"
    )


class GradientAccumulation(OneLightningCallback):
    """Callback that makes each update the mean over all its targets, bit-identical on any number of devices and nodes.

    Runs on: `setup`, where it sets the size of an update in `UpdateLoop`.

    `training_step` returns its mean loss and may add ``count``, the number of targets behind that mean, such as tokens
    that are not padding: one number, or a tensor that holds one and is never read back from an accelerator. Without it
    the samples count that the loader dealt. Logs stay the mean of the micro-batch. A micro-batch with a count of 0 adds
    nothing, even if its loss or its gradient is NaN. An update with a count of 0 makes no step: weights, optimizer and
    schedules stay as they are.

    Gradients are added in an order that follows from the micro-batches' numbers (`callbacks.GradientSum`), and running
    statistics of BatchNorm are updated in the order of the numbers. So weights and buffers have the same bits on any
    number of ranks if the micro-batches have numbers. A `DataLoader` over a data set with a length and a sampler of
    torch numbers them, as do the loaders of `datamodules`. With other loaders the bits are equal within rounding, and
    a note says so. On one device with one micro-batch per update, PyTorch computes the gradients as usual.

    An update is one step of the loop, whatever its number of micro-batches: `batch_idx`, limits and intervals count
    updates, and the module's `on_after_backward` sees the gradient of the whole update. An optimizer that calls its
    closure again, such as LBFGS, computes the whole update again.

    Memory: the gradients of log2(micro-batches of a rank) + 1 micro-batches during an update.

    Args:
        steps: micro-batches per update on each device.
        global_batch_size: samples per update on all devices; the number of micro-batches follows, and the last of them
            may be short. A loader without numbers needs a multiple of what the devices hold at once.
        count: function of the batch that returns the number of targets behind the loss, or the sum of their weights,
            for a `training_step` that is not yours. It takes precedence over the ``count`` that the step returns.

    Checkpoints hold the size of an update: a run resumed on other devices keeps it, and its position in the epoch.

    Raises:
        UserError: an update has fewer micro-batches than there are devices, `global_batch_size` does not divide, both
            arguments are given, something else also accumulates, or the strategy is neither one device nor DDP.

    Example:
        >>> trainer = pl.Trainer(callbacks=[GradientAccumulation(global_batch_size=1024)], logger=False)
    """

    def __init__(
        self,
        steps: int = 1,
        global_batch_size: int | None = None,
        count: Callable[[Any], int | float | Tensor] | None = None,
    ) -> None:
        super().__init__()
        if type(steps) is not int or steps < 1:
            raise UserError(f"accumulation of {steps!r} micro-batches: expected a whole number above 0")
        check_ranges(global_batch_size=(global_batch_size, COUNT))
        check_types(count=(count, count is None or callable(count), "a function of the batch"))
        if global_batch_size is not None and steps != 1:
            raise UserError(
                f"accumulation of {steps} micro-batches and {spelled('global_batch_size', global_batch_size)}: pass one"
                " of them"
            )
        self.steps = steps
        self.global_batch_size = global_batch_size
        self.count = count
        self._items: int | None = None
        """Items of an update on all devices, for loaders that number micro-batches: samples, or batches."""
        self._samples: int | None = None
        """Samples of an update on all devices, for other loaders with a known batch size."""
        self._is_outdated = False
        self._is_restored = False
        """Whether `_items` and `_samples` come from the checkpoint. Otherwise they follow from the loaders."""
        self._loop: UpdateLoop | None = None
        self._threads = ThreadsBeforeLaunch()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._items = None
        self._samples = None
        self._is_outdated = False
        self._is_restored = False
        if not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__} optimizes manually, so only its training_step can accumulate: remove"
                " GradientAccumulation, or set automatic_optimization = True"
            )
        self._loop = install_update_loop(trainer)
        self._loop.threads.begin(self._threads)
        self._step.sums_gradients = True
        self._step.counts_targets = True
        self._step.has_several = False
        self._step.count = self.count

        def prepare_loaders(loaders: Any) -> Any:
            return self._divide(trainer, loaders)

        self._loop.prepare_loaders = prepare_loaders

    @property
    def _step(self) -> UpdateStep:
        assert self._loop is not None
        return self._loop.step

    def _divide(self, trainer: pl.Trainer, loaders: Any) -> Any:
        """Set the size of an update in the training loaders."""
        numbered = numbered_loaders(loaders)
        if not numbered:
            return self._group(trainer, loaders)
        if len(numbered) < len(flattened(loaders)):
            return self._keep_mixed(loaders)
        if len(numbered) > 1 and self.global_batch_size is not None:
            raise UserError(unknown_batch_size(loaders))  # A collection of loaders has no batch size.
        for loader in numbered:
            # A resumed run keeps the saved size, so that the same samples form its updates on other devices.
            if not self._is_restored or self._items is None:
                if self.global_batch_size is None:
                    self._items = loader.items_of(self.steps * loader.world_size)
                else:
                    self._items = loader.items_of_samples(self.global_batch_size)
            loader.divide_updates(self._items)
            self._step.has_several = self._step.has_several or loader.division.micro_batches > 1
        return loaders

    def _keep_mixed(self, loaders: Any) -> Any:
        """Return loaders of which only some number their micro-batches: their batches together are one update."""
        if self.steps > 1:
            raise UserError(
                f"GradientAccumulation({self.steps}) and training loaders of which some do not number their"
                " micro-batches: pass steps=1, or loaders of datamodules only"
            )
        return loaders

    def _group(self, trainer: pl.Trainer, loaders: Any) -> Any:
        """Group the batches of loaders without numbers into updates."""
        members = update_loaders(loaders)
        size = self._group_size(trainer, members)
        if size == 1:
            return loaders
        self._step.has_several = True
        return grouped(loaders, size, trainer)

    def _group_size(self, trainer: pl.Trainer, loaders: list[Any]) -> int:
        """Return the number of micro-batches per device in an update."""
        sizes = [loader.batch_size for loader in loaders]
        if self.global_batch_size is not None:
            if len(sizes) > 1 or sizes[0] is None:
                raise UserError(unknown_batch_size(loaders[0].source if len(loaders) == 1 else loaders))
            at_once = sizes[0] * trainer.world_size
            setting = spelled("global_batch_size", self.global_batch_size)
            return steps_for_samples(self.global_batch_size, at_once, setting)
        if None in sizes:
            return self.steps
        at_once = sum(sizes) * trainer.world_size
        if not self._is_restored or self._samples is None:
            self._samples = self.steps * at_once
        reason = "the run began with other devices or batches than those of now"
        return steps_for_samples(self._samples, at_once, reason)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_supported = isinstance(trainer.strategy.model, DistributedDataParallel) or trainer.world_size == 1
        if not is_supported or trainer.strategy.handles_gradient_accumulation:
            raise UserError(
                f"{type(trainer.strategy).__name__} reduces gradients in its own way, which GradientAccumulation cannot"
                f" weigh: pass {spelled('strategy', 'ddp')}, or remove the callback"
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_outdated:  # Not rejected in `load_state_dict`, since a test may load such a checkpoint.
            raise UserError(
                "the checkpoint is of a version that counted micro-batches, and this one counts updates: start a new"
                " run from its weights"
            )
        # DDP wraps the module before `configure_optimizers`, which may freeze layers that DDP then waits for.
        rewrap_ddp(trainer, pl_module)

    def _release(self, *args: Any, **kwargs: Any) -> None:
        if self._loop is not None:
            self._step.sums_gradients = False
            self._step.has_several = False
            self._step.count = None
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
        before = ", ".join(spelled(name, state_dict[name]) for name in names)
        now = ", ".join(spelled(name, getattr(self, name)) for name in names)
        warn(
            f"warning: GradientAccumulation found {before} in the checkpoint and has {now}: unless both make the same"
            " updates, this is another experiment from here on"
        )
