"""A number outside of its range is rejected by its name, by the class that it is a parameter of."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from callbacks.run_progress import RunProgress
from datamodules.errors import UserError
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.mnist import MNISTDataModule
from datamodules.ranges import COUNT, SHARE, Range, check_ranges
from datamodules.translation.data_module import TranslationDataModule
from recipes import MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator
from recipes.runner.launch import LaunchSettings
from recipes.runner.settings import RunSettings


def translator(**options: Any) -> Seq2SeqTranslator:
    return Seq2SeqTranslator(source_vocab_size=9, target_vocab_size=9, **options)


def fine_tuner(**options: Any) -> ResNetFineTuner:
    return ResNetFineTuner(num_classes=10, **options)


OUTSIDE: list[tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]] = [
    (
        MNISTClassifier,
        {
            "label_smoothing": (2, -0.1),
            "lr": (0, -1, 0.0),
            "weight_decay": (-1,),
            "momentum": (1.0, -0.5),
            "num_classes": (2**63, 1),
            "top_k": (0, 2.5),
        },
    ),
    (ResNetFineTuner, {"head_lr_factor": (0,), "layer_lr_decay": (0, 1.5), "image_size": (-1, 2**40)}),
    (translator, {"dropout": (1.0, -1), "hidden_size": (2**63, -(2**64)), "num_layers": (0,)}),
    (translator, {"label_smoothing": (7,), "val_sentences": (0,), "length_penalty": ()}),
    (MNISTDataModule, {"batch_size": (0, 2**31), "shift": (-1, 29), "rotation": (181,), "scale": (1,)}),
    (ImageFolderDataModule, {"cache_gb": (-1,), "mixup": (-0.1,), "num_workers": (-1, 2**31), "image_size": (7,)}),
    (TranslationDataModule, {"batch_size": (0,), "vocab_size": (0,), "max_tokens": (-1,)}),
    (RunSettings, {"seed": (-1,), "save_top_k": (-2,), "patience": (0,)}),
    (LaunchSettings, {"master_port": (0, 65536), "node_rank": (-1,), "collective_timeout": (0, -1, 1e30)}),
    (RunProgress, {"interval": (-1,), "log_interval": (-1,)}),
]


@pytest.mark.parametrize(("build", "numbers"), OUTSIDE, ids=[build.__name__ for build, _ in OUTSIDE])
def test_each_class_rejects_numbers_outside_of_their_ranges(build, numbers):
    for name, values in numbers.items():
        for value in (*values, math.nan, math.inf, -math.inf):
            with pytest.raises(UserError, match=name):
                build(**{name: value})


def test_a_range_is_said_in_words() -> None:
    assert [
        str(allowed) for allowed in (SHARE, Range(0, above=True), Range(), Range(0, 1, above=True, below=True), COUNT)
    ] == ["from 0 to 1", "above 0", "a finite number", "above 0 and below 1", "a whole number, 1 or more"]
    check_ranges(open=(None, COUNT), share=(1, SHARE))
    for value in ("1", [1], math.nan, 1 + 0j):
        with pytest.raises(UserError, match="share="):
            check_ranges(share=(value, SHARE))
