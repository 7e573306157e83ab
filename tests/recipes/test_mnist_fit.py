"""Training on arrays from Python, in one call."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.mnist.data_module import load_digits
from recipes.mnist import ClassicNet, MNISTClassifier

IMAGES, LABELS = (part[:300].numpy() for part in load_digits()["train"])
QUICK: dict[str, Any] = {"max_epochs": 2, "batch_size": 64, "enable_progress_bar": False, "accelerator": "cpu"}


def _weights(classifier: MNISTClassifier) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in classifier.state_dict().items()}


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in second)


def test_a_call_trains_and_the_seed_alone_decides_on_the_weights():
    torch.manual_seed(5)
    first = MNISTClassifier.fit(IMAGES, LABELS, seed=3, **QUICK)
    torch.manual_seed(6)
    again = MNISTClassifier.fit(torch.from_numpy(IMAGES), LABELS.tolist(), seed=3, **QUICK)
    other = MNISTClassifier.fit(IMAGES, LABELS, seed=4, **QUICK)
    assert _equal(_weights(first), _weights(again))
    assert not _equal(_weights(first), _weights(other))
    assert not first.training
    assert first.trainer.callback_metrics["val/accuracy"] > 0.3
    assert first.trainer.datamodule.sizes == {"train": 275, "val": 25}


def test_settings_go_where_they_belong_and_classes_come_from_the_labels():
    names = np.array(["even", "odd"])[LABELS % 2]
    classifier = MNISTClassifier.fit(
        IMAGES / 255, names, val=(IMAGES[:20], names[:20]), network="classic", lr=0.005, rotation=0, **QUICK
    )
    assert isinstance(classifier.network, ClassicNet)
    assert list(classifier.class_names) == ["even", "odd"]
    assert (classifier.hparams.lr, classifier.hparams.num_classes) == (0.005, 2)
    assert classifier.trainer.datamodule.hparams.rotation == 0
    assert classifier.trainer.datamodule.sizes == {"train": 300, "val": 20}
    with pytest.raises(TypeError, match="netwrok"):
        MNISTClassifier.fit(IMAGES, LABELS, netwrok="classic")
    with pytest.raises(UserError, match="the train images are float64 from 0 to 16, .* pass images / 16"):
        MNISTClassifier.fit(IMAGES / 255 * 16, LABELS)
