from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from datamodules.errors import RunFailedError
from recipes.runner.early_stopping import PatientStopping, why_stopped
from tests.support.command_lines import MNIST, typed


def test_a_checkpoint_brings_the_count_and_the_best_score_but_not_the_patience():
    saved = EarlyStopping("val/loss", patience=2)
    saved.wait_count, saved.best_score = 2, torch.tensor(0.5)
    resumed = PatientStopping("val/loss", patience=7)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.wait_count, resumed.best_score, resumed.patience) == (2, torch.tensor(0.5), 7)


def test_a_monitor_that_is_no_score_of_the_run_is_named_with_the_scores_that_it_has():
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    trainer._logger_connector._callback_metrics = {"val/loss": torch.tensor(1.0)}
    with pytest.raises(RunFailedError, match=r"follows val/acc, the `monitor` of LightningModule, .* it has val/loss"):
        PatientStopping("val/acc", patience=1).on_validation_end(trainer, pl.LightningModule())


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
