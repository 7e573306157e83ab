"""One update: the mean gradient over all its targets, its statistics, and the optimizer's step."""

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from callbacks.lib.batch_norm import OrderedStatistics, exempt_from_broadcast, is_synchronised, stand_in
from callbacks.lib.first_micro_batch import FirstMicroBatch
from callbacks.lib.gradient_sum import GradientSum, most_of_rank
from callbacks.lib.hook_calls import HookCalls
from callbacks.lib.own_gradients import refuse_kept_gradients, without_backward
from callbacks.lib.stand_ins import kept_metrics, weighted_gradients
from callbacks.lib.targets import TargetCounter, joined_outputs
from callbacks.lib.updates import loader_batch_size
from datamodules.errors import UserError
from datamodules.loading.updates import Update


def calls_closure_once(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to compute the gradients once in a step."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)


class _Part(NamedTuple):
    """A micro-batch that this rank computes."""

    number: int
    batch: Any
    is_first: bool
    is_last: bool
    """Whether it is this rank's first or last one of the update."""
    is_stand_in: bool
    """Whether it only keeps up with other ranks, and nothing of it counts."""


class UpdateStep:
    """Makes the updates of one Trainer's training, from their micro-batches.

    Args:
        trainer: its epoch loop is an `UpdateLoop`.
        calls: of its hooks.
    """

    def __init__(self, trainer: pl.Trainer, calls: HookCalls) -> None:
        self.trainer: Any = trainer
        self.calls = calls
        self.seeds: Any = None
        """The `SeedControl` of the run."""
        self.sums_gradients = False
        """Whether `GradientSum` replaces the sum of DDP."""
        self.has_several = False
        """Whether an update may have several micro-batches."""
        self.skips_backward = False
        """Whether nothing is learnt in this epoch, as when `StochasticWeightAveraging` measures BatchNorm."""
        self._forget()

    def _forget(self) -> None:
        self._model: Any = None
        self._gradients: GradientSum | None = None
        self._statistics: OrderedStatistics | None = None
        self._synchronised: list[Any] = []
        self._is_checked = False
        self._targets = TargetCounter()

    def release(self) -> None:
        """Leave the module as it was, also where a `training_step` has raised."""
        if self._statistics is not None:
            self._statistics.restore()
        if self._gradients is not None:
            self._gradients.release()
        self._forget()

    @property
    def _loop(self) -> Any:
        return self.trainer.fit_loop.epoch_loop

    def make(self, update: Update[Any], first: Any, batch_idx: int) -> Any:
        """Make an update; what `on_train_batch_end` is given."""
        if not self.calls.module.automatic_optimization:
            return self._make_manually(update, first, batch_idx)
        outputs: list[dict[str, Any]] = []

        def closure() -> Tensor | None:
            outputs.clear()  # An optimizer may call it again.
            if torch.is_grad_enabled():
                return self._compute_gradients(update, first, batch_idx, outputs)
            with torch.enable_grad():
                return self._compute_gradients(update, first, batch_idx, outputs)

        if self.skips_backward:
            closure()  # StochasticWeightAveraging measures BatchNorm: no gradients and no update.
        else:
            if self._model is not self.calls.strategy.model:
                self._attach()  # Every hook has been called in which layers are unfrozen under another DDP.
            self.calls.optimizer_step(batch_idx, closure)
        if not outputs:
            raise MisconfigurationException(
                f"{type(self.calls.optimizers[0]).__name__}.step() has not called its closure, which computes the"
                " gradients: call it there, or set automatic_optimization = False"
            )
        if len(update) == 1 and not update.is_stand_in:
            return outputs[0] if outputs[0]["loss"] is not None else {}
        return joined_outputs(outputs, update.is_stand_in)

    def _make_manually(self, update: Update[Any], first: Any, batch_idx: int) -> Any:
        """A step of a module that optimizes manually, whose update is one micro-batch."""
        (number,) = update.numbers
        self._seed_micro_batch(number)
        part = _Part(number, first, is_first=True, is_last=True, is_stand_in=update.is_stand_in)
        with self._uneven(update, part), self._weighted(self._share_of_mean(update, part)):
            arguments = OrderedDict(self.calls.step_arguments(first, batch_idx))
            return self._loop.manual_optimization.run(arguments)

    def _attach(self) -> None:
        """Put the sums in the place of DDP's reduction; DDP is another one where layers were unfrozen."""
        trainer = self.trainer
        self._model = self.calls.strategy.model
        self._gradients = self._statistics = None
        if trainer.world_size > 1:
            self._synchronised = [layer for layer in trainer.lightning_module.modules() if is_synchronised(layer)]
        if not self.sums_gradients or not (self.has_several or trainer.world_size > 1):
            return  # One device with one micro-batch: PyTorch's own gradients and statistics.
        try:
            expected_count = loader_batch_size(trainer.train_dataloader)
        except UserError:
            expected_count = 1
        assert self._model is not None
        self._gradients = GradientSum(self._model, expected_count)
        self._gradients.keeps_loss = not calls_closure_once(trainer.optimizers[0])
        self._statistics = OrderedStatistics(trainer.lightning_module, trainer.world_size)
        if isinstance(self._model, DistributedDataParallel):
            exempt_from_broadcast(self._model)

    def _compute_gradients(
        self, update: Update[Any], first: Any, batch_idx: int, outputs: list[dict[str, Any]]
    ) -> Tensor | None:
        """Leave the mean gradient over all targets of an update in ``.grad``.

        Returns:
            The loss, for the optimizer: of this rank, or of all of them where the optimizer searches by it.
        """
        gradients = self._gradients
        statistics = self._statistics
        optimizer = self.calls.optimizers[0]
        if gradients is not None:
            gradients.begin(update.count)
        elif len(update) == 1 and not self._is_uneven(update):
            self._seed_micro_batch(update.numbers[0])
            outputs.append(self._compute_alone(first, batch_idx, optimizer))
            return outputs[0]["loss"]  # type: ignore[no-any-return]
        loss = None
        for part in self._parts(update):
            batch = first if part.is_first else self._load(part)
            self._seed_micro_batch(part.number)
            with self._communicating(part), self._uneven(update, part):
                if gradients is None or self.skips_backward:
                    output = self._compute_alone(batch, batch_idx, optimizer, self._share_of_mean(update, part))
                else:
                    output = self._compute_part(batch, batch_idx, optimizer, part, self._most_of_rank(update))
            if part.is_first or not part.is_stand_in:
                outputs.append(output)
            if output["loss"] is not None:
                loss = output["loss"]
        if gradients is not None and not self.skips_backward:
            assert statistics is not None
            statistics.finish(self._most_of_rank(update))
            self.calls.hook("on_after_backward")
            if gradients.keeps_loss:
                return gradients.mean_loss()
        return loss

    def _parts(self, update: Update[Any]) -> list[_Part]:
        """The micro-batches that this rank computes.

        Where synchronised layers wait for all ranks in each micro-batch, a rank with one fewer keeps up by a stand-in.
        """
        keeps_up = bool(self._synchronised) and len(update) < self._most_of_rank(update)
        last = len(update) - 1 + keeps_up
        parts = [
            _Part(number, batch, place == 0, place == last, update.is_stand_in)
            for place, (number, batch) in enumerate(update)
        ]
        if keeps_up:
            parts.append(_Part(update.numbers[0], update.batches[0], is_first=False, is_last=True, is_stand_in=True))
        return parts

    def _load(self, part: _Part) -> Any:
        """A micro-batch on the device; `log` takes its size as the weight of a mean."""
        self.seed_loading(part.number)
        batch = self.calls.to_device(part.batch)
        results = self._loop.results
        results.batch = batch
        results.batch_size = None
        return batch

    def _compute_alone(self, batch: Any, batch_idx: int, optimizer: Optimizer, share: float = 1.0) -> dict[str, Any]:
        """The gradients of an update that is one micro-batch, as Lightning computes them.

        Args:
            share: how much of them counts.
        """
        if self.sums_gradients and not self._is_checked:
            # As with several micro-batches. In each update it would take longer than all else here.
            self._is_checked = batch is not None
            parameters = list(self.calls.module.parameters())
            loss, output = without_backward(self.trainer, parameters, True, self._training_step, batch, batch_idx)
        else:
            loss, output = self._training_step(batch, batch_idx)
        if not self.skips_backward:
            self._zero_grad(batch_idx, optimizer)
            if loss is not None and share != 1.0:
                loss = loss * share
            if loss is not None:
                self.calls.stock_backward(loss, optimizer)
        return output

    def _compute_part(self, batch: Any, batch_idx: int, optimizer: Optimizer, part: _Part, most: int) -> dict[str, Any]:
        """The gradients of one of the micro-batches whose sum is an update's.

        Args:
            most: the most micro-batches of the update that a rank has.
        """
        gradients = self._gradients
        statistics = self._statistics
        assert gradients is not None
        assert statistics is not None
        check = None if self._is_checked or batch is None else FirstMicroBatch(self.trainer)
        statistics.begin()
        is_first = check is not None
        loss, output = without_backward(
            self.trainer, gradients.parameters, is_first, self._training_step, batch, batch_idx
        )
        if batch is not None and not part.is_stand_in:
            statistics.collect()
        if check is not None:
            check.finish(statistics)
            self._is_checked = True
        count: int | Tensor = 0 if loss is None else self._targets.count(output, batch)
        if part.is_first:
            self._zero_grad(batch_idx, optimizer)
            if self.calls.has_zeroing:
                refuse_kept_gradients(self.calls.module, gradients.parameters)
        gradients.scale_loss(loss, count, last=part.is_last)
        if part.is_last:
            statistics.send(most)
        if loss is not None:
            self.calls.backward(loss, optimizer)
        gradients.collect()
        statistics.restore()
        return {**output, "count": count}

    def _training_step(self, batch: Any, batch_idx: int) -> tuple[Tensor | None, dict[str, Any]]:
        """The loss of a micro-batch, and what `training_step` returned, with the loss detached."""
        # A collate function may have left nothing of a micro-batch.
        output = None if batch is None else self.calls.training_step(batch, batch_idx)
        if output is None and self.calls.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported. It is"
                " recommended that you rewrite your training logic to avoid having to skip the step in the first place."
            )
        if output is None and batch is not None:
            warnings.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning...", stacklevel=2
            )
        loss = output if type(output) is Tensor else output.get("loss") if type(output) is dict else None
        if type(loss) is not Tensor:
            # Lightning's, which refuses what is no loss, and divides by 1: an operation forwards and one backwards.
            result = ClosureResult.from_training_step_output(output)
            return result.closure_loss, result.asdict()
        # A GradScaler may scale the loss in place.
        values = {"loss": loss.detach().clone()}
        if type(output) is dict:
            values |= {name: value for name, value in output.items() if name != "loss"}
        return loss, values

    def _zero_grad(self, batch_idx: int, optimizer: Optimizer) -> None:
        progress = self._loop.automatic_optimization.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        self.calls.hook("on_before_zero_grad", optimizer)
        progress.increment_started()
        self.calls.zero_gradients(batch_idx, optimizer)
        progress.increment_completed()

    def _most_of_rank(self, update: Update[Any]) -> int:
        """The most micro-batches of the update that a rank has."""
        return len(update) if update.count is None else most_of_rank(update.count, self.calls.world_size)

    # What surrounds a micro-batch

    def seed_loading(self, number: int) -> None:
        """Seed the generators for loading a micro-batch, where the run seeds them."""
        if self.seeds is not None:
            self.seeds.seed_loading(self.trainer, number)

    def _seed_micro_batch(self, number: int) -> None:
        if self.seeds is not None:
            self.seeds.seed_micro_batch(self.trainer, number)

    def _communicating(self, part: _Part) -> contextlib.AbstractContextManager[Any]:
        """DDP reduces in the backward pass of each rank's last micro-batch, however many it has."""
        if part.is_last or not isinstance(self._model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._model.no_sync()

    def _is_uneven(self, update: Update[Any]) -> bool:
        """Whether some ranks have a micro-batch more than others."""
        return update.count is not None and update.count % self.calls.world_size != 0

    def _share_of_mean(self, update: Update[Any], part: _Part) -> float:
        """How much of a gradient counts where DDP takes the mean over all ranks, of which some only stand in."""
        if not self._is_uneven(update):
            return 1.0
        assert update.count is not None
        return 0.0 if part.is_stand_in else self.calls.world_size / update.count

    def _uneven(self, update: Update[Any], part: _Part) -> contextlib.AbstractContextManager[Any]:
        """What surrounds the micro-batches of an update of which some ranks have one more than others."""
        if not self._is_uneven(update):
            return contextlib.nullcontext()
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self._synchronised):
            raise UserError(
                f"torch's SyncBatchNorm waits for all devices in each micro-batch, and this update has {update.count}"
                f" for {self.trainer.world_size} devices: pass callbacks=[SyncBN()] in place of sync_batchnorm=True"
            )
        return self._uneven_part(part.is_stand_in)

    @contextlib.contextmanager
    def _uneven_part(self, is_stand_in: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._loop.results.uneven(is_stand_in))
            if is_stand_in:
                stack.enter_context(stand_in(self._synchronised))
                stack.enter_context(kept_metrics(self.calls.module))
            yield

    def _weighted(self, share: float) -> contextlib.AbstractContextManager[Any]:
        """What surrounds a `training_step` that makes its backward passes itself."""
        if share == 1.0:
            return contextlib.nullcontext()
        return weighted_gradients(self.calls.module, share)
