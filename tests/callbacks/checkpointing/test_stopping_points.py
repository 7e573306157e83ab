from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks.checkpointing.stopping_points import move_counters, validation_is_next
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, silence


class Validations(pl.Callback):
    """After which batches a validation came, and after which it was foretold."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.foretold: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if validation_is_next(trainer):
            self.foretold.append(trainer.fit_loop.total_batch_idx)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.came.append(trainer.fit_loop.total_batch_idx)


@pytest.mark.parametrize(("interval", "every_n_epochs"), [(2, 1), (2, 2), (3, None), (0.5, 2), (1.0, 1)])
def test_a_validation_is_foretold_after_each_batch_that_one_follows(interval: float, every_n_epochs: int | None):
    silence()
    data = DataLoader(TensorDataset(*noisy_images(10)), 2)
    options: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"val_check_interval": interval, "check_val_every_n_epoch": every_n_epochs}
    trainer = pl.Trainer(callbacks=[seen := Validations()], **QUIET | options | {"num_sanity_val_steps": 0})
    trainer.fit(Tiny(image_network().double(), torch.optim.SGD, lr=0.1), data, data)
    assert seen.foretold == seen.came
    assert seen.came


def test_a_run_saved_before_a_validation_enters_it_again_from_its_first_batch():
    counters = {"ready": 3, "started": 3, "processed": 3, "completed": 3}
    progress = {"total": dict(counters), "current": dict(counters), "is_last_batch": True}
    move_counters({"fit_loop": {"epoch_loop.val_loop.batch_progress": progress}}, "validation")
    assert progress["total"] == {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    assert progress["current"] == dict.fromkeys(counters, 0)
    assert not progress["is_last_batch"]
