"""The learning-rate range test: a few updates with growing rates, from whose losses a rate is chosen.

Lightning's Tuner writes and restores a checkpoint in the middle of the run, records the loss of one micro-batch on one
rank, and leaves generators and loaders where the search ended. Here copies are trained, in a Trainer of their own.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from callbacks.train_loss import TrainLoss
from datamodules.errors import UserError
from recipes.copied_fit import fit_copies

__all__ = ["RateSweep", "RateTest", "choose_rate", "draw_rate_test", "find_learning_rate"]

_LOSS = "lr_find/loss"
_WIDTH = 7  # Losses that are averaged for the choice: half a decade of 100 rates from 1e-6 to 10.


def smooth(losses: Sequence[float], width: int = _WIDTH) -> list[float]:
    """The mean of each value and its neighbours, `width` in all; fewer at the ends.

    Example:
        >>> smooth([3.0, 0.0, 3.0, 6.0], width=3)
        [1.5, 2.0, 3.0, 4.5]
    """
    reach = width // 2
    parts = [losses[max(0, i - reach) : i + reach + 1] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


def choose_rate(rates: Sequence[float], losses: Sequence[float]) -> float:
    """A tenth of the rate at which the smoothed loss is least, rounded to two digits.

    That is a decade before the loss grows, where it still falls fast (Smith, 2017; the rule is that of Howard and
    Gugger, 2020).

    Args:
        rates: growing.
        losses: of the update with each rate, finite.

    Raises:
        UserError: the loss has not fallen, or by no more than it varies from one update to the next.

    Example:
        >>> rates = [10.0 ** (k / 10 - 4) for k in range(40)]
        >>> choose_rate(rates, [2 - rate if rate < 0.1 else 1.9 + 10 * (rate - 0.1) ** 2 for rate in rates])
        0.0079
    """
    smoothed = smooth(losses)
    if len(losses) < 2 * _WIDTH:
        raise UserError(
            f"no learning rate was found: the loss grew from {losses[0]:.4g} after {len(losses)} updates, with rates up"
            f" to {rates[-1]:.2g}; pass lr=NUMBER"
            if losses
            else "no learning rate was found: the first loss is not finite; correct the data or the network"
        )
    least = min(range(len(smoothed)), key=smoothed.__getitem__)
    fall = smoothed[0] - smoothed[least]
    until = max(least, _WIDTH)
    noise = math.sqrt(sum((a - b) ** 2 for a, b in zip(losses[:until], smoothed)) / until)
    if fall <= max(noise, 0.005 * abs(smoothed[0])):
        raise UserError(
            f"no learning rate was found: with rates from {rates[0]:.2g} to {rates[-1]:.2g} the loss fell from"
            f" {smoothed[0]:.4g} to {smoothed[least]:.4g}, and it varies by {noise:.2g} between updates; pass"
            " lr=NUMBER, or a larger batch for the search"
        )
    return float(f"{rates[least] / 10:.2g}")


@dataclass(frozen=True)
class RateTest:
    """What a range test found.

    Args:
        lr: the rate that was chosen.
        rates: of the updates, growing.
        losses: of the global batches of these updates, before each of them.
    """

    lr: float
    rates: list[float]
    losses: list[float]

    def line(self) -> str:
        """The choice in one line."""
        least = min(zip(smooth(self.losses), self.rates))[1]
        return (
            f"lr {self.lr:g}: a tenth of {least:.2g}, where the loss was least ({len(self.rates)} updates with rates"
            f" from {self.rates[0]:.2g} to {self.rates[-1]:.2g})"
        )


class RateSweep(TrainLoss):
    """Gives each update a larger learning rate than the one before, and keeps the losses.

    The loss of an update is the mean over all targets of its global batch, equal on all ranks. The test ends where
    it is not finite.

    Runs on: `on_train_start`, which removes the schedules, and every training batch. Rates keep their ratios where
    groups have different ones.

    Args:
        lr: the module's learning rate, to which the rates of its groups belong; by default that of the first group.
        low, high: the first and the last rate.
        updates: with rates between them, in equal ratios.
    """

    def __init__(self, lr: float | None = None, low: float = 1e-6, high: float = 10.0, updates: int = 100) -> None:
        if not 0 < low < high or updates < 2 * _WIDTH:
            raise UserError(
                f"low={low}, high={high}, updates={updates}: expected 0 < low < high, and {2 * _WIDTH} updates or more"
            )
        super().__init__(_LOSS)
        self.lr, self.low, self.high, self.updates = lr, low, high, updates
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._bases: list[tuple[dict[str, Any], float]] = []

    def rate(self, update: int) -> float:
        """The rate of an update, from 0."""
        return float(self.low * (self.high / self.low) ** (update / (self.updates - 1)))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        trainer.lr_scheduler_configs.clear()
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        # A schedule has multiplied the rate already.
        self._bases = [(group, float(group.get("initial_lr", group["lr"]))) for group in groups]
        self.lr = self.lr or self._bases[0][1]
        self._set(self.rate(0))

    def _set(self, rate: float) -> None:
        for group, base in self._bases:
            lr = base * rate / (self.lr or 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        loss = trainer.callback_metrics.pop(_LOSS, None)
        if loss is None:
            return
        update, value = len(self.losses), float(loss)
        if not math.isfinite(value):
            trainer.should_stop = True
            return
        self.rates.append(self.rate(update))
        self.losses.append(value)
        self._set(self.rate(update + 1))

    def result(self) -> RateTest:
        """What was found.

        Raises:
            UserError: as `choose_rate` does.
        """
        return RateTest(choose_rate(self.rates, self.losses), self.rates, self.losses)


def sweep_rates(
    module: pl.LightningModule, data: Any, sweep: RateSweep, build_trainer: Callable[[RateSweep], pl.Trainer]
) -> RateTest:
    """Run a range test on copies.

    Args:
        build_trainer: makes a Trainer with that callback, for ``sweep.updates`` updates and without validation, that
            logs each update.

    Raises:
        UserError: module or data cannot be copied, or no rate was found.
    """
    fit_copies(module, data, sweep, build_trainer, "lr=NUMBER")
    return sweep.result()


def find_learning_rate(
    module: pl.LightningModule,
    data: Any,
    lr: float | None = None,
    low: float = 1e-6,
    high: float = 10.0,
    updates: int = 100,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> RateTest:
    """Find a learning rate by a range test (Smith, 2017), which leaves the module, the data and generators as they are.

    Args:
        module: as it is to be trained; a copy is.
        data: a data module or loader, of which a copy is read, again from its beginning where it ends early.
        lr: the module's own rate, to which the rates of its groups belong; by default ``module.hparams.lr``, or that of
            the first group.
        low, high: the rates at which the test begins and ends.
        updates: with rates between them.
        callbacks: that change what an update is, such as `GradientAccumulation` and `SeedControl`.
        options: of the Trainer, such as ``devices`` and ``precision``.

    Returns:
        The rate as ``lr``, and the curve.

    Raises:
        UserError: no rate was found.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        >>> found = find_learning_rate(BoringModel(), DataLoader(RandomDataset(32, 64), 16), accelerator="cpu")
        >>> 0.001 < found.lr < 1
        True
    """
    lr = lr if lr is not None else module.hparams.get("lr")
    fixed = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": -1}
    fixed |= {"enable_model_summary": False, "limit_val_batches": 0, "log_every_n_steps": 1, "max_steps": updates}

    def build_trainer(sweep: RateSweep) -> pl.Trainer:
        return pl.Trainer(**{**options, **fixed}, callbacks=[*copy.deepcopy(list(callbacks)), sweep])

    return sweep_rates(module, data, RateSweep(lr, low, high, updates), build_trainer)


def draw_rate_test(found: RateTest, path: Path) -> None:
    """Draw the losses over the rates, with the choice, into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    axes.plot(found.rates, found.losses, ".", color="#8c959f", markersize=4, label="loss of each update")
    axes.plot(found.rates, smooth(found.losses), color="#2f81f7", label=f"mean of {_WIDTH}")
    axes.axvline(found.lr, color="#e8730c", linestyle="--", label=f"lr {found.lr:g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss")
    top = max(smooth(found.losses)[: len(found.losses) // 2])
    low = min(found.losses)
    axes.set_ylim(low - 0.1 * (top - low), top + 0.5 * (top - low))
    axes.grid(visible=True, color="#d0d7de", linewidth=0.5)
    axes.legend(frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
