"""What depends on the number of devices or on a resume is noted in the first update: moved weights, unseeded noise."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callbacks import ExactCheckpoint, GradientAccumulation, SeedControl
from datamodules.errors import UserError
from tests.callbacks.test_updates import Line, train
from tests.support.ranks import run_ranks

MOVED = "network.1.weight (the first of 2 parameters) changes with each micro-batch"
UNSEEDED = "draws random numbers without SeedControl"


class Teaching(Line):
    """A student, and a teacher that is moved towards it in some way, at some place."""

    def __init__(self, way: str, place: str = "training_step") -> None:
        torch.manual_seed(5)
        student = nn.Linear(3, 1).double()
        teacher = copy.deepcopy(student) if way == "lerp" else nn.Linear(3, 1).double()
        super().__init__(nn.ModuleList([student, teacher.requires_grad_(False)]))
        self.way = way
        move = getattr(self, place)

        def moving(*args: Any) -> Any:
            self.move_teacher()
            return move(*args)

        setattr(self, place, moving)

    @torch.no_grad()
    def move_teacher(self) -> None:
        for old, new in zip(self.network[1].parameters(), self.network[0].parameters(), strict=True):  # type: ignore
            if self.way == "lerp":  # Of equal weights the first one changes nothing.
                old.lerp_(new, 0.1)
            elif self.way == "assigned":
                old.data = 0.9 * old.data + 0.1 * new.data
            else:
                old.data.mul_(0.9).add_(new.data, alpha=0.1)

    def loss(self, batch: Any) -> Tensor:
        student, teacher = self.network  # type: ignore[misc]
        return nn.functional.mse_loss(student(batch[0]), teacher(batch[0].flip(0)))


def _notes(world_size: int, model: Line, **options: Any) -> str:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_recipes").addHandler(handler)
    options |= {"world_size": world_size, "use_distributed_sampler": True}
    train(model, SeedControl(1), GradientAccumulation(global_batch_size=4), **options)
    return "\n".join(records)


def _of_teachers(world_size: int) -> list[str]:
    return [_notes(world_size, Teaching(way)) for way in ("lerp", "assigned", "in place on data")]


def test_a_parameter_that_a_step_moves_is_noted() -> None:
    first, _ = run_ranks(_of_teachers, 2, 2)
    for notes in [*first, *_of_teachers(1)[:2]]:
        assert MOVED in notes
        assert "once per update, in on_train_batch_end" in notes


@pytest.mark.parametrize(("place", "is_noted"), [("on_train_batch_start", True), ("on_train_batch_end", False)])
def test_a_hook_of_micro_batches_that_moves_weights_is_noted(place: str, is_noted: bool) -> None:
    assert (MOVED in _notes(1, Teaching("lerp", place))) == is_noted


class Noisy(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch[0] + torch.randn_like(batch[0]), batch[1]))


def _unseeded(world_size: int, *callbacks: Any, **options: Any) -> Any:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_recipes").addHandler(handler)
    for kind in (Noisy, Line):
        records.append(kind.__name__)
        train(kind(), GradientAccumulation(1), *callbacks, world_size=world_size, **options)
    return "\n".join(records)


def test_unseeded_random_numbers_are_noted_if_they_must_repeat(tmp_path: Path) -> None:
    assert UNSEEDED not in _unseeded(1)
    train(Line(), ExactCheckpoint(tmp_path, save_last=True))
    resume: dict[str, Any] = {"resume": tmp_path / "last.ckpt", "max_epochs": 2}
    assert [UNSEEDED in notes for notes in _unseeded(1, **resume).split("Line")] == [True, False]
    first, _ = run_ranks(_unseeded, 2, 2, use_distributed_sampler=True)
    assert [UNSEEDED in notes for notes in first.split("Line")] == [True, False]
    assert UNSEEDED not in _unseeded(1, SeedControl(1), **resume)


class Centered(Line):
    """Shares its center between the devices in each micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        center = batch[0].mean()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(center)
        return self.loss((batch[0] - center, batch[1]))


def _centered(samples_of_update: int) -> str:
    options: dict[str, Any] = {"world_size": 2, "use_distributed_sampler": True}
    try:
        train(Centered(), GradientAccumulation(global_batch_size=samples_of_update), **options)
    except UserError as error:
        return str(error)
    return ""


def test_a_collective_in_an_uneven_update_ends_the_run() -> None:
    message = "Centered.training_step calls torch.distributed.all_reduce, which waits for all devices"
    first, second = run_ranks(_centered, 2, 6, timeout=300)  # Updates of 3 and 1 micro-batches of 2 samples.
    assert first.startswith(message)
    assert first == second
    assert run_ranks(_centered, 2, 4) == ["", ""]


class Remembering(Line):
    """Computes with a number and a bank that no checkpoint holds."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.persistent = persistent
        self.rate = 1.0
        self.register_buffer("bank", torch.zeros(2), persistent=persistent)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rate *= 0.9
        self.bank += 1
        return self.loss(batch) * self.rate + self.bank.sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rate"] = self.rate

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.persistent:
            self.rate = checkpoint["rate"]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_that_no_checkpoint_holds_is_noted_at_a_resume(
    persistent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = SeedControl(1), ExactCheckpoint(tmp_path, save_last=True)
    train(Remembering(persistent), *callbacks)
    assert not caplog.text
    train(Remembering(persistent), *callbacks, resume=tmp_path / "last.ckpt", max_epochs=2)
    lost = "rate (the first of 2) of Remembering had another value when the run was saved"
    assert (lost in caplog.text) == (not persistent)


class Baseline(Line):
    """Moves a number in each micro-batch, as a baseline of rewards."""

    value: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.value = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.value = loss.detach() if self.value is None else 0.9 * self.value + 0.1 * loss.detach()
        return loss / self.value


def _of_baseline(world_size: int) -> str:
    return _notes(world_size, Baseline())


def test_a_number_that_a_step_moves_is_noted_on_several_devices() -> None:
    first, _ = run_ranks(_of_baseline, 2, 2)
    assert "note: value changes with each micro-batch: if the training depends on it" in first
