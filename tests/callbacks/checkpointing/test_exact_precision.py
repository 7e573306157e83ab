"""A run in float64 resumes with the weights that were saved."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from datamodules.loading.loaders import TrainLoader
from tests.support.tables import QUIET, Tiny, image_network, noisy_images


def fit(folder: Path, max_epochs: int) -> dict[str, Tensor]:
    inputs, targets = noisy_images(24)
    loader = TrainLoader(inputs, targets, torch.arange(24), batch_size=8, seed=1)
    last = folder / "last.ckpt"
    checkpoint = ExactCheckpoint(folder, save_last=True)
    trainer = pl.Trainer(
        max_epochs=max_epochs, precision="64-true", callbacks=[checkpoint], enable_progress_bar=False, **QUIET
    )
    module = Tiny(image_network().float(), torch.optim.SGD, lr=0.1)
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None, weights_only=True)
    return module.state_dict()


def test_a_run_in_float64_whose_module_is_built_in_float32_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", max_epochs=3)
    for max_epochs in (1, 3):
        resumed = fit(tmp_path / "resumed", max_epochs)
    assert next(iter(whole.values())).dtype == torch.float64
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
