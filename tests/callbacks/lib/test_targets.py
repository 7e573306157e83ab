from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from callbacks import GradientAccumulation, TrainLoss
from callbacks.lib.targets import TargetCounter, as_count
from datamodules.errors import UserError
from tests.callbacks.test_updates import Line, assert_close, by_hand, samples, weights
from tests.support.tables import quiet_trainer, sentences

COUNTS = {
    "an int": 3,
    "a float": 3.0,
    "a NumPy number": np.int32(3),
    "an array of one": np.array([3]),
    "a scalar tensor": torch.tensor(3),
    "a tensor of one": torch.tensor([[3.0]], requires_grad=True),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_a_count_of_any_shape_that_holds_one_number_is_it(kind: str) -> None:
    assert as_count(COUNTS[kind]) == 3.0
    assert TargetCounter().count({"loss": torch.zeros(()), "count": COUNTS[kind]}, None, samples=8) == 3.0


@pytest.mark.parametrize(
    "value", [torch.ones(4), torch.ones(0), "3", np.ones(2), -1, torch.tensor(-1), [3], float("nan")]
)
def test_what_is_no_number_of_targets_is_rejected(value: Any) -> None:
    with pytest.raises(UserError, match=r"the `count` of a micro-batch is .*: expected one number"):
        TargetCounter().count({"loss": torch.zeros(()), "count": value}, None, samples=8)


def test_a_count_is_taken_from_function_then_step_then_loader() -> None:
    output = {"loss": torch.zeros(()), "count": 5}
    assert TargetCounter(len).count(output, [1, 2, 3], samples=8) == 3
    assert TargetCounter().count(output, [1, 2, 3], samples=8) == 5
    assert TargetCounter().count(torch.zeros(()), [1, 2, 3], samples=8) == 8


@pytest.mark.parametrize(("count", "expected"), [(None, 1), (3, 0)])
def test_labels_of_minus_100_without_a_count_are_warned_of(count, expected, caplog):
    output = torch.zeros(()) if count is None else {"loss": torch.zeros(()), "count": count}
    counter = TargetCounter()
    assert [counter.count(output, sentences(4), samples=4) for _ in range(2)] == [count or 4] * 2
    assert caplog.text.count("labels of -100") == expected


class Untouchable:
    """A batch that nobody may look into."""

    def __getattribute__(self, name: str) -> Any:
        assert name == "__class__", f"the library read {name} of a foreign batch"
        return super().__getattribute__(name)


BATCHES = {
    "tensors": ((torch.zeros(4, 3), torch.zeros(4)), 0),
    "a mapping": ({"x": torch.zeros(4, 3), "names": ["a", "b", "c", "d"]}, 0),
    "time first, with labels": ((torch.zeros(7, 4, 3), torch.zeros(4)), 0),
    "time first alone": (torch.zeros(7, 4, 3), 1),
    "a list of images": ((list(torch.zeros(4, 3, 5, 5)), torch.zeros(4)), 0),
    "points of all samples": ({"points": torch.zeros(90, 3), "sample": torch.zeros(90)}, 1),
    "a class of somebody": (Untouchable(), 0),
}


@pytest.mark.parametrize("name", BATCHES)
def test_tensors_of_other_lengths_than_were_dealt_are_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    batch, expected = BATCHES[name]
    counter = TargetCounter()
    assert [counter.count(torch.zeros(()), batch, samples=4) for _ in range(3)] == [4] * 3
    assert caplog.text.count("the loader dealt 4 samples, and the batch has tensors of length") == expected
    TargetCounter().count({"loss": torch.zeros(()), "count": 4}, batch, samples=4)
    assert caplog.text.count("the loader dealt") == expected


LOSSES = {
    "weighted by class": ({"weight": torch.tensor([1.0, 20.0])}, "weighted by class"),
    "summed": ({"reduction": "sum"}, "is a sum"),
    "a mean": ({}, ""),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_whose_graph_shows_another_mean_is_warned_of(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    options, expected = LOSSES[kind]
    logits = torch.zeros(4, 2, requires_grad=True)
    loss = nn.functional.cross_entropy(logits, torch.tensor([0, 1, 1, 0]), **options)
    TargetCounter().count(loss, logits, 4, loss)
    assert (expected in caplog.text) if expected else not caplog.text


class Images(Line):
    """Batches are lists of images of several sizes, here all of 4 channels, as many as samples of a batch."""

    counts = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, targets = batch
        loss = self.loss((torch.stack([image.mean((1, 2)) for image in images]), targets))
        return {"loss": loss, "count": len(images)} if self.counts else loss


def collate(rows: list[Any]) -> Any:
    images = [inputs[:, None, None].expand(3, 2, 2) for inputs, _ in rows]
    return images, torch.stack([targets for _, targets in rows])


@pytest.mark.parametrize("counts", [False, True])
def test_a_list_of_images_weighs_by_its_samples(counts: bool, caplog: pytest.LogCaptureFixture) -> None:
    rows = list(zip(*samples(8), strict=True))
    model = Images()
    model.counts = counts
    trainer: pl.Trainer = quiet_trainer(GradientAccumulation(3), TrainLoss())
    trainer.fit(model, DataLoader(rows, 3, collate_fn=collate))  # 3, 3 and 2 samples.
    assert not caplog.text
    assert_close(weights(model), by_hand([range(8)]))
