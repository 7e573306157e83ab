"""The same short run on the CPU and on the stand-in device, with real Trainers."""

import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from callbacks.seed_control import SeedControl
from recipes.classification import Classifier
from tests.rehearsal.stand_in import DeviceTensor, StandInAccelerator, Wait, stand_in_device
from tests.support.tables import QUIET, silence

LOG_EVERY = 3


class Run(NamedTuple):
    """What a run leaves: its weights, as CPU tensors, its metrics, and where the host waited."""

    weights: dict[str, Tensor]
    metrics: dict[str, float]
    waits: list[Wait]


Experiment = Callable[[], tuple[pl.LightningModule, Any, Sequence[pl.Callback]]]
"""Makes a module, its data (a data module, or loaders of training and validation) and callbacks."""


def fit(make: Experiment, device: torch.device | None = None, **settings: Any) -> Run:
    """Train, and validate a classifier after it; on the CPU without a device."""
    silence()
    SeedControl(seed=1)
    module, data, callbacks = make()
    where: dict[str, Any] = {"accelerator": "cpu"}
    if device is not None:
        where = {
            "strategy": settings.pop("strategy", None)
            or SingleDeviceStrategy(device=device, accelerator=StandInAccelerator())
        }
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            **{**QUIET, "accelerator": "auto", **where, "logger": TensorBoardLogger(folder)},
            **{"max_epochs": 2, "log_every_n_steps": LOG_EVERY, "enable_checkpointing": False, **settings},
            callbacks=[SeedControl(seed=1), *callbacks],
            default_root_dir=folder,
        )
        Wait.seen.clear()
        trainer.fit(module, **({"datamodule": data} if isinstance(data, pl.LightningDataModule) else data))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if isinstance(module, Classifier):
            # The samples are kept in evaluations outside training only. Inference mode has no place in the stand-in.
            trainer.validate_loop.inference_mode = False
            trainer.validate(module, data, verbose=False)
        waits = list(Wait.seen)
    weights = {name: v.raw if isinstance(v, DeviceTensor) else v for name, v in module.state_dict().items()}
    return Run({name: value.detach().clone() for name, value in weights.items()}, metrics, waits)


def fit_on_both(make: Experiment, **settings: Any) -> tuple[Run, Run]:
    """The run on the CPU, and the same on the stand-in device."""
    on_cpu = fit(make, **settings)
    with stand_in_device() as device:
        return on_cpu, fit(make, device, **settings)


def largest_difference(one: Run, other: Run) -> float:
    """Between the weights of two runs."""
    return max(
        float((value.double() - other.weights[name].double()).abs().max()) for name, value in one.weights.items()
    )
