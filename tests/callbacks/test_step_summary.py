"""The costs of a step that are printed before training are those of a real one, and counting them changes nothing."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from callbacks.lib.sample_noise import number_layers, sample_noise
from callbacks.lib.stateless_dropout import StatelessDropout
from callbacks.lib.step_cost import step_cost, storage_bytes
from callbacks.step_summary import StepSummary, optimizer_bytes, summary_rows
from tests.support.tables import CLASSES, QUIET, noisy_images, silence

SETTINGS = QUIET | {"max_epochs": 1, "enable_progress_bar": False, "enable_checkpointing": False}
BATCH = noisy_images(6)


class Model(pl.LightningModule):
    """What a step of the users' does: it logs, keeps a metric, drops, normalises, and reads a number off its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.network = nn.ModuleDict({"body": body, "head": nn.Linear(100, CLASSES)}).double()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        assert targets.max().item() < CLASSES
        hidden = F.dropout(self.network["body"](images), 0.5)
        loss = F.cross_entropy(self.network["head"](hidden * random.uniform(0.9, 1.1)), targets)
        self.metric.update(loss.detach())
        self.log("loss", loss.detach(), on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ReadsItsOutput(Model):
    """A step that fake tensors cannot make."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1e6 else loss * 0


def test_flops_are_those_of_the_formula_forward_and_backward() -> None:
    cost = step_cost(Model(), BATCH)
    layers = {layer.name: layer for layer in cost.layers}
    convolution, head = 2 * 6 * 4 * 25 * 9, 2 * 6 * 100 * CLASSES
    assert (cost.forward_flops, cost.backward_flops) == (convolution + head, convolution + 2 * head)
    assert layers["network.body.0"].forward_flops == layers["network.body"].forward_flops == convolution
    # The first layer needs no gradient of its input.
    assert layers["network.body.0"].backward_flops == convolution
    assert (layers["network.head"].forward_flops, layers["network.head"].backward_flops) == (head, 2 * head)
    assert layers["network.body.0"].output == (6, 4, 5, 5)


def test_activations_are_what_a_real_step_keeps() -> None:
    model, kept = Model(), []
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    vars(model)["log"] = lambda *_, **__: None

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = Model.training_step(model, BATCH, 0)
    assert step_cost(Model(), BATCH).activation_bytes == storage_bytes(kept) > 0
    assert loss.requires_grad


def everything(model: Model) -> list[Any]:
    """What a step may change: weights, statistics, gradients, the metric and random numbers."""
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), model.metric.mean_value]
    generators = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    return [*(None if tensor is None else tensor.tolist() for tensor in tensors), *generators, model.training]


def test_counting_changes_nothing() -> None:
    model = Model()
    before = everything(model)
    step_cost(model, BATCH)
    assert everything(model) == before


def test_the_step_that_follows_draws_the_noise_of_a_first_call() -> None:
    model = Model()
    model.network["body"].append(StatelessDropout(0.5))
    number_layers(model)
    outputs = []
    for counted in (False, True):
        with sample_noise(1, 0, torch.arange(6)):
            if counted:
                step_cost(model, BATCH)
            outputs.append(model.network["body"](BATCH[0]))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adam(p, amsgrad=True),
    ],
)
def test_the_state_of_an_optimiser_is_known_before_its_first_step(make: Any) -> None:
    model = nn.Linear(30, 20)
    optimizer = make(model.parameters())
    before, steps = optimizer_bytes(optimizer), []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    assert (optimizer.state, steps) == ({}, [])
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    state = [value for state in optimizer.state.values() for value in state.values()]
    assert before == sum(value.nbytes for value in state if isinstance(value, Tensor) and value.numel() > 1)
    assert optimizer_bytes(optimizer) >= before


@pytest.mark.parametrize("kind", [Model, ReadsItsOutput])
def test_a_run_is_the_same_to_the_bit_with_the_summary(kind: type[Model], capsys: pytest.CaptureFixture[str]) -> None:
    silence()
    weights = []
    for callbacks in ([], [StepSummary()]):
        torch.manual_seed(1)
        random.seed(1)
        model = kind()
        trainer = pl.Trainer(callbacks=callbacks, **SETTINGS)
        trainer.fit(model, DataLoader(TensorDataset(*noisy_images(20)), 5))
        weights.append([*model.state_dict().values(), trainer.callback_metrics["loss"]])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    (summary,) = callbacks
    parts = sum(size for name, size in summary.estimate.items() if name != "total")
    assert summary.estimate["total"] == parts > 0
    assert summary.estimate["optimizer"] == 2 * summary.estimate["gradients"]
    out = capsys.readouterr().out
    assert ("body: Sequential" in out) == (kind is Model)
    assert ("not known" in out) == (kind is ReadsItsOutput)


class Manual(Model):
    """Updates its weights itself, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.updates: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.updates.append(1))
        return optimizer


def test_a_step_that_updates_the_weights_itself_is_not_tried(capsys: pytest.CaptureFixture[str]) -> None:
    silence()
    model = Manual()
    trainer = pl.Trainer(callbacks=[StepSummary()], **SETTINGS)
    trainer.fit(model, DataLoader(TensorDataset(*noisy_images(20)), 5))
    assert (len(model.updates), trainer.global_step) == (4, 4)
    assert "not known (a step with manual optimisation" in capsys.readouterr().out


def test_the_table_ends_at_its_depth() -> None:
    cost = step_cost(Model(), BATCH)
    names = [row["layer"].strip() for row in summary_rows(cost, 2)]
    assert names == ["body: Sequential", "head: Linear", "the training step"]
    assert "0: Conv2d" in [row["layer"].strip() for row in summary_rows(cost, -1)]
