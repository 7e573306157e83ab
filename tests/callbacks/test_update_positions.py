"""Where a run goes on: with loaders of other kinds, with other callbacks, on other ranks, and where it over-fits."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import override

from callbacks import ExactCheckpoint, GradientAccumulation, Preemption, SeedControl
from datamodules.errors import UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import equal, quiet_trainer

BATCHES = 8


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2 * BATCHES, 3, generator=generator), torch.randn(2 * BATCHES, 1, generator=generator)


class Model(pl.LightningModule):
    """A linear layer behind dropout; it keeps which targets it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.network = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[1].flatten().tolist())
        return F.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream:
    """Batches without a length, with a position."""

    def __init__(self) -> None:
        self.position = 0
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = samples()
        start, self.start = self.start, 0
        for batch in range(start, BATCHES):
            self.position = batch + 1
            rows = slice(2 * batch, 2 * batch + 2)
            yield inputs[rows], targets[rows]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.position = state["position"]


class Sized(Stream):
    def __len__(self) -> int:
        return BATCHES


def stock(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples()), 2, shuffle=True, **options)


@pytest.mark.parametrize("kind", [Stream, Sized])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_loader_with_a_position_goes_on_to_the_bit(kind: type[Stream], steps: int, tmp_path: Path) -> None:
    def run(name: str, resumed: Path | None = None) -> Model:
        seeds, model = SeedControl(1), Model()
        saves = ExactCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = quiet_trainer(seeds, GradientAccumulation(steps), saves)
        trainer.fit(model, kind(), ckpt_path=resumed, weights_only=True if resumed else None)
        return model

    whole = run("whole")
    resumed = run("resumed", tmp_path / "whole" / "step=2.ckpt")
    assert resumed.seen == whole.seen[2 * steps :]
    assert equal(resumed.state_dict(), whole.state_dict())


def _cut(world_size: int, folder: Path, resumed: Path | None, accumulates: bool) -> Any:
    """A run that Lightning's own callback saves within its epoch; what is said instead where it does not go on."""
    callbacks: list[pl.Callback] = [SeedControl(1), *([GradientAccumulation(2)] if accumulates else [])]
    saves = ModelCheckpoint(folder / str(world_size), filename="{step}", every_n_train_steps=2, save_top_k=-1)
    model = Model()
    options: dict[str, Any] = {"world_size": world_size, "use_distributed_sampler": True}
    try:
        quiet_trainer(*callbacks, saves, **options).fit(model, stock(), ckpt_path=resumed)
    except ValueError as error:
        return str(error)
    return model.state_dict()


def test_a_stock_checkpoint_on_other_ranks_resumes_or_says_why(tmp_path: Path) -> None:
    """Without an update of one size, 2 updates of one device are 1 of two devices."""
    saved = tmp_path / "1" / "step=2.ckpt"
    _cut(1, tmp_path, None, accumulates=False)
    for said in run_ranks(_cut, 2, 2, tmp_path, saved, accumulates=False, timeout=60):
        assert "saved within an epoch, after 2 updates, and with the devices and batches of now 1 have" in said
    saved.unlink()
    (whole,) = run_ranks(_cut, 1, 1, tmp_path, None, accumulates=True)
    for found in run_ranks(_cut, 2, 2, tmp_path, saved, accumulates=True, timeout=60):
        assert equal(found, whole)


def test_a_second_fit_has_nothing_of_callbacks_that_were_removed() -> None:
    def second(*before: pl.Callback) -> Model:
        trainer: Any = quiet_trainer(*before)
        trainer.fit(Model(), stock())
        trainer.callbacks = [callback for callback in trainer.callbacks if callback not in before]
        trainer.callbacks.append(GradientAccumulation(2))
        trainer.fit_loop.max_epochs = 2
        model = Model()
        trainer.fit(model, stock())
        assert trainer.fit_loop.epoch_loop.watches_sigterm
        return model

    assert equal(second(SeedControl(3), Preemption()).state_dict(), second(GradientAccumulation(2)).state_dict())


@pytest.mark.parametrize("share", [2, 0.5])
def test_over_fitting_a_shuffled_loader_keeps_its_order(share: float) -> None:
    model = Model()
    quiet_trainer(GradientAccumulation(2), overfit_batches=share, max_epochs=2).fit(model, stock())
    batches = [batch.flatten().tolist() for batch in samples()[1].split(2)]
    assert model.seen == batches[:4] * 2


def _of_two_loaders(world_size: int) -> dict[str, Tensor]:
    """An update whose micro-batches are pairs, one fewer than ranks."""

    class Pairs(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return sum((F.mse_loss(self.network(inputs), targets) for inputs, targets in batch), torch.zeros(()))

    model = Pairs().double()
    model.network[0].p = 0.0  # type: ignore[assignment]
    trainer = quiet_trainer(GradientAccumulation(1), world_size=world_size)
    inputs, targets = (values.double() for values in samples())
    rows = torch.arange(8)
    trainer.fit(model, [TrainLoader(inputs, targets, rows, 4, 1, trainer.global_rank, world_size) for _ in range(2)])
    return model.state_dict()


def test_a_stand_in_of_several_loaders_counts_for_nothing() -> None:
    model = Model().double()
    inputs, targets = (values[:8].double() for values in samples())
    (2 * F.mse_loss(model.network[1](inputs), targets)).backward()
    wanted = [parameter.detach() - 0.1 * parameter.grad for parameter in model.parameters()]  # type: ignore[operator]
    for found in run_ranks(_of_two_loaders, 3, 3):
        for mine, expected in zip(found.values(), wanted, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)


class Endless(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([*zip(*samples(), strict=True)])


@pytest.mark.parametrize(("steps", "validated"), [(1, [3, 6]), (2, [3])])
def test_a_stream_is_validated_at_an_interval_of_updates(steps: int, validated: list[int]) -> None:
    class Validated(Model):
        def __init__(self) -> None:
            super().__init__()
            self.validated: list[int] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(self.global_step)

    model = Validated()
    trainer = quiet_trainer(GradientAccumulation(steps), val_check_interval=3, limit_val_batches=1)
    trainer.fit(model, DataLoader(Endless(), 2), stock())
    assert model.validated == validated


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"])
def test_a_stop_as_an_epoch_begins_comes_after_its_first_update(hook: str) -> None:
    def stop(self: Any, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 1

    trainer = quiet_trainer(GradientAccumulation(2), type("Stop", (pl.Callback,), {hook: stop})(), max_epochs=3)
    trainer.fit(Model(), stock())
    assert trainer.global_step == BATCHES // 2 + 1


def test_a_run_that_counted_micro_batches_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    trainer = quiet_trainer(GradientAccumulation(2))
    trainer.fit(model := Model(), stock())
    trainer.save_checkpoint(path)
    state = {"asked": {"steps": 2, "global_batch_size": None}, "items": 4, "samples": None}
    torch.save(torch.load(path, weights_only=False) | {"callbacks": {"GradientAccumulation": state}}, path)
    again = quiet_trainer(GradientAccumulation(2), max_epochs=2)
    with pytest.raises(UserError, match="counted micro-batches.*start a new run from its weights"):
        again.fit(model, stock(), ckpt_path=path, weights_only=True)
    model.validation_step = lambda *_: None  # type: ignore[method-assign]
    again.validate(model, stock(), ckpt_path=path, weights_only=True)


class Logs(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Only takes the time in which a checkpoint may be written."""


class Steps(CSVLogger):
    """Keeps the steps at which something is logged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.steps: list[int | None] = []

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.steps.append(step)


@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_validation_batch_end", "on_update_end", "on_train_epoch_end"]
)
def test_a_resumed_run_logs_at_the_steps_of_the_whole_one(hook: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"

    def save(self: Any, trainer: Any, *_: Any) -> None:
        if not path.exists() and trainer.global_step >= 2:
            trainer.save_checkpoint(path)

    saves = type("Saves", (pl.Callback,), {hook: save})
    logged = []
    for resumed in (None, path):
        trainer = quiet_trainer(
            SeedControl(1),
            GradientAccumulation(2),
            saves(),
            max_epochs=2,
            logger=Steps(tmp_path),
            log_every_n_steps=1,
            val_check_interval=2,
            limit_val_batches=2,
        )
        trainer.fit(Logs(), stock(), stock(), ckpt_path=resumed, weights_only=None if resumed is None else True)
        logged.append(trainer.logger.steps)
    whole, rest = logged
    assert whole == list(range(2 * BATCHES // 2))
    assert rest == whole[4 if hook == "on_train_epoch_end" else 2 :]


class Pairs(Model):
    """Takes a collection of batches, and has no noise."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(3, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch
        return sum((F.mse_loss(self.network(x), y) for x, y in parts), torch.zeros(()))


def loader_of(rows: range) -> TrainLoader:
    inputs, targets = (values.double() for values in samples())
    return TrainLoader(inputs, targets, torch.tensor(rows), 2, seed=1, shuffle=False)


def _with_a_dict_of_loaders(steps: int, world_size: int) -> dict[str, Tensor]:
    model = Pairs().float()
    trainer = quiet_trainer(SeedControl(1), GradientAccumulation(steps), world_size=world_size)
    inputs, targets = samples()
    rank = trainer.global_rank
    halves = {"first": torch.arange(8), "second": torch.arange(8, 16)}
    trainer.fit(
        model, {name: TrainLoader(inputs, targets, rows, 2, 1, rank, world_size) for name, rows in halves.items()}
    )
    return model.state_dict()


def test_several_loaders_are_equal_on_two_ranks() -> None:
    (whole,) = run_ranks(_with_a_dict_of_loaders, 1, 2, 1)
    for found in run_ranks(_with_a_dict_of_loaders, 2, 1, 2):
        assert equal(found, whole)


@pytest.mark.parametrize("collect", [list, lambda loaders: dict(enumerate(loaders)), CombinedLoader])
def test_several_loaders_make_updates_of_their_micro_batches(collect: Any) -> None:
    halves = range(8), range(8, 16)
    model = Pairs()
    expected = copy.deepcopy(model)
    trainer = quiet_trainer(SeedControl(1), GradientAccumulation(2))
    trainer.fit(model, collect([loader_of(half) for half in halves]))
    assert trainer.global_step == 2
    inputs, targets = (values.double() for values in samples())
    for update in (slice(0, 4), slice(4, 8)):
        parts = [(inputs[half][update], targets[half][update]) for half in (slice(0, 8), slice(8, 16))]
        expected.zero_grad()
        expected.training_step(parts, 0).backward()
        for parameter in expected.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.1 * parameter.grad
    for mine, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def test_loaders_with_unequal_micro_batch_counts_are_rejected() -> None:
    loaders = [loader_of(range(8)), loader_of(range(10))]
    with pytest.raises(UserError, match="the training loaders have 1 and 2 micro-batches in one update"):
        quiet_trainer(GradientAccumulation(2)).fit(Pairs(), loaders)


def test_a_loader_without_the_checkpoints_position_is_rejected(tmp_path: Path) -> None:
    class Positionless(DataLoader[Any]):
        """A loader with an order of its own, as a library's may be on several devices."""

        def __iter__(self) -> Any:
            return iter([samples()])

    saves = ExactCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet_trainer(SeedControl(1), saves).fit(Model(), stock())
    with pytest.raises(UserError, match=r"positions of 1 training loaders, and here 0 of 1 \(Positionless\) have one"):
        loader = Positionless(TensorDataset(*samples()), 2)
        quiet_trainer(SeedControl(1), saves).fit(Model(), loader, ckpt_path=tmp_path / "step=2.ckpt")
