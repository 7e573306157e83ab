"""A run that ``max_steps`` has ended, in mid-epoch or at an epoch's end, resumes as if it had not been."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.stopping_points import uncount_cut_epoch
from callbacks.lib.lightning_internals import uncount_update
from callbacks.seed_control import SeedControl
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, Tiny, image_network, noisy_images

BATCHES = 13  # In an epoch: 50 pictures in batches of 4.


class Witness(pl.Callback):
    """Which epoch and batch each update came from, by Lightning's own counters."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.current_epoch, batch_idx))


def _fit(folder: str, max_steps: int, resume: str | None = None) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    seeds, witness = SeedControl(seed=1), Witness()
    module = Tiny(image_network(dropout=0.3).float(), torch.optim.AdamW, lr=0.01)
    inputs, targets = noisy_images(50)
    trainer = pl.Trainer(
        **(QUIET | {"max_epochs": 5, "max_steps": max_steps, "enable_progress_bar": False}),
        callbacks=[seeds, witness, ExactCheckpoint(folder, filename="last", enable_version_counter=False)],
    )
    loader = TrainLoader(inputs.float(), targets, torch.arange(50), batch_size=4, seed=1)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=True)
    return module.state_dict(), witness.seen


def _whole_and_cut(folder: str, cuts: tuple[int, ...], end: int) -> Any:
    whole = _fit(f"{folder}/whole", end)
    seen: list[tuple[int, int]] = []
    checkpoint = None
    for max_steps in (*cuts, end):
        weights, now = _fit(f"{folder}/cut", max_steps, checkpoint)
        checkpoint, seen = f"{folder}/cut/last.ckpt", seen + now
    return whole, (weights, seen)


def test_a_run_ended_by_max_steps_goes_on_exactly(tmp_path: Path) -> None:
    cuts = (5, BATCHES, 20, 2 * BATCHES)
    (((whole, whole_seen), (cut, cut_seen)),) = run_ranks(_whole_and_cut, 1, str(tmp_path), cuts, 30)
    assert cut_seen == whole_seen
    assert whole_seen[BATCHES - 1 : BATCHES + 1] == [(0, BATCHES - 1), (1, 0)]
    assert all(torch.equal(cut[name], value) for name, value in whole.items())


def test_only_the_counters_of_a_cut_epoch_are_moved() -> None:
    def loop(processed: int, last: bool, batches: int) -> dict[str, Any]:
        epoch = {"ready": 2, "started": 2, "processed": processed, "completed": 1}
        batch = {"ready": batches, "started": batches, "processed": batches, "completed": batches}
        return {
            "epoch_progress": {"total": dict(epoch), "current": dict(epoch)},
            "epoch_loop.batch_progress": {"total": dict(batch), "current": dict(batch), "is_last_batch": last},
            "epoch_loop.state_dict": {"_batches_that_stepped": 20},
        }

    cut = loop(processed=2, last=False, batches=7)
    if uncount_cut_epoch(cut):
        uncount_update(cut)
    assert cut["epoch_progress"]["current"]["processed"] == cut["epoch_progress"]["total"]["processed"] == 1
    assert cut["epoch_loop.batch_progress"]["current"]["completed"] == 6
    assert cut["epoch_loop.state_dict"]["_batches_that_stepped"] == 19
    for untouched in (loop(processed=2, last=True, batches=13), loop(processed=1, last=False, batches=7), cut):
        before = repr(untouched)
        assert not uncount_cut_epoch(untouched)
        assert repr(untouched) == before
