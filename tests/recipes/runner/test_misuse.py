"""What users get wrong with a recipe is answered in one line that says what to write."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from callbacks import SyncBN
from datamodules import MNISTDataModule, UserError
from recipes import MNISTClassifier, ResNetFineTuner, fit, predict
from recipes.runner.machine import resolve_precision
from tests.support.tables import quiet_trainer


class Narrow(MNISTClassifier):
    """Passes nothing on."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(num_classes=7)

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 7))


class _Pair(nn.Module):
    """Returns logits with the images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(images.flatten(1)), images


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            None,
            "build_network of Own returned NoneType, expected the network, an nn.Module: end it with return network",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(784, 5)),
            r"of shape \(\d+, 5\) for a batch, expected \(batch, 10\), a colu",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 12)), r"of shape \(\d+, 12\) for a batch, expected \(batch, 10\)"),
        (nn.Conv2d(1, 10, 1), r"of shape \(\d+, 10, 28, 28\) for a batch, expected \(batch, 10\)"),
        (_Pair(), r"returns a tuple, expected a tensor of logits of shape \(batch, 10\): return that tensor only"),
    ],
)
def test_a_network_without_a_column_for_each_class_is_rejected(tmp_path: Path, network: Any, message: str):
    class Own(MNISTClassifier):
        def build_network(self) -> nn.Module:
            return network

    with pytest.raises(UserError, match=message) as caught:
        fit(Own, dataset="digits", max_steps=1, num_sanity_val_steps=0, verbose=False, run_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_constructor_must_take_what_the_data_decide(tmp_path: Path):
    with pytest.raises(UserError, match=r"takes no `num_classes`, which is 10 .* 7 in Narrow: give it \*\*kwargs"):
        fit(Narrow, dataset="digits", max_epochs=1, verbose=False, run_dir=tmp_path)


def test_a_checkpoint_of_another_recipe_is_rejected_by_its_name(tmp_path: Path):
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


def test_half_precision_is_rejected_on_a_cpu_by_each_name():
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


def test_a_null_is_rejected_where_a_setting_takes_none():
    with pytest.raises(UserError, match="lr=None: expected FLOAT"):
        fit("mnist", lr=None)


def test_an_argument_of_the_wrong_kind_is_named():
    with pytest.raises(UserError, match="pass the class, MNISTClassifier, and its settings"):
        fit(MNISTClassifier())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="data=int: expected a LightningDataModule or its class"):
        fit("mnist", int)
    with pytest.raises(UserError, match=r"no parameter benchmark; did you mean trainer=\{'benchmark': ...\}\?"):
        fit("mnist", benchmark=True)


class Foreign(pl.LightningModule):
    """Not a recipe."""


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (Foreign, {}, "fit() takes the name of a recipe or a subclass of recipes.Recipe, and was given Foreign"),
        (Foreign(), {}, "and was given Foreign; train any other LightningModule by a Trainer"),
        (3, {}, "and was given int"),
        ("mnist", {"callbacks": ["x"]}, "callbacks has 'x'; expected objects of lightning.pytorch.Callback"),
        ("mnist", {"callbacks": [SyncBN]}, "callbacks has the class SyncBN; pass an object, SyncBN()"),
        ("mnist", {"data": "digits"}, "data is a path, and 'digits' names a data set; pass dataset='digits'"),
    ],
)
def test_what_fit_does_not_take_is_rejected_in_one_line(recipe: Any, options: Any, message: str, tmp_path: Path):
    dataset = {} if "data" in options else {"dataset": "digits"}
    with pytest.raises(UserError, match=re.escape(message)):
        fit(recipe, max_steps=1, verbose=False, run_dir=tmp_path, **dataset, **options)


def test_predict_takes_only_a_result_or_a_path(tmp_path: Path):
    result = fit("mnist", dataset="digits", max_steps=1, verbose=False, run_dir=tmp_path)
    images = [torch.zeros(28, 28, dtype=torch.uint8)]
    rows = predict(result.model, images)
    assert (
        predict(result, images) == predict(result.checkpoint, images) == predict(str(result.checkpoint), images) == rows
    )
    with pytest.raises(UserError, match="there is no checkpoint mnist; pass one such as runs/mnist/NAME"):
        predict("mnist", images)
    with pytest.raises(UserError, match="or the path of a checkpoint, and was given a Foreign"):
        predict(Foreign(), images)
    weights = tmp_path / "weights.pt"
    torch.save({"state_dict": {}}, weights)
    with pytest.raises(UserError, match=f"{weights} is no checkpoint of a recipe"):
        predict(weights, images)
