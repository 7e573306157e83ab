"""What limits mean, on any split."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import GradientAccumulation
from datamodules import UserError
from recipes.cli.limits import WholeUpdates, limits_per_device, micro_batches_per_update
from tests.support.minimal_recipe import Line
from tests.support.tables import QUIET, silence


@pytest.mark.parametrize(("devices", "batch_size", "limit"), [(1, 64, 40), (1, 16, 160), (2, 32, 40), (4, 8, 80)])
def test_a_number_of_updates_is_the_same_on_any_split_of_a_global_batch(devices, batch_size, limit):
    per_update = micro_batches_per_update(1, 64, {"batch_size": batch_size}, devices)
    limits = limits_per_device({"limit_train_batches": 40, "val_check_interval": 10}, per_update, 0, devices)
    assert limits == {"limit_train_batches": limit, "val_check_interval": limit // 4}


def test_batches_of_an_evaluation_are_dealt_to_the_devices():
    options = {"limit_val_batches": 5, "limit_test_batches": 4}
    each = [limits_per_device(options, 1, rank, 3) for rank in range(3)]
    assert [limits["limit_val_batches"] for limits in each] == [2, 2, 1]
    assert [limits["limit_test_batches"] for limits in each] == [2, 1, 1]
    with pytest.raises(UserError, match=r"limit_val_batches=1 leaves 1 of 2 devices without a batch; .*=2 or more"):
        limits_per_device({"limit_val_batches": 1}, 1, 0, 2)


def test_shares_times_and_what_was_not_given_stay_as_they_are():
    options = {"limit_train_batches": 0.5, "val_check_interval": "00:00:10:00", "limit_val_batches": 0, "other": 3}
    assert limits_per_device(options | {"limit_test_batches": None}, 4, 0, 2) == {}


@pytest.mark.parametrize(
    ("accumulate", "global_batch", "data"),
    [({0: 2, "1 epochs": 1}, None, {"batch_size": 8}), (1, 64, {}), (1, 64, {"batch_size": 8, "max_tokens": 100})],
)
def test_a_number_of_updates_is_refused_where_their_size_is_not_known(accumulate, global_batch, data):
    per_update = micro_batches_per_update(accumulate, global_batch, data, 1, "max_tokens")
    assert limits_per_device({"limit_train_batches": 0.5}, per_update, 0, 1) == {}
    with pytest.raises(UserError, match=r"limit_train_batches=4 counts updates.*limit_train_batches=0\.5"):
        limits_per_device({"limit_train_batches": 4}, per_update, 0, 1)


class Scored(Line):
    """Counts its validations."""

    def on_fit_start(self) -> None:
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)


def fit(batches: int, **options: Any) -> tuple[pl.Trainer, Scored]:
    silence()
    samples = torch.linspace(-1, 1, batches).unsqueeze(1)
    loader: Any = DataLoader(TensorDataset(samples, samples), batch_size=1)
    callbacks = [GradientAccumulation(4), WholeUpdates()]
    trainer = pl.Trainer(**QUIET | {"max_epochs": 1, "callbacks": callbacks, "enable_checkpointing": False} | options)
    module = Scored()
    trainer.fit(module, loader, DataLoader(TensorDataset(samples[:1], samples[:1])))
    return trainer, module


def test_a_share_that_ends_within_an_update_is_refused_and_named_in_updates():
    message = r"limit_train_batches=0\.5 is 31 of 63 batches, and an update takes 4: .* limit_train_batches=8$"
    with pytest.raises(UserError, match=message):
        fit(63, limit_train_batches=0.5)
    assert fit(64, limit_train_batches=0.5)[0].global_step == 8
    assert fit(63)[0].global_step == 16, "the last update of an epoch may be short"


def test_validations_at_a_share_of_an_epoch_follow_whole_updates():
    assert fit(30, val_check_interval=0.25, num_sanity_val_steps=0)[1].validated == [1, 2, 3, 4, 5, 6, 7]
    assert fit(40, val_check_interval=0.5, num_sanity_val_steps=0)[1].validated == [5, 10]
