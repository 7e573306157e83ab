"""What the data layer promises about splitting and interrupting a run, in real Trainers and real processes."""

import gzip
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from datamodules import MNISTDataModule
from datamodules.loading.sampling import epoch_order
from recipes.scores import ClassificationScores
from tests.support.ranks import run_ranks

GLOBAL_BATCH = 12
# The last update is smaller than the others, and has a single sample.
TRAIN_SIZES = (31, 25)
TEST_SIZES = (50, 1)
# World size -> micro-batches per update on each: each makes a global batch of 12.
SPLITS = {1: (1, 3), 2: (1, 3), 3: (1, 2)}
SAVED = (2, 3, 4)
"""In the middle of an epoch of three updates, at its end, and behind it."""


def _write(folder: Path, train: int, test: int) -> Path:
    """Random images; a training label is its own row number, so that a batch tells which samples it holds."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(train)
    for part, n, classes in (("train", train, 256), ("t10k", test, 10)):
        images = torch.randint(256, (n, 28, 28), dtype=torch.uint8, generator=generator)
        labels = (torch.arange(n) % classes).to(torch.uint8)
        for stem, rows in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            sizes = b"".join(size.to_bytes(4, "big") for size in rows.shape)
            data = bytes((0, 0, 8, rows.dim())) + sizes + rows.numpy().tobytes()
            (folder / f"{stem}.gz").write_bytes(gzip.compress(data, 1))
    return folder


def _data(folder: Path, batch_size: int) -> MNISTDataModule:
    return MNISTDataModule(
        "mnist", str(folder), batch_size, eval_batch_size=4, val_fraction=0, num_classes=256, download=False
    )


class Step(NamedTuple):
    """One micro-batch on one rank: which samples it held, and what augmentation made of each."""

    epoch: int
    update: int
    numbers: list[int]
    pictures: list[str]


class Recorder(pl.LightningModule):
    """An ordinary module that knows nothing of ranks and remembers what it was fed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 256))
        self.steps: list[Step] = []
        self.scores = ClassificationScores(10)
        self.found: dict[str, Tensor] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, numbers = batch
        pictures = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in images]
        self.steps.append(Step(self.current_epoch, self.global_step, numbers.tolist(), pictures))
        return F.cross_entropy(self.network(images), numbers)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        self.scores.update(self.network(images)[:, :10], targets)

    def on_test_epoch_end(self) -> None:
        scores, matrix = self.scores.compute()
        self.found = scores | {"matrix": matrix}
        self.scores.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def _trainer(world_size: int, **options: Any) -> pl.Trainer:
    """A plain Trainer: what is not named here is left at its default, `use_distributed_sampler` included."""
    distributed = {"strategy": "ddp", "devices": world_size} if world_size > 1 else {"devices": 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = {} if "callbacks" in options else {"enable_checkpointing": False}
    return pl.Trainer(accelerator="cpu", **(distributed | quiet | saving | options))


def _each_step_saved(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def _everything(world_size: int, folder: str) -> dict[str, Any]:
    """All that one rank does: the processes start once for all tests of this module."""
    root, answer = Path(folder), {}
    for n in TRAIN_SIZES:
        for accumulation in SPLITS[world_size]:
            module = Recorder()
            trainer = _trainer(world_size, max_epochs=2, accumulate_grad_batches=accumulation)
            batch_size = GLOBAL_BATCH // world_size // accumulation
            trainer.fit(module, datamodule=_data(root / f"train{n}", batch_size))
            answer["train", n, accumulation] = (module.steps, module.network[1].weight.detach().clone())
    for n in TEST_SIZES:
        module = Recorder()
        _trainer(world_size).test(module, datamodule=_data(root / f"test{n}", 4), verbose=False)
        answer["test", n] = module.found
    limited = Recorder()
    trainer = _trainer(world_size, max_epochs=2, limit_train_batches=2)
    trainer.fit(limited, datamodule=_data(root / "train31", GLOBAL_BATCH // world_size))
    answer["limited"] = limited.steps
    answer |= _interrupted(world_size, root)
    return answer


def _interrupted(world_size: int, root: Path) -> dict[str, Any]:
    """Two epochs with a checkpoint after each update, and the rest of the run from each of them."""
    data = root / "train31"
    saved = root / f"saved by {world_size}"
    module = Recorder()
    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    batch_size = GLOBAL_BATCH // world_size
    trainer = _trainer(world_size, callbacks=[_each_step_saved(str(saved))], **options)
    trainer.fit(module, datamodule=_data(data, batch_size))
    answer: dict[str, Any] = {"whole": module.steps}
    for step in SAVED:
        module = Recorder()
        checkpoint = saved / f"step={step}.ckpt"
        trainer = _trainer(world_size, **options)
        trainer.fit(module, datamodule=_data(data, batch_size), ckpt_path=str(checkpoint), weights_only=True)
        answer["resumed", step] = module.steps
    return answer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Any]]]:
    """By world size, what each rank saw."""
    folder = tmp_path_factory.mktemp("split")
    for n in TRAIN_SIZES:
        _write(folder / f"train{n}", n, 3)
    for n in TEST_SIZES:
        _write(folder / f"test{n}", 12, n)
    return {world_size: run_ranks(_everything, world_size, world_size, str(folder)) for world_size in SPLITS}


def _updates(ranks: list[list[Step]]) -> dict[tuple[int, int], Counter[int]]:
    """The samples of each update, over ranks and micro-batches, by (epoch, update)."""
    updates: dict[tuple[int, int], Counter[int]] = {}
    for step in (step for steps in ranks for step in steps):
        updates.setdefault((step.epoch, step.update), Counter()).update(step.numbers)
    return updates


def _splits() -> Iterator[tuple[int, int]]:
    return ((world_size, accumulation) for world_size in SPLITS for accumulation in SPLITS[world_size])


@pytest.mark.parametrize("n", TRAIN_SIZES)
def test_every_update_consumes_the_same_samples_however_the_run_is_split(runs, n: int):
    slices = [
        (epoch, epoch_order(n, 1, epoch)[start : start + GLOBAL_BATCH].tolist())
        for epoch in range(2)
        for start in range(0, n, GLOBAL_BATCH)
    ]
    expected = {(epoch, update): Counter(numbers) for update, (epoch, numbers) in enumerate(slices)}
    for world_size, accumulation in _splits():
        steps = [rank["train", n, accumulation][0] for rank in runs[world_size]]
        assert _updates(steps) == expected, f"{world_size} processes, {accumulation} micro-batches"


@pytest.mark.parametrize("n", TRAIN_SIZES)
def test_a_sample_is_augmented_to_the_same_bits_however_the_run_is_split(runs, n: int):
    def pictures(world_size: int, accumulation: int) -> dict[tuple[int, int], str]:
        steps = [step for rank in runs[world_size] for step in rank["train", n, accumulation][0]]
        return {
            (step.epoch, number): picture
            for step in steps
            for number, picture in zip(step.numbers, step.pictures, strict=True)
        }

    expected = pictures(1, 1)
    assert len(set(expected.values())) == len(expected) == 2 * n
    for split in _splits():
        assert pictures(*split) == expected


def test_ranks_keep_the_same_finite_weights_also_where_some_have_no_sample_left(runs):
    # 25 = 2 x 12 + 1: one sample for three ranks, whose mean over nothing must neither crash nor spoil the weights.
    assert [rank["train", 25, 1][0][2].numbers == [] for rank in runs[3]] == [False, True, True]
    for n in TRAIN_SIZES:
        for world_size, accumulation in _splits():
            weights = [rank["train", n, accumulation][1] for rank in runs[world_size]]
            assert weights[0].isfinite().all()
            assert all(torch.equal(weights[0], other) for other in weights)


@pytest.mark.parametrize("n", TEST_SIZES)
def test_evaluation_gives_the_same_score_to_the_last_digit_on_1_2_and_3_ranks(runs, n: int):
    expected = runs[1][0]["test", n]
    assert int(expected["matrix"].sum()) == n
    assert float(expected["loss"]) > 0
    for world_size in SPLITS:
        for rank in runs[world_size]:
            for name, score in expected.items():
                assert torch.equal(rank["test", n][name], score), f"{name} on {world_size} ranks"


def test_limited_epochs_take_the_first_slices_of_their_own_order(runs):
    expected = {
        (epoch, 2 * epoch + k): Counter(epoch_order(31, 1, epoch)[12 * k : 12 * (k + 1)].tolist())
        for epoch in range(2)
        for k in range(2)
    }
    for world_size in SPLITS:
        assert _updates([rank["limited"] for rank in runs[world_size]]) == expected


@pytest.mark.parametrize("step", SAVED)
def test_a_resumed_run_sees_exactly_what_was_left_in_the_order_it_would_have_been(runs, step: int):
    for world_size in SPLITS:
        for rank in runs[world_size]:
            assert rank["resumed", step] == rank["whole"][step:]
