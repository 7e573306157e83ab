from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.step_metrics import FiniteWeights, first_not_finite
from datamodules.errors import UserError
from tests.support.devices import precision_on
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer


class Diverging(Tiny):
    """Its loss is NaN in one batch."""

    def __init__(self, at: int) -> None:
        super().__init__(image_network().float(), torch.optim.SGD, lr=0.1)
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == self.at else loss


def fit(module: pl.LightningModule, folder: Path | None = None, **options: Any) -> pl.Trainer:
    inputs, targets = noisy_images(48)
    saving = [ExactCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, save_last=True)] if folder else []
    trainer = quiet_trainer(FiniteWeights(), *saving, **options)
    trainer.fit(module, DataLoader(TensorDataset(inputs.float(), targets), batch_size=4))
    return trainer


def test_a_diverging_run_stops_before_the_next_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"network\.0\.0\.weight holds NaN .* after update 6 .* finite after update 4"):
        fit(Diverging(at=4), tmp_path)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4


@pytest.mark.parametrize(("interval", "found"), [(9, 9), (50, 12)])
def test_without_checkpoints_it_stops_at_the_next_log_or_end(interval: int, found: int) -> None:
    with pytest.raises(UserError, match=f"after update {found}"):
        fit(Diverging(at=1), log_every_n_steps=interval)


def test_divergence_in_the_last_epoch_names_that_epoch() -> None:
    class Late(Diverging):
        def on_train_epoch_start(self) -> None:
            self.at = 11 if self.current_epoch == 1 else -1

    with pytest.raises(UserError, match=r"after update 24 \(epoch 2\), and all was finite after update 18"):
        fit(Late(at=-1), log_every_n_steps=9, max_epochs=2)


def test_a_nan_whose_update_is_skipped_stops_nothing() -> None:
    trainer = fit(Diverging(at=4), log_every_n_steps=1, **precision_on("cpu", "16-mixed"))
    assert trainer.global_step == 12
    assert first_not_finite(trainer.lightning_module) is None


def test_a_convolution_with_wrong_bf16_gradients_is_rejected() -> None:
    def narrow(width: int) -> Tiny:
        layers = torch.nn.AdaptiveAvgPool2d((4, width)), torch.nn.Conv2d(1, 10, 3, 2, 1)
        return Tiny(torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()), torch.optim.SGD)

    bf16 = precision_on("cpu", "bf16-mixed")
    with pytest.raises(UserError, match=r"network\.1 has a stride of 2 over an input of width 1,.*32-true"):
        fit(narrow(1), **bf16)
    for module, options in ((narrow(2), bf16), (narrow(1), {})):
        fit(module, **options)
        assert not module.network[1]._forward_pre_hooks  # type: ignore[index]


def test_sums_that_overflow_are_no_divergence() -> None:
    layer = torch.nn.Linear(4, 2)
    layer.weight.data.fill_(3e38)
    assert first_not_finite(layer) is None
    layer.weight.data[1, 2] = float("inf")
    assert first_not_finite(layer) == "weight"
    assert first_not_finite(torch.nn.ReLU()) is None
    norm = torch.nn.BatchNorm1d(1)
    norm(torch.tensor([[torch.inf], [1.0]]))
    assert first_not_finite(norm) == "running_mean"


@pytest.mark.parametrize("part", [complex("nan"), complex(0, float("inf"))])
def test_complex_parameters_are_looked_at(part: complex) -> None:
    layer = torch.nn.Module()
    layer.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert first_not_finite(layer) is None
    layer.phase.data[1] = part
    assert first_not_finite(layer) == "phase"
