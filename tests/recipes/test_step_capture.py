"""`--cuda-graph`: a step on static tensors gives the weights of an ordinary run to the bit; what cannot be is refused.

A CUDA graph repeats kernels, not Python. `Recording` does that on the CPU: it records the operations of one step, and
repeats them with the same tensors. What a step took from Python, such as a seed or a rate, would stay as it was.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typing_extensions import override

import recipes.recipe
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.freezing import FreezeLayers
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.stateless_dropout import StatelessDropout
from callbacks.seed_control import SeedControl
from callbacks.train_loss import TrainLoss
from callbacks.training_monitor import TrainingMonitor
from callbacks.warmup_lr import WarmupLR
from callbacks.weight_averaging import WeightAveraging
from datamodules.errors import UserError
from datamodules.loading.loaders import TrainLoader
from recipes.classification import Classifier
from recipes.seq2seq import Seq2SeqTranslator
from recipes.step_capture import DirectStep, Runner, StepCapture
from tests.support.tables import CLASSES, QUIET, noisy_images


class Recording(TorchDispatchMode):
    """Records the operations of a step when it is called first, and repeats them from then on."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function, self.outputs = function, None
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def __call__(self) -> Any:
        if self.outputs is None:
            with self:
                self.outputs = self.function()
            return self.outputs
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)
        return self.outputs


class Noisy(Classifier):
    """Convolution, BatchNorm, dropout and a head, for images of 5 x 5."""

    def build_network(self) -> nn.Module:
        torch.manual_seed(3)
        body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), StatelessDropout(0.3), nn.Flatten())
        return nn.Sequential(body, nn.Linear(36, CLASSES))


def train(
    cuda_graph: bool,
    folder: Path | None = None,
    resume: Path | None = None,
    more: tuple[pl.Callback, ...] = (),
    device: str = "cpu",
    recipe: dict[str, Any] | None = None,
    **options: Any,
) -> Noisy:
    """Three epochs of seven batches, of which the last holds two samples."""
    seeds = SeedControl(1)
    module = Noisy(num_classes=CLASSES, cuda_graph=cuda_graph, **(recipe or {}))
    inputs, targets = noisy_images(26)
    loader = TrainLoader(inputs.float(), targets, torch.arange(26), 4, seed=1)
    saving = ExactCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1) if folder else None
    steps = options.pop("steps", 1)
    callbacks = [GradientAccumulation(steps), seeds, WarmupLR("30%"), WeightAveraging(ema=0.9), TrainLoss(), *more]
    settings = {"max_epochs": 3, "enable_progress_bar": False, "enable_checkpointing": folder is not None} | options
    trainer = pl.Trainer(
        **{**QUIET, "accelerator": device, **settings}, callbacks=[*callbacks, *([saving] if saving else [])]
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return module


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[StepCapture]:
    """The captures of the test's runs, each of which runs its steps on static tensors on the CPU."""
    captures: list[StepCapture] = []

    class Kept(StepCapture):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            captures.append(self)

    monkeypatch.setattr(recipes.recipe, "StepCapture", Kept)
    return captures


def on_cpu(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    monkeypatch.setattr(recipes.recipe, "runner_for", lambda _: runner)


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@pytest.mark.parametrize("runner", [DirectStep, Recording])
def test_steps_on_static_tensors_end_with_the_weights_of_an_ordinary_run_also_resumed(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replayed: list[StepCapture]
):
    on_cpu(monkeypatch, runner)
    expected, losses = train(False), {}
    found = train(True, tmp_path)
    assert_equal(found, expected)
    # The first batch of the run and the last of each epoch are not of the captured kind.
    assert replayed[0].replayed == 21 - 1 - 3
    losses = [dict(module.trainer.callback_metrics) for module in (expected, found)]
    assert losses[0] == losses[1]
    for step in (5, 10):
        for cuda_graph in (False, True):
            assert_equal(train(cuda_graph, resume=tmp_path / f"step={step}.ckpt"), expected)


@pytest.mark.parametrize("runner", [DirectStep, Recording])
def test_clipping_and_layers_that_begin_to_train_are_captured(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, replayed: list[StepCapture]
):
    on_cpu(monkeypatch, runner)
    options: dict[str, Any] = {"gradient_clip_val": 0.1, "recipe": {"fused": True}}
    found, expected = (
        train(graph, more=(FreezeLayers(until="1", unfreeze={"0.0": "1 epochs"}),), **options)
        for graph in (True, False)
    )
    assert_equal(found, expected)
    assert replayed[0].replayed


class CountsHooks(Noisy):
    """Counts the calls of its optimiser's hooks, and takes batches of any loader."""

    calls = 0

    @override
    def _check_labels(self, part: str, loaders: Any) -> None:
        self.label_checks[part].all_count = True

    @override
    def configure_optimizers(self) -> Any:
        configured: Any = super().configure_optimizers()

        def count(*_: Any) -> None:
            self.calls += 1

        configured["optimizer"].register_step_post_hook(count)
        return configured


def test_steps_call_the_optimisers_hooks_once_and_leave_the_batches_of_the_user_alone(
    monkeypatch: pytest.MonkeyPatch, replayed: list[StepCapture]
):
    on_cpu(monkeypatch, DirectStep)
    inputs, targets = noisy_images(16)
    batches = [*zip(inputs.float().split(4), targets.split(4), strict=True)]
    kept = [tuple(tensor.clone() for tensor in batch) for batch in batches]
    module = CountsHooks(num_classes=CLASSES, cuda_graph=True)
    trainer = pl.Trainer(**QUIET, max_epochs=2, enable_progress_bar=False, enable_checkpointing=False)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert (module.calls, replayed[0].replayed) == (8, 7)
    for batch, before in zip(batches, kept, strict=True):
        assert all(torch.equal(*pair) for pair in zip(batch, before, strict=True))


def test_what_cannot_be_captured_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="cuda_graph=True needs a CUDA device, and this run is on cpu"):
        train(True)
    on_cpu(monkeypatch, DirectStep)
    for options, message in {
        ("steps", 2): "one micro-batch",
        ("more", (TrainingMonitor(),)): "on_before_optimizer_step of TrainingMonitor .* pass training_monitor=False",
        ("recipe", ("optimizer", "lbfgs")): "whose step needs no loss",
        ("recipe", ("compile", True)): "two ways to launch kernels",
    }.items():
        name, value = options
        with pytest.raises(UserError, match=message):
            train(True, **{name: dict([value]) if name == "recipe" else value})
    with pytest.raises(UserError, match="cuda_graph=True captures batches of one size"):
        Seq2SeqTranslator(source_vocab_size=9, target_vocab_size=9, cuda_graph=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_graph_gives_the_weights_of_ordinary_steps_on_a_gpu(replayed: list[StepCapture]):
    found, expected = train(True, device="cuda"), train(False, device="cuda")
    assert replayed[0].replayed == 21 - 1 - 3
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
