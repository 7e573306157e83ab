"""Images that are cut up, stopped and resumed reach the network with the same bits, and are scored alike.

Photographs from a folder, archives and the cache on disk; digits in memory, of which the last update has one sample, so
that one of two processes has none. And classes that are balanced are, however a run is cut.
"""

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
from callbacks.lib.targets import micro_batch_outputs
from datamodules import ImageFolderDataModule, MNISTDataModule
from recipes import MNISTClassifier
from recipes.scores import ClassificationScores
from tests.support.ranks import run_ranks
from tests.support.tables import equal, quiet_trainer

GLOBAL_BATCH = 8
EPOCHS = 2
# Large images are cropped by workers and colored batch-wise; small ones are shifted in memory; mixed ones need two.
SETTINGS: dict[str, dict[str, Any]] = {
    "standard": {"image_size": 64},
    "light": {"image_size": 32, "mixup": 0.3, "cutmix": 1.0},
    "digits": {},
}
SAMPLES = {"standard": 21, "light": 21, "digits": 17}
TEST_SIZES = (50, 1)
Source = tuple[str, int, bool]
"""The kind of file, loader workers, and whether decoded images are kept on disk."""
FOLDER: Source = ("folder", 0, False)
RUNS: list[tuple[str, Source]] = [
    ("standard", ("folder", 2, True)),
    ("standard", ("zip", 2, False)),
    ("light", ("zip", 0, True)),
    ("digits", FOLDER),
]


def write_photographs(folder: Path) -> None:
    """21 JPEG files in two classes as ``all`` and ``all.zip``."""
    generator = np.random.default_rng(1)
    for number in range(21):
        place = folder / "all" / ("bees" if number % 3 else "ants")
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(generator.integers(256, size=(6, 8, 3), dtype=np.uint8))
        coarse.resize((96, 72 + number)).save(place / f"{number}.jpg")
    shutil.make_archive(str(folder / "all"), "zip", folder / "all")


def _photographs(root: Path, setting: str, source: Source, batch_size: int) -> ImageFolderDataModule:
    kind, workers, kept = source
    return ImageFolderDataModule(
        data_dir=str(root / ("all" if kind == "folder" else "all.zip")),
        batch_size=batch_size,
        val_fraction=0.0,
        num_workers=workers,
        **SETTINGS[setting],
        cache_gb=2.0 if kept else 0.0,
    )


def _digits(batch_size: int, test: int) -> MNISTDataModule:
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.rand(80, 28, 28, generator=generator), torch.arange(80) % 10
    data = MNISTDataModule(batch_size=batch_size, eval_batch_size=4, val_fraction=0.0, num_classes=10)
    data.set_samples({"train": (images[:17], labels[:17]), "test": (images[-test:], labels[-test:])})
    return data


class Recorder(pl.LightningModule):
    """An ordinary module that remembers the bits of what it was fed."""

    def __init__(self, channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, classes)).double()
        self.fed: list[tuple[int, str]] = []
        self.seen: list[tuple[int, str]] = []
        self.scores = ClassificationScores(classes)
        self.found: dict[str, Tensor] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        self.fed += [(self.global_step, hashlib.sha256(image.numpy().tobytes()).hexdigest()) for image in images]
        return F.cross_entropy(self.network(images.double()), targets)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Where an update has no micro-batch for this rank, what stood in does not count.
        self.seen += self.fed if micro_batch_outputs(outputs) else []
        self.fed = []

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.scores.update(self.network(batch[0].double()), batch[1])

    def on_test_epoch_end(self) -> None:
        scores, matrix = self.scores.compute()
        self.found = scores | {"matrix": matrix}
        self.scores.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train(
    root: Path, setting: str, source: Source, world_size: int = 1, micro_batches: int = 1, resume: str = ""
) -> dict[str, Any]:
    """Two epochs, saved after the second update, in the first epoch; or from there to the end."""
    batch_size = GLOBAL_BATCH // world_size // micro_batches
    digits = setting == "digits"
    data = _digits(batch_size, 1) if digits else _photographs(root, setting, source, batch_size)
    module = Recorder(1, 10) if digits else Recorder()
    saves = world_size == micro_batches == 1
    save = ExactCheckpoint(root / "saved" / setting, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    ours = GradientAccumulation(global_batch_size=GLOBAL_BATCH), *[save] * saves
    trainer = quiet_trainer(*ours, world_size=world_size, max_epochs=EPOCHS)
    trainer.fit(module, data, ckpt_path=resume or None, weights_only=True if resume else None)
    return {"seen": module.seen, "weight": module.network[2].weight.detach().clone()}


def _test(test: int, world_size: int = 1) -> dict[str, Tensor]:
    """The scores of a test set of so many digits."""
    module = Recorder(1, 10)
    quiet_trainer(world_size=world_size).test(module, _digits(4, test), verbose=False)
    return module.found


def _ranks(root: Path) -> dict[str, Any]:
    """What a rank saw, and the scores of the test sets: the processes start once."""
    found: dict[str, Any] = {}
    for setting, source in RUNS:
        found[f"{setting}: {source}"] = _train(root, setting, source, 2, 2 if source[1] else 1)
    for setting, source in dict(RUNS).items():  # Each from the files of its last row.
        checkpoint = str(root / "saved" / setting / "step=2.ckpt")
        found[f"{setting}: resumed"] = _train(root, setting, source, 2, 1, checkpoint)
    return found | {"scores": [_test(n, 2) for n in TEST_SIZES]}


def _updates(runs: list[dict[str, Any]]) -> dict[int, Counter[str]]:
    updates: dict[int, Counter[str]] = {}
    for update, bits in (seen for run in runs for seen in run["seen"]):
        updates.setdefault(update, Counter())[bits] += 1
    return updates


def test_images_reach_the_network_unchanged_on_any_split(tmp_path: Path) -> None:
    write_photographs(tmp_path)
    whole = {setting: _train(tmp_path, setting, FOLDER) for setting in SETTINGS}
    ranks = run_ranks(_ranks, 2, tmp_path)
    for scores in [rank.pop("scores") for rank in ranks]:
        for n, found in zip(TEST_SIZES, scores, strict=True):
            assert int(found["matrix"].sum()) == n
            assert equal(found, _test(n)), "equal to the last digit"
    found = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    for setting, source in dict(RUNS).items():
        found[f"{setting}: alone, {source}"] = [_train(tmp_path, setting, source, 1, 2)]
    for name, runs in found.items():
        setting = name.partition(": ")[0]
        expected = whole[setting]
        updates = _updates([expected])
        assert len(updates) == EPOCHS * 3
        assert len(set().union(*updates.values())) == EPOCHS * SAMPLES[setting]
        left = {update: seen for update, seen in updates.items() if update >= 2 or "resumed" not in name}
        assert _updates(runs) == left, name
        for run in runs:
            largest = float((run["weight"] - expected["weight"]).abs().max() / expected["weight"].abs().max())
            assert largest < 1e-12, name
            assert torch.equal(run["weight"], runs[0]["weight"]), "the ranks differ"


# Balanced classes


BALANCED_BATCH, COUNTS = 12, (60, 25, 5)


class Linear(MNISTClassifier):
    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 3)).double()


def _balanced_data(batch_size: int, balance: str) -> MNISTDataModule:
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))
    # On a dark border, so that they stay as they are.
    images = F.pad(torch.rand(90, 20, 20, generator=torch.Generator().manual_seed(3)), (4, 4, 4, 4))
    test = images[::9], labels[::9]
    options: dict[str, Any] = {"batch_size": batch_size, "val_fraction": 0.0, "balance": balance}
    data = MNISTDataModule(**options)
    data.set_samples({"train": (images, labels), "test": test})
    return data


def _train_balanced(
    world_size: int, micro_batches: int, folder: Path, resume: bool, balance: str = "loss"
) -> dict[str, Any]:
    """Two epochs, saved after the fifth update, in the first epoch; or from there to the end."""
    torch.manual_seed(1)
    data = _balanced_data(BALANCED_BATCH // world_size // micro_batches, balance)
    recipe = Linear(num_classes=3, optimizer="sgd", lr=0.01, schedule="constant", label_smoothing=0.1)
    save = ExactCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    ours = GradientAccumulation(global_batch_size=BALANCED_BATCH), save
    trainer = quiet_trainer(*ours, world_size=world_size, max_epochs=2, precision="64-true")
    trainer.fit(recipe, data, ckpt_path=str(folder / "step=5.ckpt") if resume else None, weights_only=True)
    return {"weight": recipe.network[1].weight.detach().clone(), "class_weights": recipe.class_weights}


def _balanced_ranks(folder: Path, balance: str = "loss") -> dict[str, dict[str, Any]]:
    return {
        "2x2": _train_balanced(2, 2, folder / "2x2", False, balance),
        "2x1, resumed": _train_balanced(2, 1, folder / "whole", True, balance),
    }


def test_a_balanced_run_learns_the_same_on_any_split(tmp_path: Path) -> None:
    whole = _train_balanced(1, 1, tmp_path / "whole", resume=False)
    found = {"1x4": _train_balanced(1, 4, tmp_path / "1x4", resume=False)}
    saved = torch.load(tmp_path / "whole" / "step=5.ckpt", weights_only=True)
    assert torch.equal(saved["class_weights"], torch.tensor([90 / 3 / count for count in COUNTS]).double())
    found |= run_ranks(_balanced_ranks, 2, tmp_path)[0]
    expected: Tensor = whole["weight"]
    for name, run in found.items():
        assert float((run["weight"] - expected).abs().max() / expected.abs().max()) < 1e-12, name
    # What was saved counts, not what the data have now.
    saved["class_weights"] *= 2
    torch.save(saved, tmp_path / "whole" / "step=5.ckpt")
    resumed = _train_balanced(1, 1, tmp_path / "whole", resume=True)
    assert torch.equal(resumed["class_weights"], saved["class_weights"])
    assert whole["class_weights"].unique().numel() == 3


def test_draws_with_replacement_are_the_same_on_any_split(tmp_path: Path) -> None:
    whole = _train_balanced(1, 1, tmp_path / "whole", False, "sampler")
    found = {"1x4": _train_balanced(1, 4, tmp_path / "1x4", False, "sampler")}
    found |= run_ranks(_balanced_ranks, 2, tmp_path, "sampler")[0]
    expected: Tensor = whole["weight"]
    for name, run in found.items():
        assert float((run["weight"] - expected).abs().max() / expected.abs().max()) < 1e-12, name
    assert whole["class_weights"] is None
