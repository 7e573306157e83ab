"""What makes a step cheaper changes nothing that it computes."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from callbacks import NoProfiler, SkipUnusedHooks
from callbacks.fast_path.unused_hooks import STEP_HOOKS
from recipes.optim import Schedule
from tests.support.tables import QUIET, Tiny, image_network, noisy_images

ROOT = Path(__file__).parents[3]


class Empty(pl.Callback):
    """Overrides no hook of a step."""


class Counting(pl.Callback):
    """Overrides one, and looks what Lightning would call of the others."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: set[str] = set()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls += 1
        empty = next(callback for callback in trainer.callbacks if isinstance(callback, Empty))  # type: ignore[attr-defined]
        self.seen |= {name for name in STEP_HOOKS if callable(getattr(empty, name))}
        self.seen |= {name for name in STEP_HOOKS if callable(getattr(pl_module, name))}


def fit(*callbacks: pl.Callback, **options: Any) -> Tiny:
    torch.manual_seed(1)
    model = Tiny(image_network().double(), torch.optim.SGD, lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*noisy_images(24)), batch_size=4)
    options = {"max_epochs": 2, "enable_progress_bar": False, "enable_checkpointing": False} | options
    pl.Trainer(callbacks=list(callbacks), **(QUIET | options)).fit(model, loader)
    return model


def test_hooks_that_nobody_has_overridden_are_not_called_and_weights_stay_equal() -> None:
    counting, empty, calls = Counting(), Empty(), []
    instance_hook = LambdaCallback(on_before_zero_grad=lambda *_: calls.append(1))
    model = fit(counting, empty, instance_hook, SkipUnusedHooks(), profiler=NoProfiler())
    expected = fit(Counting(), Empty()).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert (counting.calls, len(calls)) == (12, 12)
    assert counting.seen == set()
    # All is as before when the training has ended.
    assert all(callable(getattr(owner, name)) for owner in (empty, model) for name in STEP_HOOKS)
    assert not set(STEP_HOOKS) & (vars(empty).keys() | vars(model).keys())


def test_hooks_are_shown_again_after_an_exception() -> None:
    class Failing(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("in the step")

    empty = Empty()
    with pytest.raises(RuntimeError, match="in the step"):
        fit(empty, Failing(), SkipUnusedHooks())
    assert all(callable(getattr(empty, name)) for name in STEP_HOOKS)


def test_a_hook_put_on_an_instance_during_training_stays() -> None:
    empty = Empty()

    class Putting(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            empty.on_after_backward = print  # type: ignore[method-assign]

    fit(empty, Putting(), SkipUnusedHooks())
    assert empty.on_after_backward is print


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_schedule_steps_as_lambda_lr_to_the_bit(as_tensor: bool) -> None:
    def rates(kind: type[LambdaLR]) -> tuple[list[list[float]], dict[str, Any]]:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.03)]
        if as_tensor:
            groups = [group | {"lr": torch.tensor(group["lr"])} for group in groups]
        optimizer = torch.optim.AdamW(groups)
        scheduler = kind(optimizer, lambda step: 1 / (1 + step / 7))
        found = []
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            found.append([float(group["lr"]) for group in optimizer.param_groups])
            assert [float(rate) for rate in scheduler.get_last_lr()] == found[-1]
        return found, copy.deepcopy(scheduler.state_dict())

    (ours, our_state), (expected, state) = rates(Schedule), rates(LambdaLR)
    assert ours == expected
    assert {key: our_state[key] for key in ("last_epoch", "_step_count")} == {"last_epoch": 5, "_step_count": 6}
    assert our_state.keys() - {"_stale"} == state.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to look for")
def test_without_a_gpu_adam_no_longer_searches_for_one_in_each_step() -> None:
    code = (
        "import os, lightning.pytorch, torch\n"
        "from recipes.launch.host_tuning import stop_gpu_search\n"
        "stop_gpu_search()\n"
        "opened = []\n"
        "import sys\n"
        "sys.addaudithook(lambda event, args: opened.append(args[0]) if event == 'ctypes.dlopen' else None)\n"
        "weight = torch.nn.Parameter(torch.zeros(2)); optimizer = torch.optim.AdamW([weight])\n"
        "weight.grad = torch.ones(2); optimizer.step()\n"
        "print(opened, os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
    assert found.stdout == "[] 0\n", found.stderr
