"""Gradients that a module makes or keeps itself are rejected in each update, and those that it changes are honoured."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from callbacks import GradientAccumulation
from datamodules import UserError
from tests.callbacks.test_updates import Line, assert_close, by_hand, samples, train, weights
from tests.support.ranks import run_ranks


class LatePenalty(Line):
    """Adds a penalty by a backward pass of its own, from the second update on, as lazy regularization does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.network.weight.square().sum().backward()
        return self.loss(batch)


class Attacked(Line):
    """Takes the gradient of its inputs by a backward pass, as adversarial training does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        self.loss((inputs, batch[1])).backward()
        return self.loss((inputs.detach() + 0.1 * inputs.grad.sign(), batch[1]))


@pytest.mark.parametrize(("kind", "steps"), [(LatePenalty, 2), (Attacked, 2), (Attacked, 1)])
def test_a_backward_pass_in_any_step_is_rejected(kind: type[Line], steps: int) -> None:
    with pytest.raises(UserError, match=rf"{kind.__name__}.training_step calls backward\(\) itself.*autograd.grad"):
        train(kind(), GradientAccumulation(steps))


def _late_penalty(world_size: int) -> str:
    with pytest.raises(UserError) as error:
        accumulation = GradientAccumulation(global_batch_size=4)
        train(LatePenalty(), accumulation, world_size=world_size, use_distributed_sampler=True)
    return str(error.value)


def test_a_backward_pass_in_any_step_is_rejected_on_two_ranks() -> None:
    for message in run_ranks(_late_penalty, 2, 2):
        assert "LatePenalty.training_step calls backward() itself" in message


class Touches(Line):
    """Changes in its step the gradients that Lightning has not yet zeroed."""

    def __init__(self, action: str) -> None:
        super().__init__()
        self.action = action

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.action == "clips":
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        elif self.action == "zeroes":
            self.zero_grad()
        return self.loss(batch)


def _touched(world_size: int) -> list[list[Tensor]]:
    options: dict[str, Any] = {"world_size": world_size, "use_distributed_sampler": True}
    accumulation = [GradientAccumulation(global_batch_size=4) for _ in range(3)]
    return [weights(train(Touches(action), accumulation.pop(), **options)) for action in ("nothing", "clips", "zeroes")]


def test_a_gradient_that_a_step_touches_is_no_backward_pass() -> None:
    alone = _touched(1)
    for found in [alone, *run_ranks(_touched, 2, 2)]:
        for mine in found:
            assert all(map(torch.equal, mine, alone[0]))


class Inspects(Line):
    """Reads in `on_before_zero_grad` the gradients of the update before, as Lightning leaves them there."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.found = [parameter.grad for parameter in self.parameters()]


def test_gradients_of_the_last_update_exist_before_zeroing() -> None:
    model = train(Inspects(), GradientAccumulation(2))
    first = Line()
    inputs, targets = samples(8)
    first.loss((inputs[:4], targets[:4])).backward()
    assert_close(model.found, [parameter.grad for parameter in first.parameters()])  # type: ignore[misc]


class AttackedBySum(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss((inputs, batch[1])), inputs)
        return self.loss((inputs.detach() + 0.1 * gradient.sign(), batch[1]))


def test_gradients_of_inputs_are_allowed() -> None:
    alone = train(AttackedBySum(), GradientAccumulation(1), size=4)
    assert_close(weights(train(AttackedBySum(), GradientAccumulation(2))), weights(alone))


class Keeps(Line):
    """Accumulates over two updates in its own way."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Zeroes(Line):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def test_gradients_kept_from_another_update_are_rejected() -> None:
    with pytest.raises(UserError, match="Keeps.optimizer_zero_grad keeps gradients of another update"):
        train(Keeps(), GradientAccumulation(2))
    assert_close(weights(train(Zeroes(), GradientAccumulation(2))), by_hand([range(4), range(4, 8)]))


class Repaired(Line):
    """One micro-batch has a gradient of NaN, which the module replaces."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        is_third = bool((batch[0][0] == self.third).all())
        return loss + 0 * torch.sqrt(0 * self.network.weight.sum()) if is_third else loss

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0.0)


@pytest.mark.parametrize(("steps", "size"), [(2, 2), (1, 4)])
def test_a_gradient_that_a_module_repairs_is_that_of_the_update(steps: int, size: int) -> None:
    model = Repaired()
    model.third = samples(8)[0][4]
    train(model, GradientAccumulation(steps), size=size)
    first = by_hand([range(4)])
    assert torch.equal(model.network.weight, first[0]), "of the second update nothing is left"
    assert_close(weights(model)[1:], by_hand([range(4), range(4, 8)])[1:])


class OwnBackward(Line):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


def _notes(world_size: int) -> str:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_recipes").addHandler(handler)
    train(OwnBackward(), GradientAccumulation(2), world_size=world_size)
    return "\n".join(records)


def test_several_devices_say_when_a_backward_of_the_module_runs() -> None:
    assert "OwnBackward.backward runs for each micro-batch" in run_ranks(_notes, 2, 2)[0]
    assert "OwnBackward" not in _notes(1)
