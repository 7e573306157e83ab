from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel

from datamodules.errors import RunFailedError
from recipes.runner.build import PatientStopping, why_stopped
from tests.support.command_lines import MNIST, typed


def test_a_checkpoint_brings_the_count_but_not_the_patience():
    saved = EarlyStopping("val/loss", patience=2)
    saved.wait_count, saved.best_score = 2, torch.tensor(0.5)
    resumed = PatientStopping("val/loss", patience=7)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.wait_count, resumed.best_score, resumed.patience) == (2, torch.tensor(0.5), 7)


def test_a_monitor_that_is_no_score_is_named_with_the_scores():
    class Scored(BoringModel):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", batch.mean())

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    options = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1, "accelerator": "cpu"} | quiet
    for often in ({}, {"val_check_interval": 1, "check_val_every_n_epoch": None}):
        trainer = pl.Trainer(callbacks=[PatientStopping("val/acc", patience=1)], **options, **often)
        with pytest.raises(RunFailedError, match=r"follows val/acc, the `monitor` of Scored, and .* it has val/loss"):
            trainer.fit(Scored())


def test_a_time_between_validations_is_no_error(tmp_path: Path):
    fit = "--max-epochs 1 --val-check-interval '{microseconds: 1}' --accelerator cpu --logger none --name a"
    fit += " --patience 3 --dataset digits --limit-train-batches 2"
    (ended,) = typed(tmp_path, fit, **MNIST)
    assert ended.status == 0, ended.err


def test_the_reason_of_the_callback_that_stopped_is_told():
    stopping = EarlyStopping("val/loss", patience=2)
    assert why_stopped([pl.Callback(), stopping]) == ""
    stopping.stopping_reason_message = "Metric did not improve. Signaling Trainer to stop."
    assert why_stopped([pl.Callback(), stopping]) == "Metric did not improve"
