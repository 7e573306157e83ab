"""A second `fit` on one Trainer: callbacks that have been in the first do what new ones would."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.seed_control import SeedControl
from callbacks.warmup_lr import WarmupLR
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.end_to_end.test_exact_resume import TRAIN, VALIDATION, adamw, hash_of
from tests.support.tables import CALLBACKS, TOGETHER, Tiny, image_network, quiet_trainer

# In steps: one in per cent continues at the fraction that it had reached of a shorter run, as after a resume.
MAKE = CALLBACKS | {"WarmupLR": lambda: WarmupLR("30 steps", scale="linear", base_batch_size=8)}
ROWS: dict[str, tuple[str, ...]] = {name: (name,) for name in CALLBACKS} | {"together": TOGETHER}


def callbacks(names: tuple[str, ...], folder: Path) -> list[pl.Callback]:
    """New ones, of the table and what saves."""
    seeds = [] if "SeedControl" in names else [SeedControl(1)]
    saves = [ExactCheckpoint(folder, "best", monitor="val_loss", last_every="3 steps")]
    return [*seeds, *(MAKE[name]() for name in names), *saves]


def two_fits(names: tuple[str, ...], folder: Path, renewed: bool, other_module: bool) -> list[Any]:
    """The weights after two fits, in which `max_epochs` is raised, and what the last checkpoint of the second says."""
    trainer, module = quiet_trainer(*callbacks(names, folder)), Tiny(image_network(dropout=0.3), adamw)
    for epochs in (1, 2):
        train = TrainLoader(*TRAIN, torch.arange(len(TRAIN[1])), 4, 1)
        validation = EvaluationLoader(*VALIDATION, torch.arange(9), 4)
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, train, validation)
        assert trainer.current_epoch == epochs
        if epochs == 1:
            if renewed:
                trainer.callbacks = callbacks(names, folder)
            module = Tiny(image_network(dropout=0.3), adamw) if other_module else module
    saved = torch.load(folder / "last.ckpt", weights_only=False)
    assert saved["global_step"] == trainer.global_step
    assert trainer.optimizers[0].state_dict()["param_groups"][0]["lr"] == pytest.approx(
        saved["optimizer_states"][0]["param_groups"][0]["lr"]
    )
    return [hash_of(module), trainer.global_step, trainer.accumulate_grad_batches]


@pytest.mark.parametrize("name", ROWS)
def test_used_callbacks_act_in_a_second_fit_as_new_ones(name: str, tmp_path: Path) -> None:
    for other_module in (True, False) if name == "together" else (True,):
        used, new = (two_fits(ROWS[name], tmp_path / str(renewed), renewed, other_module) for renewed in (False, True))
        assert used == new
