from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from datamodules import UserError
from recipes.runner.early_stopping import PatientStopping, score_mode, why_stopped
from tests.support.command_lines import MNIST, typed


@pytest.mark.parametrize(
    ("score", "mode"),
    [("val/loss", "min"), ("val/ece", "min"), ("test_rmse", "min"), ("val/macro_f1", "max"), ("val/bleu", "max")],
)
def test_the_names_of_usual_scores_tell_whether_more_is_better(score, mode):
    assert score_mode(score) == mode


def test_the_recipe_knows_its_own_score_and_others_are_refused_with_what_to_type():
    assert score_mode("val/reward", "val/reward", "max") == "max"
    with pytest.raises(UserError, match=r"less or more val/reward is better.* name such as val/loss"):
        score_mode("val/reward", "val/loss", "min")


def test_a_checkpoint_brings_the_count_and_the_best_score_but_not_the_patience():
    saved = EarlyStopping("val/loss", patience=2)
    saved.wait_count, saved.best_score = 2, torch.tensor(0.5)
    resumed = PatientStopping("val/loss", patience=7)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.wait_count, resumed.best_score, resumed.patience) == (2, torch.tensor(0.5), 7)


def test_a_time_between_validations_is_no_error(tmp_path: Path):
    fit = "--max-epochs 1 --val-check-interval '{microseconds: 1}' --accelerator cpu --logger none --name a"
    fit += " --early-stopping val/loss --dataset digits --limit-train-batches 2"
    (ended,) = typed(tmp_path, fit, **MNIST)
    assert ended.status == 0, ended.err


def test_the_reason_of_the_callback_that_stopped_is_told():
    stopping = EarlyStopping("val/loss", patience=2)
    assert why_stopped([pl.Callback(), stopping]) == ""
    stopping.stopping_reason_message = "Metric did not improve. Signaling Trainer to stop."
    assert why_stopped([pl.Callback(), stopping]) == "Metric did not improve"
