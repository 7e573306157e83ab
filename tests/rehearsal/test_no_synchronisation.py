"""Nothing in a step waits for the device, in training and validation, in all recipes and all callbacks.

Each run is a real Trainer on the stand-in device (`tests.rehearsal.stand_in`). Its numbers are real, so the same runs
show that nothing is read before it has arrived: their weights are those of the CPU.

The places in `MEANT` wait on purpose, each only when it says. What is not shown stands in the module of the device: the
inside of CUDA's kernels, cuDNN and NCCL, streams, the allocator.
"""

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.seed_control import SeedControl
from datamodules import ImageFolderDataModule, MNISTDataModule, TranslationDataModule
from recipes import MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator
from recipes.classifier import Classifier
from recipes.dropout import Dropout
from tests.rehearsal.stand_in import DeviceTensor, StandInAccelerator, Wait, stand_in_device
from tests.support.ranks import run_ranks
from tests.support.tables import CALLBACKS, TOGETHER, Tiny, image_network, noisy_images, quiet_trainer

LOG_EVERY = 3


class Run(NamedTuple):
    """What a run leaves: its weights, as CPU tensors, and where the host waited."""

    weights: dict[str, Tensor]
    waits: list[Wait]


Experiment = Callable[[], tuple[pl.LightningModule, Any, Sequence[pl.Callback]]]
"""Makes a module, its data (a data module, or loaders of training and validation) and callbacks."""


def fit(make: Experiment, device: torch.device | None = None, **settings: Any) -> Run:
    """Train, and validate a classifier after it; on the CPU without a device."""
    SeedControl(seed=1)
    module, data, callbacks = make()
    if device is not None:
        strategy = SingleDeviceStrategy(device=device, accelerator=StandInAccelerator())
        settings = {"accelerator": "auto", "strategy": strategy} | settings
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_epochs": 2, "log_every_n_steps": LOG_EVERY, "logger": TensorBoardLogger(folder)} | settings
        trainer = quiet_trainer(SeedControl(seed=1), *callbacks, default_root_dir=folder, **settings)
        Wait.seen.clear()
        trainer.fit(module, **({"datamodule": data} if isinstance(data, pl.LightningDataModule) else data))
        if isinstance(module, Classifier):
            # The samples are kept in evaluations outside training only. Inference mode has no place in the stand-in.
            trainer.validate_loop.inference_mode = False
            trainer.validate(module, data, verbose=False)
        waits = list(Wait.seen)
    weights = {name: v.raw if isinstance(v, DeviceTensor) else v for name, v in module.state_dict().items()}
    return Run({name: value.detach().clone() for name, value in weights.items()}, waits)


def largest_difference(one: Run, other: Run) -> float:
    """Between the weights of two runs."""
    return max(float((v.double() - other.weights[name].double()).abs().max()) for name, v in one.weights.items())


def at_logs(wait: Wait) -> bool:
    """Once per log interval, and at the end of an epoch."""
    return wait.update % LOG_EVERY == 0 or wait.last


def in_the_first_batch(wait: Wait) -> bool:
    """Of a run."""
    return wait.update == 0 and wait.batch <= 0


TRAINING, VALIDATION = "training step", "validation step"
MEANT: dict[str, tuple[str, Callable[[Wait], bool]]] = {
    "callbacks/step_metrics.py:_read": (TRAINING, at_logs),
    # A line of progress has the loss of the epoch so far. It is drawn by the clock, and not in each step.
    "callbacks/step_metrics.py:running": (TRAINING, bool),
    "callbacks/run_progress.py:_loss_and_rate": (TRAINING, bool),
    "callbacks/lib/targets.py:warn_of_ignored_targets": (TRAINING, in_the_first_batch),
    # Mean and deviation go to the device.
    "datamodules/images/augmentation.py:normalizer": (TRAINING, in_the_first_batch),
    # A search ends when its sentences end, and translations become text.
    "recipes/seq2seq/decoding.py:_search": (VALIDATION, bool),
    "recipes/seq2seq/recipe.py:_evaluation_step": (VALIDATION, bool),
}
"""The places that wait, and when they may."""


def rejected(waits: Sequence[Wait]) -> list[str]:
    """The waits in steps that are not meant."""
    found = []
    for wait in waits:
        phase, when = MEANT.get(wait.site, ("", bool))
        if wait.phase != "elsewhere" and not (phase == wait.phase and when(wait)):
            found.append(repr(wait))
    return found


def _sites(run: Run) -> set[str]:
    return {wait.site for wait in run.waits if wait.phase != "elsewhere"}


def _loaders(data: tuple[Tensor, ...], batch_size: int = 4) -> dict[str, Any]:
    loaders = [DataLoader(TensorDataset(*data), size) for size in (batch_size, 2 * batch_size)]
    return {"train_dataloaders": loaders[0], "val_dataloaders": loaders[1]}


def _images(names: Sequence[str], dropout: float = 0.2, others: Sequence[pl.Callback] = ()) -> Any:
    inputs, targets = noisy_images(22)
    module = Tiny(image_network(dropout).float(), torch.optim.AdamW, lr=0.01)
    callbacks = [CALLBACKS[name]() for name in names if name != "SeedControl"]
    return module, _loaders((inputs.float(), targets)), [*callbacks, *others]


class _Fused(MNISTClassifier):
    """Takes the kernel for the whole update on the stand-in, too, as it does on the CPU."""

    def configure_optimizers(self) -> Any:
        chosen: Any = super().configure_optimizers()
        for group in chosen["optimizer"].param_groups:
            group["fused"] = True
        return chosen


def _mnist() -> Any:
    return _Fused(network="classic"), MNISTDataModule("digits", batch_size=32, eval_batch_size=32), []


def _resnet() -> Any:
    data = ImageFolderDataModule("digits", batch_size=4, eval_batch_size=4, image_size=32, num_workers=0)
    recipe = ResNetFineTuner(weights="none", num_classes=10, image_size=32, freeze_until="layer3", optimizer="sgd")
    return recipe, data, []


def _translator() -> Any:
    """The Transformer: the GRU of accelerators is a kernel that the CPU does not have."""
    data = TranslationDataModule(batch_size=8, eval_batch_size=4)
    settings = Seq2SeqTranslator.settings_from_data(data)
    sizes = {"hidden_size": 16, "num_layers": 1, "feedforward_size": 16}
    return Seq2SeqTranslator(**settings, network="transformer", **sizes), data, []


_FEW = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1}
RUNS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "every callback": (functools.partial(_images, TOGETHER), {"gradient_clip_val": 0.1}),
    "mnist": (_mnist, _FEW),
    "resnet": (_resnet, _FEW),
    "seq2seq": (_translator, _FEW),
}


def _drop_nothing(_: nn.Module, input: Tensor) -> Tensor:
    return input


def _rehearse(names: Sequence[str]) -> dict[str, Any]:
    found = {}
    # The mask on a CPU is not torch's.
    Dropout.forward = _drop_nothing  # type: ignore[method-assign]
    for name in names:
        make, settings = RUNS[name]
        on_cpu = fit(make, **settings)
        with stand_in_device() as device:
            on_device = fit(make, device, **settings)
        found[name] = rejected(on_device.waits), _sites(on_device), largest_difference(on_cpu, on_device)
    return found


@functools.cache
def rehearsal() -> dict[str, Any]:
    """Of each run what waited and should not, all that waited in steps, and the distance from the CPU's weights."""
    return run_ranks(_rehearse, 1, list(RUNS))[0]


@pytest.mark.parametrize("name", RUNS)
def test_no_step_waits_for_the_device(name: str) -> None:
    waited, _, _ = rehearsal()[name]
    assert not waited, "\n".join(waited)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_an_accelerator_has_the_weights_of_the_cpu(name: str) -> None:
    """The attention of accelerators is another formula than the CPU's; all else is equal to the bit."""
    assert rehearsal()[name][2] <= (1e-4 if name == "seq2seq" else 0.0)


def test_each_place_that_may_wait_does() -> None:
    waited = set().union(*(found for _, found, _ in rehearsal().values()))
    assert not MEANT.keys() - waited, "they do not wait: they need no line here"


class Planted(pl.Callback):
    """A fault in a hook of the training or validation step; it takes a weight and the targets of a batch."""

    def __init__(self, hook: str, fault: Callable[[Tensor, Tensor], Any]) -> None:
        def run(trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            batch = next(arg for arg in args if isinstance(arg, (list, tuple)))
            fault(pl_module.network[1].weight, batch[1])

        setattr(self, hook, run)


FAULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda weight, _: weight.sum().item(),
    "cpu": lambda weight, _: weight.detach().cpu(),
    "nonzero": lambda _, targets: targets.nonzero(),
    "a mask as index": lambda _, targets: targets[targets > 1],
    "an index of the CPU": lambda weight, _: weight[torch.tensor([0])],
    "a tensor from a number": lambda weight, _: torch.tensor(0.5, device=weight.device),
    "a blocking transfer": lambda weight, _: torch.zeros(3).to(weight.device),
    "synchronize": lambda weight, _: torch.get_device_module(weight.device).synchronize(),
    # These do not wait.
    "where": lambda weight, _: torch.where(weight > 0, weight, 0.0).sum(),
    "a copy behind the work": lambda weight, _: weight.detach().to("cpu", non_blocking=True),
    "a scalar of the CPU": lambda weight, _: weight.detach() * torch.tensor(2.0),
}
GOOD = ("where", "a copy behind the work", "a scalar of the CPU")


def _plant() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with stand_in_device() as device:
        for number, (name, fault) in enumerate(FAULTS.items()):
            hook = ("on_train_batch_end", "on_validation_batch_end")[number % 2]
            make = functools.partial(_images, [], 0.0, [Planted(hook, fault)])
            waits = fit(make, device, max_epochs=1, limit_train_batches=1).waits
            found[name] = rejected(waits)
        mixed = Planted("on_train_batch_end", lambda weight, _: weight + torch.zeros(5, 36))
        with pytest.raises(RuntimeError, match="same device"):
            fit(functools.partial(_images, [], 0.0, [mixed]), device)
    return found


def test_a_planted_wait_or_tensor_of_the_cpu_is_found() -> None:
    for name, waits in run_ranks(_plant, 1)[0].items():
        assert bool(waits) == (name not in GOOD), f"{name}: {waits}"
