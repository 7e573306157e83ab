"""Every public callback rejects a parameter of another type where it is built, with the parameter and its value."""

import inspect
from typing import Any

import lightning.pytorch as pl
import pytest

import callbacks
from datamodules.errors import UserError

CLASSES = {
    name: cls
    for name in callbacks.__all__
    if isinstance(cls := getattr(callbacks, name), type)
    and issubclass(cls, (pl.Callback, callbacks.VerifiedCheckpointIO))
}
FOREIGN = ("BNRecalibration",)
"""Its parameters are those of a class of Lightning."""
RIGHT = {"WeightAveraging": {"ema": 0.9}}
TEXTS = {("ExactCheckpoint", "last_every"), ("CheckpointGuard", "resumed"), ("FreezeLayers", "until")}
TEXTS |= {("StepMetrics", "targets"), ("TrainLoss", "targets")}

ROWS = [
    (name, parameter.name)
    for name, cls in CLASSES.items()
    if name not in FOREIGN
    for parameter in [*inspect.signature(cls.__init__).parameters.values()][1:]
    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
]


@pytest.mark.parametrize(("name", "parameter"), ROWS)
def test_a_parameter_of_another_type_is_named_with_its_value(name: str, parameter: str) -> None:
    wrong: list[Any] = [object(), [1], 2.5j]
    wrong += [-3] if (name, parameter) in TEXTS else ["many"]
    for value in wrong:
        with pytest.raises(UserError) as error:
            CLASSES[name](**RIGHT.get(name, {}) | {parameter: value})
        assert repr(value) in str(error.value), error.value
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("SeedControl", {"seed": "a"}, "seed='a': expected a whole number from 0 to 9,223,372,036,854,775,807"),
        ("SeedControl", {"seed": True}, "seed=True: expected a whole number from 0"),
        (
            "GradientAccumulation",
            {"global_batch_size": "16"},
            "global_batch_size='16': expected a whole number, 1 or more",
        ),
        ("FreezeLayers", {"unfreeze": ["layer3"]}, "unfreeze=['layer3']: expected a dict, as"),
        ("RunProgress", {"interval": True}, "interval=True: expected"),
    ],
)
def test_the_line_says_what_is_expected(name: str, options: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        CLASSES[name](**options)
    assert str(error.value).startswith(message)
