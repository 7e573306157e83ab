"""What users get wrong with a recipe is answered in one line that says what to write."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from datamodules import MNISTDataModule, UserError
from recipes import MNISTClassifier, ResNetFineTuner, fit
from recipes.runner.machine import resolve_precision
from tests.support.tables import quiet_trainer


class Narrow(MNISTClassifier):
    """Passes nothing on."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(num_classes=7)

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 7))


def test_a_constructor_that_takes_nothing_of_what_the_data_decide_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"takes no `num_classes`, which is 10 .* 7 in Narrow: give it \*\*kwargs"):
        fit(Narrow, dataset="digits", max_epochs=1, verbose=False, run_dir=tmp_path)


def test_a_checkpoint_of_another_recipe_is_refused_by_its_name(tmp_path: Path):
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0)
    data: Any = MNISTDataModule("digits")
    trainer.fit(MNISTClassifier(), data)
    path = tmp_path / "digits.ckpt"
    trainer.save_checkpoint(path)
    with pytest.raises(UserError, match=r"digits.ckpt is a checkpoint of the recipe mnist, and ResNetFineTuner is"):
        ResNetFineTuner.load_from_checkpoint(path, weights_only=True)
    loaded = MNISTClassifier.load_from_checkpoint(path, weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), trainer.lightning_module.parameters()))


@pytest.mark.parametrize(("asked", "meant"), [("bf16", "bf16-mixed"), (32, "32"), ("64-true", "64-true")])
def test_short_names_of_precisions_are_known(asked: Any, meant: str):
    assert resolve_precision(asked, "cpu")[0] == meant


def test_half_precision_is_refused_on_a_cpu_by_each_name():
    for name in (16, "16", "16-mixed"):
        with pytest.raises(UserError, match="16-mixed needs a GPU"):
            resolve_precision(name, "cpu")


class Wanting(MNISTClassifier):
    """Has a parameter without a default."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def test_a_parameter_without_a_default_has_to_be_given(tmp_path: Path):
    with pytest.raises(UserError, match="`width` has no default: pass `width` INT"):
        fit(Wanting, dataset="digits", max_epochs=1, verbose=False, run_dir=tmp_path)


def test_a_null_is_refused_where_a_setting_takes_none():
    with pytest.raises(UserError, match="lr=None: expected FLOAT"):
        fit("mnist", lr=None)


def test_what_is_no_class_and_no_data_is_named():
    with pytest.raises(UserError, match="pass the class, MNISTClassifier, and its settings"):
        fit(MNISTClassifier())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="data=int: expected a LightningDataModule or its class"):
        fit("mnist", int)
    with pytest.raises(UserError, match=r"no parameter benchmark; did you mean trainer=\{'benchmark': ...\}\?"):
        fit("mnist", benchmark=True)
