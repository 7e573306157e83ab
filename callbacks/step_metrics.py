"""What a run tells of its updates, at one interval: loss and accuracy, gradient norm, learning rates, finite weights.

`self.log("loss", loss)` in every step costs 0.4 ms a step, shows one batch of one rank, and a gradient norm logged that
way waits for the device in every batch. `StepMetrics` costs microseconds, and reads all it logs in one transfer. One
update with a NaN in its gradient makes every weight NaN: only the loss shows it, and the next checkpoint replaces the
last good one. So the weights are read with the rest, and before each checkpoint.
"""

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.lib.exact_sums import DIGITS, from_whole_numbers, to_whole_numbers
from callbacks.lib.lightning_internals import OneLightningCallback, log_after_update, log_interval
from callbacks.lib.targets import micro_batch_outputs
from callbacks.lib.updates import updates_made
from callbacks.update_loop import UpdateLoop, install_update_loop
from datamodules.errors import RunFailedError, UserError, spelled
from datamodules.lightning import pl
from datamodules.ranges import check_types

_FOLD = 64  # Batches that are summed at once, since a sum takes several kernels, whatever their number.

_ENTRY = "train_loss"
"""Checkpoint entry of the sums since the last log and of the epoch, and of the interval."""


def sums_over_targets(
    means: list[Tensor], counts: list[int | Tensor], correct: list[int | float | Tensor | None]
) -> Tensor:
    """Return the sum of the losses of all targets, and the numbers of targets and of correct ones, as whole numbers.

    A mean over no target may be NaN and counts as 0.

    Args:
        means: the mean loss of each batch; `counts` and `correct` are its numbers of targets and of correct ones.

    Returns:
        int64 of shape (3, 17), see `callbacks.lib.exact_sums`.

    Example:
        >>> sums = sums_over_targets([torch.tensor(1.5), torch.tensor(float("nan"))], [3, 0], [2, None])
        >>> [from_whole_numbers(row) for row in sums.tolist()]
        [4.5, 3.0, 2.0]
    """
    losses = torch.stack(means).float()
    weights = _column(counts, losses.device)
    num_correct = _column([0 if number is None else number for number in correct], losses.device)
    losses = torch.where(weights > 0, losses * weights, 0.0)
    return to_whole_numbers(torch.stack((losses, weights, num_correct))).sum(1)


def _column(numbers: list[Any], device: torch.device) -> Tensor:
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(number, device=device).float() for number in numbers])
    return torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)


def _num_correct(output: dict[str, Any]) -> int | float | Tensor | None:
    """Return the number of correct targets of a step; None if it returned no number or tensor."""
    correct = output.get("correct")
    if isinstance(correct, Tensor):
        return correct.sum() if correct.ndim else correct
    return correct if isinstance(correct, (int, float)) else None


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements as a scalar tensor, float32 or float64.

    Example:
        >>> total_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
        tensor(5.)
    """
    # A sparse gradient may hold several values of one element, which `coalesce` adds.
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    if not values:
        return torch.zeros(())
    norms = torch._foreach_norm(values)
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    stacked = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(stacked)
    return total


def rates_by_name(groups: Sequence[dict[str, Any]], rates: Sequence[float | Tensor], prefix: str) -> dict[str, float]:
    """Name the distinct learning rates of parameter groups, with names that stay when a group is added.

    The first rate is named `prefix`, the others ``<prefix>/<name or number>`` after the first group with that rate, or
    the common parent of its groups' names. Groups with different initial rates stay separate, even when a schedule
    ends at 0 for all.

    Example:
        >>> rates_by_name([{}, {"name": "head"}, {}], [0.1, 0.2, 0.3], "lr")
        {'lr': 0.1, 'lr/head': 0.2, 'lr/2': 0.3}
        >>> names = ("layer4.decay", "layer4.no_decay", "fc.decay", "fc.no_decay")
        >>> rates_by_name([{"name": name} for name in names], [0.1, 0.1, 0.5, 0.5], "lr")
        {'lr': 0.1, 'lr/fc': 0.5}
    """
    names: dict[tuple[float, float], list[str]] = {}
    for number, (group, rate) in enumerate(zip(groups, rates, strict=False)):
        key = (float(group.get("initial_lr", rate)), float(rate))
        names.setdefault(key, []).append(str(group.get("name", number)))
    named_rates: dict[str, float] = {}
    for (_, rate), group_names in names.items():
        parents = {name.rpartition(".")[0] for name in group_names}
        name = group_names[0]
        if len(group_names) > 1 and len(parents) == 1:
            parent = parents.pop()
            if parent and f"{prefix}/{parent}" not in named_rates:
                name = parent
        named_rates[f"{prefix}/{name}" if named_rates else prefix] = rate
    return named_rates


def _finite_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and running statistics that have to be finite, as real tensors, by name."""
    statistics = [(name, value) for name, value in module.named_buffers() if "running_" in name]
    named = []
    for name, parameter in [*module.named_parameters(), *statistics]:
        value = parameter.detach()
        if value.is_complex():
            named.append((name, torch.view_as_real(value.resolve_conj())))
        elif value.is_floating_point():
            named.append((name, value))
    return named


def all_finite(module: nn.Module) -> Tensor:
    """Return whether the weights and running statistics are finite, as a tensor of one element on their device.

    It does not wait for the device. It is False as well if a sum of finite elements overflows; then
    `first_not_finite` looks at each tensor.
    """
    values = [value for _, value in _finite_tensors(module)]
    if not values:
        return torch.ones(1, dtype=torch.bool)
    # A sum is not finite if an element is not.
    sums = torch.stack([value.sum(dtype=torch.float32).to(values[0].device) for value in values])
    return sums.isfinite().all().view(1)


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
    return next((name for name, value in _finite_tensors(module) if not bool(value.isfinite().all())), None)


def reject_narrow_input(name: str, layer: Any, inputs: tuple[Tensor, ...]) -> None:
    """Reject an input that is narrower than the stride of a convolution in bf16 on a CPU; a forward pre-hook.

    For such inputs oneDNN in PyTorch 2.14 and 2.15 computes the weights' gradient from uninitialized memory, so it
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


class LossSums:
    """Sums over this rank's targets, since the last log and in the epoch: losses, targets, correct predictions."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.sums = torch.zeros(2, 3, DIGITS, dtype=torch.int64, device=device)
        """Sums since the last log, and of this epoch."""
        self.batches: list[tuple[Tensor, int | Tensor, int | float | Tensor | None]] = []
        """Mean loss, count and number of correct targets of each batch that is not summed yet."""
        self.has_accuracy = False
        """Whether the last step returned the number of correct targets."""
        self.has_losses = False
        """Whether a step of this epoch returned a loss."""

    def add(self, outputs: Any) -> None:
        """Add the outputs of an update, without waiting for the device."""
        for output in micro_batch_outputs(outputs):
            loss = output.get("loss")
            if loss is not None:
                correct = _num_correct(output)
                self.batches.append((loss, output["count"], correct))
                self.has_losses = True
                self.has_accuracy = correct is not None
        if len(self.batches) >= _FOLD:
            self.fold()

    def fold(self) -> None:
        """Add the batches to the sums."""
        if self.batches:
            self.sums += sums_over_targets(*map(list, zip(*self.batches, strict=True)))
            self.batches = []

    def totals(self, trainer: pl.Trainer) -> Tensor:
        """Return the sums of all ranks, without waiting for the device; a collective call."""
        self.fold()
        totals = self.sums.to(trainer.strategy.root_device, copy=True)
        if trainer.world_size > 1:
            torch.distributed.all_reduce(totals)  # `Strategy.reduce` would add a barrier.
        return totals

    def means(self, totals: list[float], suffix: str = "") -> dict[str, float]:
        """Return the mean loss, and the accuracy if there is one, by name; nothing without targets."""
        loss, targets, correct = totals
        if not targets:
            return {}
        means = {f"train/loss{suffix}": loss / targets}
        if self.has_accuracy:
            means[f"train/accuracy{suffix}"] = correct / targets
        return means


class StepMetrics(OneLightningCallback):
    """Callback that logs loss, accuracy, speed, gradient norm and learning rates, and stops a run that diverges.

    `TrainLoss`, `TrainingMonitor` and `FiniteWeights` are this callback with one of its parts, and say what each does.
    A `WarmupLR` passes the learning rates.

    Runs on: every optimizer step and training batch; before each checkpoint. It logs in one row and waits for the
    device once: at each multiple of ``log_every_n_steps`` updates, and at the last update of an epoch without one.

    Args:
        targets: plural name of a target, for "train/samples_per_second"; None logs no loss.
        norm: whether to log the norm of the gradients.
        finite: whether to stop a run whose weights are not finite.

    Raises:
        UserError: a convolution would have wrong gradients.
        RunFailedError: an epoch had no target, on any rank, or a weight is NaN or infinite.

    Example:
        >>> trainer = pl.Trainer(callbacks=[StepMetrics()], logger=False, accelerator="cpu")
    """

    def __init__(self, targets: str | None = "samples", *, norm: bool = True, finite: bool = True) -> None:
        check_types(
            targets=(targets, targets is None or isinstance(targets, str), 'a plural name, as "samples"'),
            norm=(norm, isinstance(norm, bool), "True or False"),
            finite=(finite, isinstance(finite, bool), "True or False"),
        )
        self.targets = targets
        self.norm = norm
        self.finite = finite
        self.rates: Sequence[Any] = ()
        """What sets the rates of each optimizer while it steps: objects with ``optimizer`` and ``used``."""
        self.values: dict[str, float] = {}
        """Values of the last log."""
        self.losses = LossSums()
        self._norms: dict[Optimizer, tuple[Tensor, float]] = {}
        self._update = 0
        """Number of updates at the last log."""
        self._next = math.inf
        """Number of updates at the end of the interval; infinite if nothing is logged."""
        self._logged = False
        """Whether something was logged in this epoch."""
        self._since = 0.0
        """Time of the last log, later by the seconds of validations since."""
        self._epoch_since = math.nan
        """The same of the start of the epoch; NaN in an epoch that is resumed."""
        self._checked_step = 0
        self._handles: Sequence[RemovableHandle] = ()
        self._saved: dict[str, Any] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.targets is not None:
            # The loop counts the samples that the loaders deal.
            install_update_loop(trainer).step.counts_targets = True

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        saved = self._saved or {}
        self._saved = None
        self._norms = {}
        self._since = time.monotonic()
        self._epoch_since = math.nan
        # An earlier version counted the steps of all optimizers here.
        self._begin_interval(trainer, min(saved.get("update", math.inf), updates_made(trainer)))
        self._logged = saved.get("logged", False)
        self.losses = LossSums(trainer.strategy.root_device)
        if "sums" in saved and trainer.global_rank == 0:  # The saved sums are over all ranks.
            self.losses.sums += saved["sums"].to(self.losses.sums.device)
        self._checked_step = trainer.global_step
        if self.finite and pl_module.device.type == "cpu" and "bf16" in str(trainer.precision):
            self._handles = [
                layer.register_forward_pre_hook(partial(reject_narrow_input, name))
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
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logged = False
        self._epoch_since = time.monotonic()
        self.losses.has_losses = False

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # With the next hook: interval and epoch leave out the validation's time.
        self._since -= time.monotonic()
        self._epoch_since -= time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since += time.monotonic()
        self._epoch_since += time.monotonic()

    def _begin_interval(self, trainer: pl.Trainer, updates: int) -> None:
        every = log_interval(trainer)
        self._update = updates
        self._next = (updates // every + 1) * every if every else math.inf

    def _is_due(self, updates: int, is_last: bool) -> bool:
        """Whether to log after a number of updates, of which this one may be the epoch's last."""
        return updates >= self._next or (is_last and not self._logged and self._next < math.inf)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self.norm or not self._is_due(updates_made(trainer) + 1, trainer.is_last_batch):
            return
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # A fused optimizer unscales the gradients in its step, after this hook; others have unscaled ones here.
        is_scaled = scaler is not None and hasattr(optimizer, "_step_supports_amp_scaling")
        scale = scaler.get_scale() if is_scaled and scaler else 1.0
        self._norms[optimizer] = (total_norm(gradients), scale)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._handles:
            self._release()
        if self._next == math.inf:
            return
        if self.targets is not None:
            self.losses.add(outputs)
        updates = updates_made(trainer)
        is_last = trainer.is_last_batch
        is_due = self._is_due(updates, is_last)
        if is_due or (is_last and self.targets is not None):
            self._log(trainer, pl_module, updates, is_due)

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, updates: int, is_due: bool) -> None:
        """Log the values of the interval if it is due, and the means of the epoch at its end."""
        totals, norms, is_finite = self._read(trainer, pl_module)
        if not is_finite:
            self._reject_divergence(trainer, pl_module)
        self._checked_step = trainer.global_step
        means: dict[str, float] = {}
        speed: dict[str, float] = {}
        if trainer.is_last_batch:
            means |= self.losses.means(totals[1], "_epoch")
            if totals[1][1] and not math.isnan(self._epoch_since):
                seconds = max(1e-9, time.monotonic() - self._epoch_since)
                speed[f"train/{self.targets}_per_second_epoch"] = totals[1][1] / seconds
            self.losses.sums[1].zero_()
            if self.losses.has_losses and not means:
                raise RunFailedError(
                    f"epoch {trainer.current_epoch + 1} had no target: every `count` was 0, as where all labels are"
                    " -100; correct the labels"
                )
        rates: dict[str, float] = {}
        if is_due:
            loop = trainer.fit_loop.epoch_loop
            if isinstance(loop, UpdateLoop):
                loop.threads.report_waits()
            means |= self.losses.means(totals[0])
            if totals[0][1]:
                seconds = max(1e-9, time.monotonic() - self._since)
                speed[f"train/{self.targets}_per_second"] = totals[0][1] / seconds
            self._since = time.monotonic()
            self.losses.sums[0].zero_()
            for index, rate in enumerate(self.rates):
                rates |= rates_by_name(rate.optimizer.param_groups, rate.used, f"lr{index or ''}")
            self._begin_interval(trainer, updates)
        # Not by `pl_module.log`, which logs nothing in an epoch that is shorter than the interval.
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in (means | rates).items()})
        self.values = means | speed | norms | rates
        self._logged = self._logged or (is_due and (self.targets is None or totals[0][1] > 0))
        if self.values:
            log_after_update(trainer, self.values)

    def _read(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> tuple[list[list[float]], dict[str, float], bool]:
        """Read in one transfer from the device what is logged.

        Returns:
            The sums of all ranks since the last log and of the epoch, the gradient norm, and whether the weights are
            finite.
        """
        device = trainer.strategy.root_device
        totals = self.losses.sums if self.targets is None else self.losses.totals(trainer)
        rows = [totals.view(-1, DIGITS)]
        rows += [to_whole_numbers(norm).to(device).view(1, DIGITS) for norm, _ in self._norms.values()]
        if self.finite:
            rows.append(all_finite(pl_module).to(device).long().expand(1, DIGITS))
        numbers = torch.cat(rows).tolist()
        sums = [from_whole_numbers(row) for row in numbers[: 6 + len(self._norms)]]
        norms = {}
        if self._norms:
            scales = [scale for _, scale in self._norms.values()]
            norms["monitor/gradient_norm"] = math.hypot(*(norm / scale for norm, scale in zip(sums[6:], scales)))
        self._norms = {}
        return [sums[:3], sums[3:6]], norms, not self.finite or bool(numbers[-1][0])

    def running(self) -> tuple[float, float]:
        """Return this rank's mean loss of the epoch so far, NaN without targets, and their number; waits for a GPU."""
        self.losses.fold()
        loss, targets, _ = (from_whole_numbers(row) for row in self.losses.sums[1].tolist())
        return (loss / targets if targets else math.nan), targets

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        self._check_finite(trainer, pl_module)
        if trainer.interrupted:
            return  # After an exception the other ranks may be gone, and the sums need an all-reduce.
        saved: dict[str, Any] = {"update": self._update, "logged": self._logged}
        if self.targets is not None:
            saved["sums"] = self.losses.totals(trainer).cpu()
        checkpoint[_ENTRY] = checkpoint.get(_ENTRY, {}) | saved

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved = checkpoint.get(_ENTRY) if trainer.state.fn == "fit" else None

    def _check_finite(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the weights, unless they were checked after this update."""
        if self.finite and trainer.global_step != self._checked_step:
            if not bool(all_finite(pl_module)):
                self._reject_divergence(trainer, pl_module)
            self._checked_step = trainer.global_step

    on_train_end = _check_finite

    def _reject_divergence(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        name = first_not_finite(pl_module)
        if name:
            # Of the epochs that have begun: at the end of the training `current_epoch` is one that has not.
            epoch = trainer.fit_loop.epoch_progress.current.ready
            raise RunFailedError(
                f"the run has diverged: {name} holds NaN or infinity after update {trainer.global_step:,} (epoch"
                f" {epoch}), and all was finite after update {self._checked_step:,}; checkpoints"
                f" from before are kept. Pass a lower {spelled('lr')}, {spelled('gradient_clip_val', 1)}, a longer"
                f" {spelled('warmup')} or {spelled('precision', '32-true')}"
            )


class TrainLoss(StepMetrics):
    """Callback that logs the mean loss over the targets of all ranks.

    It logs once per ``log_every_n_steps`` updates and once per epoch.

    It also logs the accuracy, if `training_step` returns the number of correct targets, and the targets per second of
    training. The means of an epoch are logged at its end with ``_epoch`` after their names, such as "train/loss_epoch";
    an epoch that is resumed has no mean speed.

    Runs on: `setup`, where it installs `UpdateLoop`; every training batch, where it keeps references to the loss and
    the number of correct targets. `training_step` returns them as ``loss`` and ``correct``, and may add the
    ``count`` of targets behind them. Sums
    are exact, so equal batches log equal bits on any number of ranks. Logging waits for the device once. Checkpoints
    hold the sums, so a run resumed on any number of ranks logs the same.

    Args:
        targets: plural name of a target, for "train/samples_per_second".

    Raises:
        RunFailedError: an epoch had no target, on any rank.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TrainLoss()], logger=False, accelerator="cpu")
    """

    def __init__(self, targets: str = "samples") -> None:
        super().__init__(targets, norm=False, finite=False)


class TrainingMonitor(StepMetrics):
    """Callback that logs the norm of the gradients as "monitor/gradient_norm".

    The norm is over the whole update, all micro-batches and ranks, unscaled and before clipping. Only parameters with
    a gradient count, so frozen ones do not. `TrainLoss` logs the samples per second.

    Runs on: `on_before_optimizer_step` and `on_train_batch_end`, once per ``log_every_n_steps`` updates, where it waits
    for the device once. It does not change the run.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TrainingMonitor()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        super().__init__(None, norm=True, finite=False)


class FiniteWeights(StepMetrics):
    """Callback that stops a run whose weights are not finite, and keeps them out of its checkpoints.

    Weights and running statistics decide, not the loss: a single NaN in the loss does no harm if GradScaler skips the
    update. In bf16 on a CPU the first batch is checked for a fault of PyTorch, see `reject_narrow_input`.

    Runs on: `on_train_start`; `on_train_batch_end`, once per ``log_every_n_steps`` updates, `on_train_end`, and before
    each checkpoint; one pass over the weights.

    Raises:
        UserError: a convolution would have wrong gradients.
        RunFailedError: a weight is NaN or infinite.

    Example:
        >>> trainer = pl.Trainer(callbacks=[FiniteWeights()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        super().__init__(None, norm=False, finite=True)
