"""Nothing in a step waits for the device, in training and validation, in all recipes and all callbacks.

Each run is a real Trainer on the stand-in device (`tests.rehearsal.stand_in`), which finds what
``torch.cuda.set_sync_debug_mode("error")`` finds on a GPU, and says who asked and at which update. Its numbers are
real, so the same runs show that nothing is read before it has arrived: their weights are those of the CPU.

The meta device finds less. It has no numbers, so no run gets past a mask, a search or a figure. It refuses ``item()``
and a mixture with tensors of the CPU, but no copy to the host or to the device.

The places in `MEANT` wait on purpose, each only when it says. What is not shown stands in the module of the device: the
inside of CUDA's kernels, cuDNN and NCCL, streams, the allocator.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.train_loss import TrainLoss
from datamodules import ImageFolderDataModule, MNISTDataModule, TranslationDataModule
from recipes import MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator
from tests.rehearsal.runs import LOG_EVERY, fit, fit_on_both, largest_difference
from tests.rehearsal.stand_in import Wait, stand_in_device
from tests.support.ranks import run_ranks
from tests.support.tables import (
    CALLBACKS,
    PADDING,
    TOGETHER,
    Tiny,
    image_network,
    noisy_images,
    sentence_network,
    sentences,
)


class Meant(NamedTuple):
    """A place that waits, and when.

    Args:
        when: whether it may, by the wait.
    """

    phase: str
    when: Callable[[Wait], bool]
    why: str


def at_logs(wait: Wait, every: int = LOG_EVERY) -> bool:
    """Once per log interval, and at the end of an epoch."""
    return wait.update % every == 0 or wait.last


def in_the_first_batch(wait: Wait) -> bool:
    """Of a run."""
    return wait.update == 0 and wait.batch <= 0


def in_each(wait: Wait) -> bool:
    """Batch."""
    return True


_TRAINING, _VALIDATION = "training step", "validation step"
MEANT = {
    "callbacks/train_loss.py:_totals": Meant(_TRAINING, at_logs, "the loss that is logged"),
    "callbacks/training_monitor.py:on_train_batch_end": Meant(
        _TRAINING, functools.partial(at_logs, every=2), "the norms that are logged, every 2 updates in the table"
    ),
    "lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py:log_metrics": Meant(
        _TRAINING, at_logs, "what a user's step logs"
    ),
    "callbacks/finite_weights.py:first_not_finite": Meant(_TRAINING, at_logs, "a run that has diverged ends"),
    "callbacks/lib/targets.py:warn_of_ignored_targets": Meant(
        _TRAINING, in_the_first_batch, "a warning of labels that are left out"
    ),
    "callbacks/drawing/classification_images.py:on_train_batch_start": Meant(
        _TRAINING, in_the_first_batch, "the images that are drawn"
    ),
    "datamodules/images/data_module.py:_normalise": Meant(
        _TRAINING, in_the_first_batch, "mean and deviation go to the device"
    ),
    "recipes/seq2seq/decoding.py:beam_search": Meant(_VALIDATION, in_each, "a search ends when its sentences end"),
    "recipes/seq2seq/translator.py:_evaluation_step": Meant(_VALIDATION, in_each, "translations become text"),
    "recipes/seq2seq/translator.py:_attention": Meant(_VALIDATION, in_each, "a few translations are drawn"),
}


def refused(waits: Sequence[Wait]) -> list[str]:
    """The waits in steps that are not meant."""
    found = []
    for wait in waits:
        meant = MEANT.get(wait.site)
        if wait.phase != "elsewhere" and not (meant and meant.phase == wait.phase and meant.when(wait)):
            found.append(repr(wait))
    return found


def _rows(run: Any) -> list[tuple[str, str, str, int]]:
    return [(wait.phase, wait.site, wait.operation, wait.update) for wait in run.waits if wait.phase != "elsewhere"]


def _loaders(data: tuple[Tensor, ...], batch_size: int = 4) -> dict[str, Any]:
    loaders = [DataLoader(TensorDataset(*data), size) for size in (batch_size, 2 * batch_size)]
    return {"train_dataloaders": loaders[0], "val_dataloaders": loaders[1]}


def _images(names: Sequence[str], dropout: float = 0.2, others: Sequence[pl.Callback] = ()) -> Any:
    inputs, targets = noisy_images(22)
    module = Tiny(image_network(dropout).float(), torch.optim.AdamW, lr=0.01)
    callbacks = [CALLBACKS[name]() for name in names if name != "SeedControl"]
    return module, _loaders((inputs.float(), targets)), [*callbacks, *others]


class LogsItsLoss(Tiny):
    """A user's module that logs in every step, and counts targets by a mask."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.log("loss", found["loss"], on_step=True, on_epoch=True)
        return found


def _sentences() -> Any:
    module = LogsItsLoss(sentence_network(), torch.optim.SGD, lr=0.1, fused=True)
    return module, _loaders(sentences(22)), [GradientAccumulation(2), TrainLoss("train/loss")]


def _mnist() -> Any:
    data = MNISTDataModule("digits", batch_size=32, eval_batch_size=32)
    return MNISTClassifier(network="classic", fused=True, tta="crops"), data, []


def _resnet() -> Any:
    data = ImageFolderDataModule("digits", batch_size=4, eval_batch_size=4, image_size=32, num_workers=0)
    recipe = ResNetFineTuner(weights="none", num_classes=10, image_size=32, freeze_until="layer3", optimizer="sgd")
    return recipe, data, []


def _translator(**options: Any) -> Any:
    data = TranslationDataModule(batch_size=8, eval_batch_size=8)
    settings = Seq2SeqTranslator.settings_from_data(data)
    return Seq2SeqTranslator(**settings, **options), data, []


_FEW = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1, "enable_progress_bar": False}
RUNS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "every callback": (functools.partial(_images, TOGETHER), {}),
    "SWA": (functools.partial(_images, ["RunProgress", "WeightAveraging, SWA"]), {"gradient_clip_val": 0.1}),
    "a module that logs in each step": (_sentences, {"enable_progress_bar": False}),
    "mnist": (_mnist, _FEW),
    "resnet": (_resnet, _FEW),
    "seq2seq": (_translator, _FEW),
    "seq2seq, Transformer": (functools.partial(_translator, network="transformer"), _FEW),
}


def _rehearse(names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        make, settings = RUNS[name]
        on_cpu, on_device = fit_on_both(make, **settings)
        found[name] = refused(on_device.waits), _rows(on_device), largest_difference(on_cpu, on_device)
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
    """The GRU and the attention of accelerators are other formulas than the CPU's; all else is equal to the bit."""
    assert rehearsal()[name][2] <= {"seq2seq": 1e-5, "seq2seq, Transformer": 1e-4}.get(name, 0.0)


def test_each_place_that_may_wait_does() -> None:
    rows = [row for _, found, _ in rehearsal().values() for row in found]
    print(f"{'in a':<16}{'where':<68} {'operations':<44}why")
    for site, meant in MEANT.items():
        operations = sorted({operation for _, where, operation, _ in rows if where == site})
        print(f"{meant.phase:<16}{site:<68} {', '.join(operations):<44}{meant.why}")
        assert operations, f"{site} does not wait: it needs no line here"


class Place(NamedTuple):
    """What a hook has at hand."""

    weight: Tensor
    inputs: Tensor
    targets: Tensor


Fault = Callable[[Place], Any]


class Planted(pl.Callback):
    """A fault in a hook of the training or validation step."""

    def __init__(self, hook: str, fault: Fault) -> None:
        def run(trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            batch = next(arg for arg in args if isinstance(arg, (list, tuple)))
            fault(Place(pl_module.network[1].weight, *batch))

        setattr(self, hook, run)


FAULTS: dict[str, Fault] = {
    "item": lambda at: at.weight.sum().item(),
    "float": lambda at: float(at.weight.sum()),
    "bool": lambda at: bool((at.weight > 0).any()),
    "tolist": lambda at: at.targets.tolist(),
    "cpu": lambda at: at.weight.detach().cpu(),
    "nonzero": lambda at: at.targets.nonzero(),
    "a mask as index": lambda at: at.inputs[at.targets > 1],
    "an index of the CPU": lambda at: at.inputs[torch.tensor([0])],
    "a list as index": lambda at: at.weight.detach()[:, [0, 1]],
    "masked_select": lambda at: at.weight.detach().masked_select(at.weight > 0),
    "unique": lambda at: at.targets.unique(),
    "bincount": lambda at: at.targets.bincount(),
    "equal": lambda at: torch.equal(at.weight, at.weight),
    "allclose": lambda at: torch.allclose(at.weight, at.weight),
    "a tensor from a number": lambda at: torch.tensor(0.5, device=at.weight.device),
    "a blocking transfer": lambda at: torch.zeros(3).to(at.weight.device),
    "copy_": lambda at: torch.zeros_like(at.weight, device="cpu").copy_(at.weight.detach()),
    "synchronize": lambda at: torch.get_device_module(at.weight.device).synchronize(),
}
GOOD: dict[str, Fault] = {
    "full": lambda at: torch.full((), 0.5, device=at.weight.device) + at.weight.detach(),
    "where": lambda at: torch.where(at.weight > 0, at.weight, 0.0).sum(),
    "a copy behind the work": lambda at: at.weight.detach().to("cpu", non_blocking=True),
    "a scalar of the CPU": lambda at: at.weight.detach() * torch.tensor(2.0),
}
MIXED: dict[str, Fault] = {
    "a tensor of the CPU": lambda at: at.weight + torch.zeros(5, 36),
    "weights of the CPU": lambda at: at.weight @ torch.zeros(36, 3),
    "targets of the CPU": lambda at: torch.stack((at.weight.sum(), torch.tensor(1.0))),
}
HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end")


def _plant() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with stand_in_device() as device:
        for number, (name, fault) in enumerate({**FAULTS, **GOOD}.items()):
            for hook in HOOKS if name == "item" else (HOOKS[number % 4],):
                make = functools.partial(_images, [], 0.0, [Planted(hook, fault)])
                waits = fit(make, device, max_epochs=1, limit_train_batches=1, enable_progress_bar=False).waits
                found[f"{name}, {hook}"] = refused(waits)
        for name, fault in MIXED.items():
            with pytest.raises(RuntimeError, match="same device") as error:
                fit(functools.partial(_images, [], 0.0, [Planted("on_train_batch_end", fault)]), device)
            found[f"{name}, on_train_batch_end"] = [str(error.value)]
    return found


def test_a_planted_wait_or_tensor_of_the_cpu_is_found() -> None:
    found = run_ranks(_plant, 1)[0]
    for name, waits in found.items():
        planted = name.split(", on_")[0]
        assert bool(waits) == (planted not in GOOD), f"{name}: {waits}"
    assert sum(name.startswith("item") for name in found) == len(HOOKS)


class ReadsItsLoss(Tiny):
    """A user's step that reads a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert loss.item() > 0
        return loss


class ReadsGradients(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        assert nn.utils.get_total_norm([p.grad for p in pl_module.parameters()]).item() > 0


def _plant_in_step() -> list[list[str]]:
    with stand_in_device() as device:
        module = ReadsItsLoss(image_network().float(), torch.optim.SGD, lr=0.1)
        of_step = fit(lambda: (module, _images([])[1], []), device, max_epochs=1, enable_progress_bar=False)
        of_hook = fit(lambda: _images([], 0.0, [ReadsGradients()]), device, max_epochs=1, enable_progress_bar=False)
    return [refused(of_step.waits), refused(of_hook.waits)]


def test_a_step_that_reads_its_loss_is_found_in_each_batch() -> None:
    of_step, of_hook = run_ranks(_plant_in_step, 1)[0]
    assert len(of_step) == len(of_hook) == 6
    assert "test_no_synchronisation.py:training_step" in of_step[0]
    assert "test_no_synchronisation.py:on_before_optimizer_step" in of_hook[0]


def test_padding_is_what_the_sentences_hold() -> None:
    assert (sentences(22)[1] == PADDING).any()
