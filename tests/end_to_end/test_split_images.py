"""Photographs from a folder, archives and the cache on disk, in runs that are cut up, stopped and resumed."""

import hashlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from callbacks import ExactCheckpoint, GradientAccumulation
from datamodules import ImageFolderDataModule
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, on_ranks, silence

GLOBAL_BATCH = 8
EPOCHS = 2
# Large images are cropped by workers and coloured batch-wise; small ones are shifted in memory; mixed ones need two.
SETTINGS: dict[str, dict[str, Any]] = {
    "standard": {"image_size": 64},
    "light": {"image_size": 32, "mixup": 0.3, "cutmix": 1.0},
}
# The kind of file, loader workers, and whether decoded images are kept on disk.
SOURCES = [("folder", 0, False), ("folder", 2, True), ("zip", 2, False), ("zip", 0, True)]


def write_photographs(folder: Path) -> None:
    """21 JPEG files in two classes as ``all`` and ``all.zip``."""
    generator = np.random.default_rng(1)
    for number in range(21):
        place = folder / "all" / ("bees" if number % 3 else "ants")
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(generator.integers(256, size=(6, 8, 3), dtype=np.uint8))
        coarse.resize((96, 72 + number)).save(place / f"{number}.jpg")
    shutil.make_archive(str(folder / "all"), "zip", folder / "all")


class Recorder(pl.LightningModule):
    """An ordinary module that remembers the bits of what it was fed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 2)).double()
        self.seen: list[tuple[int, str]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        self.seen += [(self.global_step, hashlib.sha256(image.numpy().tobytes()).hexdigest()) for image in images]
        return F.cross_entropy(self.network(images.double()), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train(
    root: Path,
    setting: str,
    source: tuple[str, int, bool],
    world_size: int = 1,
    micro_batches: int = 1,
    resume: str = "",
) -> dict[str, Any]:
    """Two epochs, saved after the second update, in the first epoch; or from there to the end."""
    silence()
    kind, workers, kept = source
    data = ImageFolderDataModule(
        data_dir=str(root / ("all" if kind == "folder" else f"all.{kind}")),
        batch_size=GLOBAL_BATCH // world_size // micro_batches,
        val_fraction=0.0,
        num_workers=workers,
        **SETTINGS[setting],
        cache_gb=2.0 if kept else 0.0,
    )
    module = Recorder()
    saves = world_size == micro_batches == 1
    save = ExactCheckpoint(root / "saved" / setting, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[GradientAccumulation(global_batch_size=GLOBAL_BATCH), *([save] if saves else [])],
        enable_checkpointing=saves,
        enable_progress_bar=False,
        **on_ranks(world_size),
        **QUIET,
    )
    trainer.fit(module, data, ckpt_path=resume or None, weights_only=True if resume else None)
    return {"seen": module.seen, "weight": module.network[2].weight.detach().clone()}


def _ranks(root: Path) -> dict[str, dict[str, Any]]:
    """What a rank saw: the processes start once."""
    found = {}
    for setting in SETTINGS:
        for source in SOURCES:
            found[f"{setting}: {source}"] = _train(root, setting, source, 2, 2 if source[1] else 1)
        checkpoint = str(root / "saved" / setting / "step=2.ckpt")
        found[f"{setting}: resumed"] = _train(root, setting, ("zip", 2, True), 2, 1, checkpoint)
    return found


def _updates(runs: list[dict[str, Any]]) -> dict[int, Counter[str]]:
    updates: dict[int, Counter[str]] = {}
    for update, bits in (seen for run in runs for seen in run["seen"]):
        updates.setdefault(update, Counter())[bits] += 1
    return updates


def test_photographs_reach_the_network_with_the_same_bits_wherever_they_lie_and_however_a_run_is_cut(
    tmp_path: Path,
) -> None:
    write_photographs(tmp_path)
    whole = {setting: _train(tmp_path, setting, SOURCES[0]) for setting in SETTINGS}
    ranks = run_ranks(_ranks, 2, tmp_path)
    found = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    for setting in SETTINGS:
        for source in SOURCES[1:]:
            found[f"{setting}: alone, {source}"] = [_train(tmp_path, setting, source, 1, 2)]
    for name, runs in found.items():
        expected = whole[name.partition(": ")[0]]
        updates = _updates([expected])
        assert len(updates) == EPOCHS * 3
        assert len(set().union(*updates.values())) == EPOCHS * 21
        left = {update: seen for update, seen in updates.items() if update >= 2 or "resumed" not in name}
        assert _updates(runs) == left, name
        for run in runs:
            largest = float((run["weight"] - expected["weight"]).abs().max() / expected["weight"].abs().max())
            assert largest < 1e-12, name
