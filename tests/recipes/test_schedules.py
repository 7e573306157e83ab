"""Each schedule has the rates of its source, on any split and after a resume, and rejects what it cannot do.

Optimizers by name and by import path: what is rejected, and exact resumes with state in unusual places.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl
from callbacks.warmup_lr import WarmupLR
from datamodules.errors import UserError
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from recipes import Recipe
from recipes.mnist import MNISTClassifier
from recipes.optim import build_optimizer, optimizer_by_name, parameter_groups
from recipes.schedules import ScheduleName
from tests.support import optimizers
from tests.support.own_training import TrainedRecipe
from tests.support.tables import quiet_trainer

EPOCHS, UPDATES, LR = 4, 6, 0.1
"""Updates of each epoch, of which the last is short."""
TOTAL, STOP = EPOCHS * UPDATES, 2 * UPDATES + 2

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("one_cycle", {}),
    ("constant", {}),
    ("linear", {}),
    ("cosine", {"min_lr": 0.01}),
    ("exponential", {"gamma": 0.7, "milestones": "3 steps, 2 epochs", "milestone_gamma": 0.5, "min_lr": 0.002}),
    ("multistep", {"milestones": "3 steps, 1.5 epochs, 80%", "gamma": 0.2, "min_lr": 0.002}),
    ("plateau", {"gamma": 0.5, "patience": 0, "min_lr": 0.03}),
]


class Line(TrainedRecipe):
    """Least squares in float64, whose score on the validation set is 1, 2, 3, 1 and so on, so it never gets better."""

    def __init__(self, schedule: Any, optimizer: str = "sgd", **kwargs: Any) -> None:
        super().__init__(optimizer=optimizer, lr=LR, schedule=schedule, **kwargs)
        self.rates, self.starts = dict[int, float](), dict[int, float]()

    def build_network(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 1).double()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.starts[self.trainer.global_step] = self.trainer.optimizers[0].param_groups[0]["lr"]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        self.rates[self.trainer.global_step] = self.trainer.optimizers[0].param_groups[0]["lr"]
        return {"loss": F.mse_loss(self(inputs)[:, 0], targets), "count": len(inputs)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", float(1 + self.current_epoch % 3), batch_size=len(batch[0]))


def fit(module: Line, *callbacks: pl.Callback, micro_batches: int = 1, resume: Any = None, **options: Any) -> Line:
    """Train on 44 samples, eight to an update, so that an epoch has six updates and the last one is short."""
    inputs = torch.randn(44, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = inputs, inputs @ torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    train = TrainLoader(*data, torch.arange(44), 8 // micro_batches, 1, 0, 1)
    validation = EvaluationLoader(*data, torch.arange(8), 8, 0, 1)
    own = [SeedControl(1), GradientAccumulation(micro_batches)]
    trainer = quiet_trainer(*own, *callbacks, **{"max_epochs": EPOCHS} | options)
    trainer.fit(module, train, validation, ckpt_path=resume, weights_only=True)
    return module


def weights(module: Line) -> list[float]:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


class Stop(pl.Callback):
    """Stops a run after an update."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step == STOP


def test_the_table_has_every_schedule() -> None:
    assert {name for name, _ in ROWS} == set(get_args(ScheduleName))


@pytest.mark.parametrize(("name", "settings"), ROWS)
def test_a_run_stopped_within_an_epoch_resumes_to_the_bit(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    def run(*callbacks: pl.Callback, **options: Any) -> Line:
        return fit(Line(name, schedule_args=settings), WarmupLR("4 steps"), *callbacks, **options)

    whole, split = run(), run(micro_batches=2)
    assert (split.rates, len(whole.rates)) == (whole.rates, TOTAL)
    assert len(set(whole.rates.values())) > 1 or name == "constant", "there is something to lose"

    first = run(ExactCheckpoint(tmp_path, every_n_train_steps=STOP, filename="stopped"), Stop())
    resumed = run(ExactCheckpoint(tmp_path / "resumed"), resume=tmp_path / "stopped.ckpt")
    elsewhere = run(ExactCheckpoint(tmp_path / "elsewhere"), resume=tmp_path / "stopped.ckpt", micro_batches=2)
    assert elsewhere.rates == resumed.rates
    assert (len(first.rates), min(resumed.rates)) == (STOP, STOP)
    assert (first.rates | resumed.rates, first.starts | resumed.starts) == (whole.rates, whole.starts)
    assert weights(resumed) == weights(whole)


def rates_of(make: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
    """The rates that one of torch's schedulers has in a run."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = make(optimizer)
    rates = []
    for update in range(TOTAL):
        if update:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    return rates


@pytest.mark.parametrize(
    ("name", "settings", "make"),
    [
        ("linear", {}, lambda o: lr_scheduler.PolynomialLR(o, TOTAL)),
        ("cosine", {"min_lr": 0.02}, lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL, 0.02)),
        (
            "multistep",
            {"milestones": "7 steps, 2 epochs", "gamma": 0.2},
            lambda o: lr_scheduler.MultiStepLR(o, [7, 12], 0.2),
        ),
        ("multistep", {}, lambda o: lr_scheduler.MultiStepLR(o, [12, 18], 0.1)),
        ("multistep", {"milestones": ["7 steps"], "min_lr": 0.04}, lambda o: lr_scheduler.MultiStepLR(o, [7], 0.4)),
        ("exponential", {}, lambda o: lr_scheduler.MultiStepLR(o, [6, 12, 18], 0.95)),
        (
            "exponential",
            {"gamma": 0.9, "milestones": [7, "2 epochs"], "milestone_gamma": 0.2},
            lambda o: lr_scheduler.ChainedScheduler(
                [lr_scheduler.MultiStepLR(o, [6, 12, 18], 0.9), lr_scheduler.MultiStepLR(o, [7, 12], 0.2)]
            ),
        ),
    ],
)
def test_the_rates_are_those_of_torchs_schedulers(name: str, settings: dict[str, Any], make: Any) -> None:
    assert [*fit(Line(name, schedule_args=settings)).rates.values()] == pytest.approx(rates_of(make), abs=1e-15)


def test_plateau_lowers_the_rate_until_min_lr() -> None:
    rates = fit(Line("plateau", schedule_args={"gamma": 0.5, "patience": 0, "min_lr": 0.03})).rates
    assert [rates[epoch * UPDATES] for epoch in range(EPOCHS)] == pytest.approx([0.1, 0.1, 0.05, 0.03])
    assert set(fit(Line("plateau")).rates.values()) == {LR}, "it waits for two by default, and lowers at the third"


def test_plateau_looks_only_at_validated_epochs() -> None:
    rates = fit(
        Line("plateau", schedule_args={"gamma": 0.5, "patience": 0}), check_val_every_n_epoch=2, max_epochs=7
    ).rates
    assert [rates[epoch * UPDATES] for epoch in range(7)] == [LR] * 6 + [LR / 2], "the scores are 2, 1 and 3"
    with pytest.raises(UserError, match="follows val/loss, and this run validates nothing"):
        fit(Line("plateau"), limit_val_batches=0)


@pytest.mark.parametrize(
    ("name", "settings", "note", "rates"),
    [
        ("cosine", {}, "the run has no end, so schedule='cosine' stays at its peak", {0.1}),
        ("multistep", {"milestones": "1 epochs"}, "", {0.1, 0.01}),
    ],
)
def test_a_run_without_an_end_has_a_rate_for_every_update(name, settings, note, rates, caplog):
    module = fit(Line(name, schedule_args=settings), Stop(), max_epochs=-1)
    assert len(module.rates) == STOP
    assert rates is None or {round(rate, 9) for rate in module.rates.values()} == rates
    # Lightning logs tips of its own, now and then.
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_recipes")]
    ours = [line for line in ours if "nothing was drawn" not in line]  # The module is built first.
    assert (ours[-1:] or [""])[0] == note


def test_milestones_in_per_cent_need_a_run_with_an_end() -> None:
    module = Line("multistep")
    with pytest.raises(UserError, match=r'"50%" is unknown because the run has no end: write the duration in steps'):
        fit(module, max_epochs=-1)
    assert not module.rates


@pytest.mark.parametrize(
    ("schedule", "arguments", "message"),
    [
        ("cosine", {"milestones": "3 steps"}, "`schedule_args`: cosine has no milestones; it takes min_lr"),
        ("multistep", {"gama": 0.1}, "`schedule_args`: multistep has no gama; it takes milestones, gamma, min_lr"),
        ("cosine", {"min_lr": 0.2}, "min_lr=0.2: expected from 0 to 0.1"),
        ("multistep", {"gamma": 1.5}, "gamma=1.5: expected above 0 and below 1"),
        ("plateau", {"gamma": "half"}, "gamma='half': expected above 0 and below 1"),
        (
            "multistep",
            {"milestones": "60 epochs, 12o epochs, 80%"},
            "milestones='60 epochs, 12o epochs, 80%', number 2: the duration ' 12o epochs' cannot be read",
        ),
        ("multistep", {"milestones": "9 steps, 2 epochs, 8 steps"}, "number 3: 8 steps is not after 9 steps"),
    ],
)
def test_what_does_not_apply_or_cannot_be_read_is_rejected(schedule, arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Line(schedule, schedule_args=arguments)


# Optimizers


def build(name: str, weight_decay: float = 0.0, **options: Any) -> torch.optim.Optimizer:
    return optimizer_by_name(name, parameter_groups(nn.Linear(2, 2).parameters(), weight_decay), lr=0.1, **options)


def test_arguments_go_to_an_optimizer_of_any_imported_module() -> None:
    assert tuple(build("adamw", arguments={"betas": [0.8, 0.9]}).defaults["betas"]) == (0.8, 0.9)
    assert build("sgd", arguments={"nesterov": False}).defaults["nesterov"] is False
    by_default = build("SGD").defaults
    assert (by_default["nesterov"], by_default["momentum"], by_default["lr"]) == (True, 0.9, 0.1)
    own = build("tests.support.optimizers.Counting", 0.2, arguments={"scale": 3.0})
    assert type(own) is optimizers.Counting
    assert [(group["scale"], group["weight_decay"]) for group in own.param_groups] == [(3.0, 0.2), (3.0, 0.0)]


def test_every_group_of_an_optimizer_has_the_recipes_arguments() -> None:
    recipe = Line("constant", momentum=0.5, weight_decay=0.2, optimizer_args={"nesterov": False})
    weight, bias = recipe.parameters()
    split = build_optimizer([weight, bias], recipe)
    assert [(group["lr"], group["weight_decay"]) for group in split.param_groups] == [(LR, 0.2), (LR, 0.0)]
    grouped = build_optimizer([{"params": [weight], "lr": 0.7}, {"params": [bias]}], recipe)
    assert [(group["lr"], group["weight_decay"]) for group in grouped.param_groups] == [(0.7, 0.2), (LR, 0.2)]
    for optimizer in (split, grouped):
        assert (optimizer.defaults["nesterov"], optimizer.defaults["momentum"]) == (False, 0.5)


def test_lbfgs_has_one_group_of_contiguous_weights_with_one_rate() -> None:
    (group,) = build("lbfgs", arguments={"max_iter": 3}).param_groups
    assert (group["lr"], group["max_iter"], [len(p) for p in group["params"]]) == (0.1, 3, [2, 2])
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(UserError, match="cannot read weights in channels_last; pass channels_last=False"):
        optimizer_by_name("lbfgs", [{"params": [*convolution.parameters()]}], lr=0.1)
    layers = [{"params": [parameter], "lr": parameter.ndim} for parameter in nn.Linear(2, 2).parameters()]
    with pytest.raises(UserError, match="it has one rate for all layers; leave out"):
        optimizer_by_name("lbfgs", layers, lr=0.1)


def test_a_missing_configure_optimizers_says_what_to_write() -> None:
    class Forgetful(Line):
        configure_optimizers = Recipe.configure_optimizers

    with pytest.raises(NotImplementedError, match=r"optimizer = build_optimizer\(self.parameters\(\), self\)"):
        fit(Forgetful("constant"))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamw", {"beta": 1}, "`optimizer_args`: AdamW has no beta; it takes betas, eps, amsgrad"),
        ("adamw", {"weight_decay": 1}, "weight_decay is a separate parameter; pass weight_decay=1"),
        ("adamw", {"params": []}, "`optimizer_args`: AdamW has no params"),
        ("adamw", {"betas": [2, 3]}, "optimizer='adamw': Invalid beta parameter at index 0: 2"),
        ("muon", {}, "Muon only supports 2D parameters whereas we found a parameter with size: torch.Size([2])"),
        ("sparseadam", {}, "no optimizer 'sparseadam'; expected one of adadelta"),
        ("elsewhere.Lion", {}, "elsewhere is not imported; write `import elsewhere` before"),
        ("tests.support.optimizers.Any", {}, "it is no subclass of torch.optim.Optimizer"),
        ("tests.support.optimizers.Lion", {}, "tests.support.optimizers has no class Lion"),
        ("tests.support.optimizers.WithoutRate", {}, "it has no parameter lr, which schedules and the warm-up"),
        ("tests.support.optimizers.TwoModes", {}, "it trains and evaluates different weights"),
    ],
)
def test_an_optimizer_or_argument_that_does_not_fit_is_rejected(name, arguments, message) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        build(name, arguments=arguments)


def test_a_recipe_rejects_its_optimizer_without_an_import() -> None:
    with pytest.raises(UserError, match="AdamW has no beta"):
        MNISTClassifier(optimizer_args={"beta": 1})
    # A checkpoint may name it, and inference needs none.
    assert MNISTClassifier(optimizer="antigravity.Lion").hparams.optimizer == "antigravity.Lion"
    assert "antigravity" not in sys.modules
    with pytest.raises(UserError, match="antigravity is not imported"):
        MNISTClassifier(optimizer="antigravity.Lion").configure_optimizers()


class Lion(torch.optim.SGD):
    pass


Lion.__module__ = "lion_pytorch"


def test_another_optimizer_than_the_parameters_name_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

        def on_train_start(self) -> None:
            """A hook of the user's, which calls no other."""

    fit(Own("one_cycle", "sgd"))
    assert "configure_optimizers() built Adam, and optimizer='sgd' is saved" in caplog.text
    assert "pass optimizer='adam'" in caplog.text
    caplog.clear()
    fit(Own("one_cycle", "adam"))
    assert "built no schedule, and schedule='one_cycle' is saved" in caplog.text
    caplog.clear()
    Own.configure_optimizers = lambda self: Lion(self.parameters(), 0.01)
    fit(Own("one_cycle", "adam"))
    assert "pass optimizer='lion_pytorch.Lion'" in caplog.text
    caplog.clear()
    fit(Line("one_cycle", "sgd"))
    assert "configure_optimizers() built" not in caplog.text


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tests.support.optimizers.Counting", {"scale": 0.5}),
        ("adafactor", {}),
        ("rprop", {}),
    ],
)
def test_a_run_with_state_in_unusual_places_resumes_to_the_bit(name, arguments, tmp_path) -> None:
    def run(*callbacks: Any, **options: Any) -> Line:
        return fit(Line("cosine", name, optimizer_args=arguments), *callbacks, **options)

    whole = run()
    run(ExactCheckpoint(tmp_path, every_n_train_steps=STOP, filename="stopped"), Stop())
    resumed = run(resume=tmp_path / "stopped.ckpt")
    assert (len(whole.rates), whole.rates[0], min(resumed.rates)) == (TOTAL, LR, STOP)
    assert weights(resumed) == weights(whole)
