from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import GradientAccumulation, TrainLoss
from callbacks.lib.targets import TargetCounter, count_targets, warn_of_ignored_targets
from tests.callbacks.test_updates import Line, assert_close, by_hand, samples, weights
from tests.support.tables import quiet_trainer, sentences


@pytest.mark.parametrize(("count", "expected"), [(None, 1), (3, 0)])
def test_labels_of_minus_100_without_a_count_are_warned_of(count, expected, caplog):
    output = torch.zeros(()) if count is None else {"loss": torch.zeros(()), "count": count}
    warn_of_ignored_targets(output, sentences(4))
    assert caplog.text.count("labels of -100") == expected
    assert count_targets(output, sentences(4)) == (count or 4)


BATCHES = {
    "tensors": ((torch.zeros(4, 3), torch.zeros(4)), 0),
    "a mapping": ({"x": torch.zeros(4, 3), "names": ["a", "b", "c", "d"]}, 0),
    "time first": ((torch.zeros(7, 4, 3), torch.zeros(4)), 1),
    "a list of images": ((list(torch.zeros(4, 3, 5, 5)), torch.zeros(4)), 1),
    "a scalar first": ({"scale": torch.ones(()), "x": torch.zeros(4, 3)}, 1),
    "class weights": ([torch.ones(10), torch.zeros(4, 3), torch.zeros(4)], 1),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_guessed_number_of_samples_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    batch, expected = BATCHES[name]
    counter = TargetCounter()
    for _ in range(3):
        counter.count(torch.zeros(()), batch)
    assert caplog.text.count("a batch counts as") == expected
    assert caplog.text.count('return {"loss": loss, "count": number_of_samples}') == expected
    assert TargetCounter().count({"loss": torch.zeros(()), "count": 4}, batch) == 4
    assert caplog.text.count("a batch counts as") == expected


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
def test_a_list_of_images_weighs_by_its_count(counts: bool, caplog: pytest.LogCaptureFixture) -> None:
    rows = list(zip(*samples(8), strict=True))
    model = Images()
    model.counts = counts
    trainer: pl.Trainer = quiet_trainer(GradientAccumulation(3), TrainLoss())
    trainer.fit(model, DataLoader(rows, 3, collate_fn=collate))  # 3, 3 and 2 samples.
    assert caplog.text.count("a batch counts as 3 samples") == (not counts), "said for the last batch"
    if counts:
        assert_close(weights(model), by_hand([range(8)]))


class Still(Line):
    """Learns nothing."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_loss_that_a_trainer_has_divided_is_logged_whole() -> None:
    logged = []
    for steps in (1, 2):
        trainer: pl.Trainer = quiet_trainer(TrainLoss(), accumulate_grad_batches=steps)
        trainer.fit(Still(), DataLoader(TensorDataset(*samples(8)), 2))
        logged.append(float(trainer.callback_metrics["train/loss_epoch"]))
    assert logged[1] == pytest.approx(logged[0], rel=1e-6)
