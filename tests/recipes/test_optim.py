"""Optimisers by name and by import path: what is refused, and exact resumes with state in unusual places."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from datamodules.errors import UserError
from recipes.mnist import MNISTClassifier
from recipes.optim import build_optimizer, learning_rate_scale, parameter_groups
from tests.recipes.test_schedules import LR, STOP, TOTAL, Line, Stop, fit, weights
from tests.support import optimizers


def build(name: str, weight_decay: float = 0.0, **options: Any) -> torch.optim.Optimizer:
    return build_optimizer(name, parameter_groups(nn.Linear(2, 2).parameters(), weight_decay), lr=0.1, **options)


def test_arguments_go_to_an_optimiser_of_torch_or_of_an_imported_module() -> None:
    assert tuple(build("adamw", arguments={"betas": [0.8, 0.9]}).defaults["betas"]) == (0.8, 0.9)
    assert build("sgd", arguments={"nesterov": False}).defaults["nesterov"] is False
    by_default = build("SGD").defaults
    assert (by_default["nesterov"], by_default["momentum"], by_default["lr"]) == (True, 0.9, 0.1)
    own = build("tests.support.optimizers.Counting", 0.2, arguments={"scale": 3.0})
    assert type(own) is optimizers.Counting
    assert [(group["scale"], group["weight_decay"]) for group in own.param_groups] == [(3.0, 0.2), (3.0, 0.0)]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamw", {"beta": 1}, "`optimizer_args`: AdamW has no beta; it takes betas, eps, amsgrad"),
        ("adamw", {"weight_decay": 1}, "weight_decay is a parameter of its own; pass weight_decay=1"),
        ("adamw", {"params": []}, "`optimizer_args`: AdamW has no params"),
        ("adamw", {"betas": [2, 3]}, "optimizer='adamw': Invalid beta parameter at index 0: 2"),
        ("muon", {}, "Muon only supports 2D parameters whereas we found a parameter with size: torch.Size([2])"),
        ("elsewhere.Lion", {}, "elsewhere is not imported; write `import elsewhere` before"),
        ("tests.support.optimizers.Any", {}, "it is no subclass of torch.optim.Optimizer"),
        ("tests.support.optimizers.Lion", {}, "tests.support.optimizers has no class Lion"),
        (
            "tests.support.optimizers.WithoutRate",
            {},
            "it has no parameter lr, which schedules and the warm-up multiply",
        ),
        ("tests.support.optimizers.TwoModes", {}, "it trains other weights than it is to be scored and saved with"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        build(name, arguments=arguments)


def test_a_recipe_refuses_at_once_and_imports_nothing() -> None:
    with pytest.raises(UserError, match="AdamW has no beta"):
        MNISTClassifier(optimizer_args={"beta": 1})
    # A checkpoint may name it, and inference needs none.
    assert MNISTClassifier(optimizer="antigravity.Lion").hparams.optimizer == "antigravity.Lion"
    assert "antigravity" not in sys.modules
    with pytest.raises(UserError, match="antigravity is not imported"):
        MNISTClassifier(optimizer="antigravity.Lion").configure_optimizers()


def test_lbfgs_has_one_group_a_rate_of_1_and_no_decay(caplog: pytest.LogCaptureFixture) -> None:
    recipe = MNISTClassifier(optimizer="lbfgs", schedule="constant", optimizer_args={"max_iter": 4})
    (group,) = recipe.configure_optimizers()["optimizer"].param_groups
    assert (group["lr"], group["max_iter"], "weight_decay" in group) == (1.0, 4, False)
    assert len(group["params"]) == len(list(recipe.parameters()))
    assert caplog.messages == ["LBFGS has no weight decay, so none is applied"]
    assert MNISTClassifier(optimizer="LBFGS", lr=0.5).hparams.lr == 0.5
    assert learning_rate_scale("auto", "lbfgs") is None
    rates = [{"params": [p], "lr": lr} for lr, p in zip((1.0, 0.5), nn.Linear(2, 2).parameters(), strict=True)]
    with pytest.raises(UserError, match="has one learning rate"):
        build_optimizer("lbfgs", rates, lr=1.0)


def test_another_optimiser_than_the_parameters_name_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    fit(Own("one_cycle", "sgd"))
    assert "configure_optimizers() built Adam, and optimizer='sgd' is saved" in caplog.text
    caplog.clear()
    fit(Own("one_cycle", "adam"))
    assert "built no schedule, and schedule='one_cycle' is saved" in caplog.text
    caplog.clear()
    fit(Line("one_cycle", "sgd"))
    assert "configure_optimizers() built" not in caplog.text


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tests.support.optimizers.Counting", {"scale": 0.5}),
        ("lbfgs", {"max_iter": 2, "history_size": 3}),
        ("adafactor", {}),
        ("rprop", {}),
    ],
)
def test_a_run_stopped_within_an_epoch_resumes_to_the_bit(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    def run(*callbacks: Any, **options: Any) -> Line:
        return fit(Line("cosine", name, optimizer_args=arguments), *callbacks, **options)

    whole = run()
    assert len(whole.rates) == TOTAL
    run(ExactCheckpoint(tmp_path, every_n_train_steps=STOP, filename="stopped"), Stop())
    resumed = run(resume=tmp_path / "stopped.ckpt")
    assert min(resumed.rates) == STOP
    assert weights(resumed) == weights(whole)
    assert whole.rates[0] == LR
