"""Check for NaN and infinite weights, which stops a diverged run before it saves a checkpoint.

One update with a NaN in its gradient makes every weight NaN. Only the loss shows it, and the next checkpoint replaces
the last good one.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.lib.lightning_internals import log_interval
from callbacks.lib.one_lightning import OneLightningCallback
from datamodules.errors import RunFailedError, UserError, spelled
from datamodules.lightning import pl


def first_not_finite(module: nn.Module) -> str | None:
    """Return the name of the first parameter or running statistic with a NaN or an infinity, or None.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> first_not_finite(layer) is None
        True
        >>> layer.bias.data.fill_(float("nan"))
        tensor([nan])
        >>> first_not_finite(layer)
        'bias'
    """
    statistics = [(name, value) for name, value in module.named_buffers() if "running_" in name]
    tensors = [*module.named_parameters(), *statistics]
    named = [
        (name, _real(value.detach())) for name, value in tensors if value.is_floating_point() or value.is_complex()
    ]
    if not named:
        return None
    # A sum is not finite if an element is not, so one wait for the device checks all tensors. A sum of finite elements
    # may overflow: then each tensor is checked.
    device = named[0][1].device
    sums = torch.stack([value.sum(dtype=torch.float32).to(device) for _, value in named])
    if bool(sums.isfinite().all()):
        return None
    return next((name for name, value in named if not bool(value.isfinite().all())), None)


def _real(tensor: Tensor) -> Tensor:
    """Return the real and imaginary parts of a complex tensor, and any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def refuse_narrow_input(name: str, layer: Any, inputs: tuple[Tensor, ...]) -> None:
    """Refuse an input that is narrower than the stride of a convolution in bf16 on a CPU; a forward pre-hook.

    For such inputs oneDNN in PyTorch 2.14 and 2.15 computes the weights' gradient from uninitialised memory, so it
    differs between runs and may be NaN.

    Raises:
        UserError: the input is narrower than the stride.
    """
    width = inputs[0].shape[-1]
    stride = layer.stride[-1]
    if width < stride and layer.weight.requires_grad and layer.padding_mode == "zeros":
        raise UserError(
            f"{name} has a stride of {stride} over an input of width {width}, and PyTorch computes the gradient of its"
            f" weights wrongly in bf16 on a CPU: pass larger images, or {spelled('precision', '32-true')}"
        )


class FiniteWeights(OneLightningCallback):
    """Stops a run whose weights are no longer finite, and keeps them out of its checkpoints.

    Weights and running statistics decide, not the loss: a single NaN in the loss does no harm if GradScaler skips the
    update. In bf16 on a CPU the first batch is checked for a fault of PyTorch, see `refuse_narrow_input`.

    Runs on: `on_train_start`; `on_train_batch_end`, once per ``log_every_n_steps`` updates, `on_train_end`, and before
    each checkpoint; one pass over the weights.

    Raises:
        UserError: a convolution would have wrong gradients.
        RunFailedError: a weight is NaN or infinite.

    Example:
        >>> trainer = pl.Trainer(callbacks=[FiniteWeights()], logger=False, accelerator="cpu")
    """

    _checked_step = 0
    _handles: Sequence[RemovableHandle] = ()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._checked_step = trainer.global_step
        if pl_module.device.type == "cpu" and "bf16" in str(trainer.precision):
            self._handles = [
                layer.register_forward_pre_hook(partial(refuse_narrow_input, name))
                for name, layer in pl_module.named_modules()
                if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
                and min(layer.kernel_size[-1], layer.stride[-1]) > 1
            ]

    def _release(self, *args: Any, **kwargs: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    on_exception = _release

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._handles:
            self._release()
        every = log_interval(trainer)
        if every and trainer.global_step // every != self._checked_step // every:
            self._check(trainer, pl_module)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit" and trainer.global_step != self._checked_step:
            self._check(trainer, pl_module)

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        last_finite_step = self._checked_step
        self._checked_step = trainer.global_step
        name = first_not_finite(pl_module)
        if name:
            raise RunFailedError(
                f"the run has diverged: {name} holds NaN or infinity after update {trainer.global_step:,} (epoch"
                f" {trainer.current_epoch + 1}), and all was finite after update {last_finite_step:,}; checkpoints from"
                f" before are kept. Pass a lower {spelled('lr')}, {spelled('gradient_clip_val', 1)}, a longer"
                f" {spelled('warmup')} or {spelled('precision', '32-true')}"
            )

    on_train_end = _check
