"""Each update is the mean over all its targets: compared in float64 with one large batch written out in plain torch."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib import first_update
from callbacks.lib.loaded_updates import global_batch_size
from callbacks.lib.updates import total_updates
from datamodules.errors import UserError
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

PADDING = -100
Batch = tuple[Tensor, Tensor]


def sentences(sizes: Sequence[int], seed: int = 0, length: int = 6) -> list[Batch]:
    """Batches of `sizes` sentences, (batch, time, 5) and (batch, time), of 1 to `length` tokens that are no padding."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for size in sizes:
        x = torch.randn(size, length, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (size, length), generator=generator)
        tokens = torch.randint(1, length + 1, (size, 1), generator=generator)
        batches.append((x, y.masked_fill(torch.arange(length) >= tokens, PADDING)))
    return batches


class Tagger(pl.LightningModule):
    """A linear model of each token; `count` says whether training_step reports its targets as int, tensor or not."""

    def __init__(self, count: str | None = "tensor", lr: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(5, 3, dtype=torch.float64)
        self.count, self.lr = count, lr

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, y = batch
        losses = F.cross_entropy(self.layer(x).flatten(0, 1), y.flatten(), ignore_index=PADDING, reduction="none")
        if self.count is None:
            return losses.view(x.shape[:2]).mean(1).mean(), torch.tensor(len(x))
        return losses.sum() / (y != PADDING).sum(), (y != PADDING).sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss, count = self.loss(batch)
        self.log("loss", loss, batch_size=1)
        if self.count is None:
            return loss
        return {"loss": loss, "count": int(count) if self.count == "int" else count}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Stream(IterableDataset):
    """Batches of which nobody knows the number."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Normalized(Tagger):
    """Normalizes its batches, and fails in one of them."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.norm, self.fails_at = nn.BatchNorm1d(3, dtype=torch.float64), fails_at

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.norm(self.layer(batch[0]).mean(1)).square().mean() + self.layer.weight.square().sum()
        if batch_idx == self.fails_at:
            raise RuntimeError("stop")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.before = self.norm.running_mean.clone()


def train(model: pl.LightningModule, batches: Any, *callbacks: pl.Callback, **options: Any) -> Any:
    """Fit on ready-made batches and return the Trainer."""
    ready_made = isinstance(batches, list | IterableDataset)
    loader = DataLoader(batches, batch_size=None) if ready_made else batches  # type: ignore[arg-type]
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(model, loader)
    return trainer


def by_hand(
    updates: Sequence[Sequence[Batch]], count: str | None = "tensor", clip: float | None = None
) -> list[Tensor]:
    """The weights after updates of all their batches as one: losses over counts, or zero without targets."""
    model = Tagger(count)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = model.configure_optimizers()
    for update in updates:
        parts = [model.loss(batch) for batch in update if len(batch[0])]
        total = sum(float(loss_count[1]) for loss_count in parts)
        optimizer.zero_grad(set_to_none=False)
        for loss, number in parts:
            (loss * number / total).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def error(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest weight."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(left, right, strict=True))


def windows(batches: list[Batch], *sizes: int) -> list[list[Batch]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [batches[start : start + size] for start, size in zip(starts, sizes, strict=True)]


EMPTY = (torch.zeros(0, 6, 5, dtype=torch.float64), torch.zeros(0, 6, dtype=torch.int64))
BATCHES = sentences([8, 3, 5, 8, 1, 8, 2, 8, 8, 4])


@pytest.mark.parametrize("count", ["tensor", "int", None])
def test_an_update_is_the_mean_over_its_targets(count: str | None) -> None:
    expected = by_hand(windows(BATCHES, 4, 4, 2) * 2, count)
    ours, stock = Tagger(count), Tagger(count)
    trainer = train(ours, BATCHES, GradientAccumulation(4), max_epochs=2)
    train(stock, BATCHES, accumulate_grad_batches=4, max_epochs=2)
    assert trainer.global_step == 6
    assert error(weights(ours), expected) < 1e-14
    assert error(weights(stock), expected) > 1e-2


def test_batches_without_targets_change_nothing() -> None:
    batches = [EMPTY, *BATCHES[:2], EMPTY, BATCHES[2], EMPTY, EMPTY, EMPTY, BATCHES[3], EMPTY]
    for count in ("tensor", "int"):
        model = Tagger(count)
        assert model.loss(EMPTY)[0].isnan(), "a mean over nothing"
        train(model, batches, GradientAccumulation(3))
        expected = by_hand([BATCHES[:2], BATCHES[2:3], BATCHES[3:4]], count)
        assert error(weights(model), expected) < 1e-14


def test_a_micro_batch_without_a_loss_is_left_out() -> None:
    class Skipping(Tagger):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            is_skipped = any(batch[0] is BATCHES[number][0] for number in (1, 5))
            return None if is_skipped else super().training_step(batch, batch_idx)

    model = Skipping()
    train(model, BATCHES[:8], GradientAccumulation(3))
    kept = [[BATCHES[0], BATCHES[2]], [BATCHES[3], BATCHES[4]], [BATCHES[6], BATCHES[7]]]
    assert error(weights(model), by_hand(kept)) < 1e-14


def test_a_validation_step_may_call_the_training_step() -> None:
    class Validated(Tagger):
        def validation_step(self, batch: Batch, batch_idx: int) -> Any:
            return self.training_step(batch, batch_idx)

        def val_dataloader(self) -> Any:
            return DataLoader(BATCHES[:3], batch_size=None)  # type: ignore[arg-type]

    model = Validated()
    train(model, BATCHES, GradientAccumulation(4), val_check_interval=1, num_sanity_val_steps=2)
    assert error(weights(model), by_hand(windows(BATCHES, 4, 4, 2))) < 1e-14


def test_a_step_that_raises_leaves_batch_normalization_unchanged() -> None:
    model = Normalized(fails_at=1)
    with pytest.raises(RuntimeError, match="stop"):
        train(model, sentences([4] * 8), GradientAccumulation(4))
    assert "training_step" not in vars(model)
    assert model.norm.momentum == 0.1
    assert torch.equal(model.norm.running_mean, model.before)


def half_precision(precision: Any) -> MixedPrecision:
    """Real autocast, and a real GradScaler for float16, where `Trainer(precision="16-mixed")` silently runs bf16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if precision == "16-mixed" else None
    return MixedPrecision(precision, "cpu", scaler)


def to_float32(batches: list[Batch]) -> list[Batch]:
    return [(x.float(), y) for x, y in batches]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_clips_the_mean(precision: str) -> None:
    expected = by_hand(windows(BATCHES, 4, 4, 2), clip=0.5)
    ours, stock = Tagger().float(), Tagger().float()
    options = {"gradient_clip_val": 0.5}
    train(ours, to_float32(BATCHES), GradientAccumulation(4), plugins=[half_precision(precision)], **options)
    train(stock, to_float32(BATCHES), accumulate_grad_batches=4, plugins=[half_precision(precision)], **options)
    rounding = 2e-3 if precision == "16-mixed" else 1e-2
    assert error([w.double() for w in weights(ours)], expected) < rounding
    assert error([w.double() for w in weights(stock)], expected) > 2 * rounding


def test_float16_skips_the_whole_update_after_one_overflow() -> None:
    class Exploding(Tagger):
        explodes: frozenset[int] = frozenset()

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            explodes = any(torch.equal(batch[0], BATCHES[number][0].float()) for number in self.explodes)
            return {**output, "loss": output["loss"] * (float("inf") if explodes else 1.0)}

    for explodes in ({4}, {5}, {6}):
        model, plugin = Exploding().float(), half_precision("16-mixed")
        model.explodes = frozenset(explodes)
        train(model, to_float32(BATCHES[:9]), GradientAccumulation(3), plugins=[plugin])
        kept = [BATCHES[:3], BATCHES[6:9]] if explodes != {6} else [BATCHES[:3], BATCHES[3:6]]
        assert error([w.double() for w in weights(model)], by_hand(kept)) < 2e-3
        assert plugin.scaler is not None
        assert plugin.scaler.get_scale() == 512


def test_the_logged_loss_stays_the_mean() -> None:
    model = Tagger(lr=0.0)
    trainer = train(model, BATCHES[:4], GradientAccumulation(4))
    losses = torch.stack([model.loss(batch)[0].detach() for batch in BATCHES[:4]])
    torch.testing.assert_close(trainer.callback_metrics["loss"], losses.mean())
    assert "training_step" not in vars(model)
    assert trainer.accumulate_grad_batches == 1
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, DataLoader(BATCHES, batch_size=None))  # type: ignore[arg-type]


class Totals(pl.Callback):
    """What the run says about its length while it runs."""

    def __init__(self, total: Callable[[pl.Trainer], Any] = total_updates) -> None:
        self.total, self.seen = total, set[Any]()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.add(self.total(trainer))


def test_the_factor_follows_from_the_global_batch_size() -> None:
    x, y = torch.cat([x for x, _ in BATCHES]), torch.cat([y for _, y in BATCHES])
    loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    model = Tagger()
    totals = Totals(lambda trainer: (global_batch_size(trainer), total_updates(trainer)))
    train(model, loader, totals, GradientAccumulation(global_batch_size=30), max_epochs=2)
    assert totals.seen == {(30, 4)}
    assert error(weights(model), by_hand([[(x[:30], y[:30])], [(x[30:], y[30:])]] * 2)) < 1e-14
    own = type("Own", (DataLoader,), {"__iter__": lambda loader: DataLoader.__iter__(loader)})(
        loader.dataset, batch_size=10
    )
    with pytest.raises(UserError, match="no multiple of the 10 that all devices process at once; expected 30 or 40"):
        train(Tagger(), own, GradientAccumulation(global_batch_size=35))
    train(model := Tagger(), loader, GradientAccumulation(global_batch_size=35))
    assert error(weights(model), by_hand([[(x[:35], y[:35])], [(x[35:], y[35:])]])) < 1e-14


class Unpacking(Tagger):
    """Takes batches of a class of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.pair, batch_idx)


OPAQUE = [SimpleNamespace(pair=batch) for batch in BATCHES]
SHORT = type("Loader", (), {"__iter__": lambda _: iter(BATCHES[:7]), "__len__": lambda _: 10})()
CHANGES = GradientAccumulationScheduler({0: 4, 1: 1})
REJECTED: dict[str, Callable[[], Any]] = {
    "cannot tell the batch size of the training loader": lambda: train(Tagger(), BATCHES, GradientAccumulation(1, 30)),
    r"Trainer\(accumulate_grad_batches=2\) counts micro-batches": lambda: train(
        Tagger(), BATCHES, GradientAccumulation(2), accumulate_grad_batches=2
    ),
    "GradientAccumulationScheduler changes how many updates an epoch has: pass": lambda: train(
        Tagger(), BATCHES, GradientAccumulation(2), CHANGES
    ),
    "pass one of them": lambda: GradientAccumulation(2, global_batch_size=32),
    "accumulation of 0 micro-batches: expected a whole number above 0": lambda: GradientAccumulation(0),
    "accumulation of 2.5 micro-batches: expected a whole": lambda: GradientAccumulation(2.5),  # type: ignore[arg-type]
    "GradientAccumulationScheduler changes how many updates an epoch has": lambda: train(
        Tagger(), BATCHES, Totals(), CHANGES, max_epochs=2
    ),
}


@pytest.mark.parametrize("message", REJECTED)
def test_what_cannot_be_accumulated_is_rejected_with_the_reason(message: str) -> None:
    with pytest.raises(UserError, match=message):
        REJECTED[message]()


def test_updates_of_another_size_than_the_checkpoints_are_named(caplog: pytest.LogCaptureFixture) -> None:
    GradientAccumulation(2).load_state_dict(GradientAccumulation(4).state_dict())
    assert "found steps=4, global_batch_size=None in the checkpoint and has steps=2" in caplog.text


def test_fewer_batches_than_announced_are_all_trained() -> None:
    train(model := Tagger(), SHORT, GradientAccumulation(3))
    assert error(weights(model), by_hand(windows(BATCHES, 3, 3, 1))) < 1e-14


def test_batches_whose_targets_nobody_can_count_end_the_run() -> None:
    with pytest.raises(UserError, match="cannot tell how many samples a batch of type SimpleNamespace holds"):
        train(Unpacking(None), OPAQUE, GradientAccumulation(2))


def test_a_step_that_counts_its_targets_takes_any_batch_class() -> None:
    train(model := Unpacking(), OPAQUE, GradientAccumulation(11))
    assert error(weights(model), by_hand([BATCHES])) < 1e-14


def two_ranks() -> dict[str, Any]:
    """On each of two processes: uneven counts, an empty batch, several factors; then a layer that changes by itself."""
    mine, answers = SHARES[int(os.environ["RANK"])], {"said": (said := list[str]())}
    first_update.warn = said.append
    for name in ("one", "four", "samples", "clipped", "stream"):
        model = Tagger(None if name == "samples" else "tensor")
        accumulation = GradientAccumulation(1 if name == "one" else 4)
        clip = 0.1 if name == "clipped" else None
        train(model, Stream(mine) if name == "stream" else mine, accumulation, world_size=2, gradient_clip_val=clip)
        answers[name] = weights(model)
    nn.utils.parametrizations.spectral_norm((model := Tagger()).layer)
    train(model, mine, GradientAccumulation(4), world_size=2)
    return answers


SHARES = (
    [*sentences([4, 3, 2, 4, 1, 2], seed=1), EMPTY],
    [*sentences([1, 4, 4, 2, 3], seed=2), EMPTY, *sentences([1], 3)],
)


def test_two_ranks_with_uneven_batches_step_as_one_large_batch() -> None:
    first, second = run_ranks(two_ranks, 2)
    assert sum("weight.0._u changes with each micro-batch: the bits" in line for line in first["said"]) == 1
    pairs = [list(pair) for pair in zip(*SHARES, strict=True)]
    by_fours = [list(chain(*pairs[:4])), list(chain(*pairs[4:]))]
    expected = {
        "one": by_hand(pairs),
        "four": by_hand(by_fours),
        "stream": by_hand(by_fours),
        "samples": by_hand(by_fours, count=None),
        "clipped": by_hand(by_fours, clip=0.1),
    }
    for name, wanted in expected.items():
        assert error(first[name], wanted) < 1e-14, name
        assert all(torch.equal(a, b) for a, b in zip(first[name], second[name], strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2},
        {"max_epochs": -1, "max_steps": 5},
        {"max_epochs": 3, "max_steps": 7},
        {"max_epochs": 3, "limit_train_batches": 5},
        {"max_epochs": 2, "accumulate_grad_batches": 4},
    ],
)
def test_the_total_of_updates_is_what_the_run_makes(options: dict[str, Any]) -> None:
    ours = [] if "accumulate_grad_batches" in options else [GradientAccumulation(4)]
    trainer = train(Tagger(), BATCHES, totals := Totals(), *ours, **options)
    assert totals.seen == {trainer.global_step}


def test_a_total_is_rejected_before_the_loader_exists() -> None:
    class Hasty(Tagger):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            total_updates(self.trainer)
            return super().configure_optimizers()

    with pytest.raises(RuntimeError, match="before the training loader exists"):
        train(Hasty(), BATCHES, max_epochs=2)


def test_a_run_without_end_has_no_finite_total() -> None:
    class Stop(Totals):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = True

    train(Tagger(), BATCHES, stop := Stop(), max_epochs=-1)
    assert stop.seen == {math.inf}
    train(Tagger(), Stream(BATCHES), stop := Stop(), max_epochs=2)
    assert stop.seen == {math.inf}


def test_the_epoch_that_measures_batch_norm_makes_no_update() -> None:
    def run(*callbacks: pl.Callback, **options: Any) -> tuple[int, bool, Tensor]:
        averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
        batches = sentences([4] * 6)
        trainer = train(model := Normalized(), batches, *callbacks, averaging, max_epochs=3, **options)
        average: Any = averaging._average_model
        is_average = all(torch.equal(a, b) for a, b in zip(model.parameters(), average.parameters(), strict=True))
        return trainer.global_step, is_average, model.norm.running_mean

    steps, is_average, mean = run(accumulate_grad_batches=2)
    assert (steps, is_average) == (10, False), "Lightning makes one, with the gradients of the last epoch"
    own_steps, own_is_average, own_mean = run(GradientAccumulation(2))
    assert (own_steps, own_is_average) == (9, True)
    assert torch.equal(own_mean, mean)
