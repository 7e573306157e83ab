"""Exponential moving average of the weights, which is evaluated, saved and exported.

Lightning's `WeightAveraging` validates with the initial weights until its first average (#21724), and restores the
weights that were not averaged whenever a checkpoint is loaded, even in a test.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.checkpointing.replay import RAW_WEIGHTS, loaded_raw_weights
from callbacks.lib.lightning_internals import OneLightningCallback, callbacks_of, set_callbacks
from callbacks.lib.optimizers import stepping_optimizer
from datamodules.errors import UserError, spelled
from datamodules.lightning import LambdaCallback, ModelCheckpoint, StochasticWeightAveraging, is_overridden, pl
from datamodules.lightning import WeightAveraging as LightningWeightAveraging
from datamodules.ranges import Range, check_ranges

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def ema_weight(samples: int, decay: float) -> float:
    """Return the weight of the next sample in an exponential moving average of `samples` samples.

    The decay is n / (9 + n) until it reaches `decay`, as in TensorFlow's `ExponentialMovingAverage(num_updates=)`.
    So the first sample counts in full, and in a short run the average covers about the last ninth of it.

    Example:
        >>> [round(ema_weight(n, decay=0.999), 3) for n in (0, 1, 91, 8991, 10**6)]
        [1.0, 0.9, 0.09, 0.001, 0.001]
    """
    return 1 - min(decay, samples / (9 + samples))


def averaged_tensors(module: nn.Module) -> list[Tensor]:
    """Return the real and complex parameters of a module, tied ones once, and the running statistics of BatchNorm."""
    tensors: list[Tensor] = [p for p in module.parameters() if p.is_floating_point() or p.is_complex()]
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            tensors += [buffer for buffer in (layer.running_mean, layer.running_var) if buffer is not None]
    return tensors


@torch.no_grad()
def exchange(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Exchange the values of tensors in place; needs memory for one more copy of the largest tensor."""
    for tensor, other in zip(tensors, others, strict=True):
        values = tensor.clone()
        tensor.copy_(other)
        other.copy_(values)


class _Average:
    """Average of a module's weights, kept in separate tensors or, to be evaluated, in the module.

    Args:
        module: the module; its present weights are the first sample.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors = averaged_tensors(module)
        self.parameters = [*map(id, module.parameters())]
        self.others = [tensor.detach().clone() for tensor in self.tensors]
        """The average, or the trained weights while the average is in the module."""
        self.in_module = False
        self._versions: list[int] = []

    @torch.no_grad()
    def add(self, weight: float) -> None:
        """Add the module's weights as a sample, by one kernel for all tensors of a device."""
        torch._foreach_lerp_(self.others, self.tensors, weight)

    def put(self, in_module: bool) -> None:
        """Put the average or the trained weights into the module."""
        if self.in_module != in_module:
            exchange(self.tensors, self.others)
            self.in_module = in_module
            self._versions = self._count_changes()

    def _count_changes(self) -> list[int]:
        """Return the version counter of each parameter, which counts its changes in place."""
        return [tensor._version for tensor in self.tensors if isinstance(tensor, nn.Parameter)]

    def was_changed(self) -> bool:
        """Whether a parameter was changed while the average is in the module."""
        return self.in_module and self._versions != self._count_changes()


class _FirstOfAll(LambdaCallback):
    """Callback for the steps of `WeightAveraging` that come before other callbacks."""


def _changes_weights_last(module: pl.LightningModule) -> bool:
    """Whether a module may change the weights after `on_train_batch_end` of callbacks, but not before a validation."""
    # Lightning calls `on_train_batch_end` of the callbacks first, and then of the module.
    return is_overridden("on_train_batch_end", module) and not is_overridden("on_validation_model_eval", module)


class WeightAveraging(OneLightningCallback):
    """Callback that evaluates and saves an exponential moving average of the weights, while the weights train on.

    From the first update on validation, best checkpoint, test and export use the averaged weights. The ``state_dict``
    of a checkpoint holds them; its ``current_model_state`` holds the others, from which a run resumes bit for bit.
    When training ends the module keeps the average. Tied parameters are averaged once, and the running statistics of
    BatchNorm like the weights. The module's `on_save_checkpoint` and `on_load_checkpoint` are called for both copies.

    Memory: one more copy of the parameters on their device, and another while a checkpoint is saved.

    Runs on: `on_train_batch_end`; one kernel and no wait for the device. Where the module has a hook of that name, that
    may change the weights, it is the first one after it: `on_train_batch_start`, `on_validation_start`, `on_train_end`
    or a save. An update that float16 skipped is not a sample, except with fused optimizers, which decide on the device.
    `on_validation_start` exchanges the weights before the hooks of other callbacks, `on_validation_end` after them, and
    `on_train_end` as well.

    Args:
        ema: decay of the average; it warms up, see `ema_weight`.

    Raises:
        UserError: a number outside its range, another average, parameters in half precision, a strategy that splits
            them, or weights that a hook of a validation changes.

    Example:
        >>> trainer = pl.Trainer(callbacks=[WeightAveraging(ema=0.999)], logger=False, accelerator="cpu")
    """

    loads_raw_weights = True
    """Tells `ExactCheckpoint` not to load the trained weights, since this callback does."""

    def __init__(self, ema: float) -> None:
        check_ranges(ema=(ema, Range(0, 1, above=True, below=True)))
        self.ema = ema
        self._handles: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self.samples = 0
        """Number of samples in the average."""
        self._average: _Average | None = None
        self._loaded: dict[str, Any] | None = None
        self._updated = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._forget()
        other_callbacks = [c for c in callbacks_of(trainer) if c is not self and not isinstance(c, _FirstOfAll)]
        for callback in other_callbacks:
            if isinstance(callback, (WeightAveraging, LightningWeightAveraging, StochasticWeightAveraging)):
                raise UserError(f"WeightAveraging and another {type(callback).__name__}: a run has one average")
            if isinstance(callback, ModelCheckpoint) and callback.save_weights_only:
                raise UserError("save_weights_only=True saves weights that are not averaged: leave it out")
        # This callback is the last one, so that the average is still in the module when others save after a validation.
        # Before them, `first_of_all` rejects scores of weights that are not the average.
        first_of_all = _FirstOfAll(
            on_validation_start=self._sample, on_validation_end=self._reject_changes, on_train_end=self._evaluate
        )
        sampling = "on_train_batch_start" if _changes_weights_last(pl_module) else "on_train_batch_end"
        setattr(first_of_all, sampling, self._sample)
        set_callbacks(trainer, [first_of_all, *other_callbacks, self])

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            self._forget()  # The weights that a test loads replace both copies.
        self._loaded = loaded_raw_weights(pl_module, checkpoint)

    @property
    @override
    def state_key(self) -> str:
        # Lightning's `WeightAveraging` has the same default key, the name of the class.
        return "AveragedWeights"

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]

    @override
    def state_dict(self) -> dict[str, Any]:
        # Lightning calls this before `on_save_checkpoint`, which adds the sample of the last update.
        return {"samples": self.samples + self._updated}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check(trainer, pl_module)
        if self.samples and self._loaded is None:
            raise UserError(
                f"the checkpoint holds an average of {self.samples:,} updates and not the weights that train: resume"
                " from one that was saved with the module of the fit"
            )
        if self._loaded is not None:
            if self.samples:
                self._average = _Average(pl_module)
            pl_module.load_state_dict(self._loaded, strict=pl_module.strict_loading)
            self._loaded = None
        optimizers = map(stepping_optimizer, trainer.optimizers)
        self._handles = [optimizer.register_step_post_hook(self._note_update) for optimizer in optimizers]

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel):
            name = type(trainer.strategy).__name__
            ddp = spelled("strategy", "ddp")
            raise UserError(f"{name} splits the parameters that are averaged: pass {ddp}, or do not average")
        trained = ((name, p) for name, p in pl_module.named_parameters() if p.requires_grad)
        low = next((name for name, p in trained if p.dtype in _LOW_PRECISION), None)
        if low:
            raise UserError(
                f"{low} is in half precision, in which the small changes of an average are lost: pass"
                f" {spelled('precision', 'bf16-mixed')} or {spelled('precision', '16-mixed')}, which keep the weights"
                " in float32"
            )

    def _note_update(self, *_: Any) -> None:
        self._updated = True

    def _sample(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not self._updated:
            return
        self._updated = False
        if self._average is None:
            self._average = _Average(pl_module)
        else:
            self._average.add(ema_weight(self.samples, self.ema))
        self.samples += 1

    def _reject_changes(self, *_: Any) -> None:
        if self._average is not None and self._average.was_changed():
            raise UserError(
                "WeightAveraging evaluates the average, and another hook of the validation changed the weights"
                " meanwhile, as where a module or an optimizer exchanges them for others: use one of the two"
            )

    def _evaluate(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the average into the module."""
        self._sample(trainer, pl_module)
        if self._average is not None:
            self._average.put(in_module=True)

    def _train(self) -> None:
        """Put the trained weights back into the module."""
        if self._average is not None:
            self._average.put(in_module=False)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._evaluate(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._reject_changes()
            self._train()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._sample(trainer, pl_module)
        if not self.samples:
            return
        averaged = checkpoint["state_dict"]
        raw = self._loaded
        average = self._average
        if raw is None:
            # A test may run another module. Parameters tell, since moving the module to the CPU after training keeps
            # them and replaces its buffers.
            if average is None or [*map(id, pl_module.parameters())] != average.parameters:
                return
            tensors = averaged_tensors(pl_module)
            exchange(tensors, average.others)
            raw = copy.deepcopy(trainer.strategy.lightning_module_state_dict())
            exchange(tensors, average.others)
            if not average.in_module:
                averaged, raw = raw, averaged
        checkpoint["state_dict"] = averaged
        raw_checkpoint = {**checkpoint, "state_dict": raw}
        pl_module.on_save_checkpoint(raw_checkpoint)  # Lightning calls this hook for the average only.
        checkpoint[RAW_WEIGHTS] = raw_checkpoint["state_dict"]

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._train()
        self._release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()
        if self._average is not None:  # For a checkpoint that is saved after the fit, when the module is on the CPU.
            self._average.others = [other.cpu() for other in self._average.others]

    def _release(self) -> None:
        while self._handles:
            self._handles.pop().remove()
