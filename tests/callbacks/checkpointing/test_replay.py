"""Loaders that save no position resume exactly: what each update saw, and the weights, to the bit."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET

EPOCHS, BATCHES = 3, 4


class Numbers(Dataset):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        return number, torch.tensor(number + 0.5)


class Augmented(Numbers):
    """Samples that are augmented by the global generator; in workers that would depend on their number."""

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        return number, number + torch.rand(())


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return ((number, torch.tensor(number + 0.5)) for number in range(2 * BATCHES))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Augmented(), 2, shuffle=True),
    "shuffled by workers": lambda: DataLoader(
        Numbers(), 2, shuffle=True, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    ),
    "weighted": lambda: DataLoader(Numbers(), 2, sampler=WeightedRandomSampler([1.0] * 2 * BATCHES, 2 * BATCHES)),
    "distributed": lambda: DataLoader(Numbers(), 2, sampler=DistributedSampler(Numbers(), 1, 0)),
    "stream": lambda: DataLoader(Stream(), 2),
    "two": lambda: {"a": DataLoader(Augmented(), 2, shuffle=True), "b": DataLoader(Numbers(), 2)},
}


class Learner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.seen.append((self.current_epoch, [numbers.tolist() for numbers, _ in batches]))
        return sum(self.weight * values.double().mean() for _, values in batches)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path, loader: Any, max_steps: int = -1, seeded: bool = True, more: Sequence[pl.Callback] = ()
) -> tuple[list[Any], float]:
    """Train up to an update, from the newest checkpoint on."""
    options: dict[str, Any] = {"max_epochs": EPOCHS, "max_steps": max_steps, "enable_progress_bar": False}
    seeds = [SeedControl(seed=1)] if seeded else []
    # The last part of a run saves at another interval.
    checkpoint = ExactCheckpoint(folder, save_last=True, every_n_train_steps=2 if max_steps < 0 else 1)
    other = ExactCheckpoint(folder / "other", monitor=None)
    trainer = pl.Trainer(**(QUIET | options), callbacks=[*seeds, *more, checkpoint, other])
    model = Learner()
    last = folder / "last.ckpt"
    trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    return model.seen, model.weight.item()


def whole_and_interrupted(name: str, folder: Path, stops: list[int]) -> Any:
    whole = fit(folder / "whole", LOADERS[name]())
    seen: list[Any] = []
    for stop in [*stops, -1]:
        now, weight = fit(folder / "interrupted", LOADERS[name](), stop)
        seen += now
    return whole, (seen, weight)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stops", [[1], [BATCHES], [3, BATCHES + 1, BATCHES + 3, 2 * BATCHES]], ids=str)
def test_an_interrupted_run_sees_what_was_left_in_the_order_it_would_have_been(
    name: str, stops: list[int], tmp_path: Path
) -> None:
    ((whole, interrupted),) = run_ranks(whole_and_interrupted, 1, name, tmp_path, stops)
    assert len(whole[0]) == EPOCHS * BATCHES
    assert interrupted == whole


def test_an_order_that_cannot_be_repeated_is_refused(tmp_path: Path) -> None:
    fit(tmp_path / "shuffled", LOADERS["shuffled"](), 1, seeded=False)
    with pytest.raises(UserError, match="shuffles with torch's global generator.*train with SeedControl"):
        fit(tmp_path / "shuffled", LOADERS["shuffled"](), seeded=False)
    fit(tmp_path / "at an epoch's end", LOADERS["shuffled"](), BATCHES, seeded=False)
    assert len(fit(tmp_path / "at an epoch's end", LOADERS["shuffled"](), seeded=False)[0]) == 2 * BATCHES


class RandomBatches:
    """A user's batch sampler, which draws from torch's global generator."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(2 * BATCHES).view(BATCHES, 2).tolist())


def test_a_batch_sampler_of_a_user_counts_as_one_that_shuffles(tmp_path: Path) -> None:
    fit(tmp_path, DataLoader(Numbers(), batch_sampler=RandomBatches()), 1, seeded=False)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="train with SeedControl"):
        fit(tmp_path, DataLoader(Numbers(), batch_sampler=RandomBatches()), seeded=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [BATCHES, BATCHES + 1], ids=["an epoch's end", "within an epoch"])
def test_a_generator_of_the_loaders_own_is_refused_once_it_has_moved_on(stop: int, tmp_path: Path) -> None:
    def loader() -> DataLoader:
        return DataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(3))

    fit(tmp_path, loader(), 1)
    fit(tmp_path, loader(), stop)
    with pytest.raises(UserError, match="shuffles with a generator of its own.*leave the generator out"):
        fit(tmp_path, loader())


def test_one_of_several_loaders_without_a_position_is_refused(tmp_path: Path) -> None:
    def loaders() -> dict[str, Any]:
        numbers = torch.arange(2 * BATCHES)
        return {"a": TrainLoader(numbers, numbers.double(), numbers, 2, 1), "b": DataLoader(Numbers(), 2)}

    fit(tmp_path, loaders(), 1)
    with pytest.raises(UserError, match="of several training loaders a DataLoader saves no position"):
        fit(tmp_path, loaders())


def test_averaging_of_weights_goes_on_within_an_epoch(tmp_path: Path) -> None:
    def weight(folder: str, max_steps: int = -1) -> float:
        averaging = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1, annealing_epochs=2)
        return fit(tmp_path / folder, LOADERS["stream"](), max_steps, more=[averaging])[1]

    weight("cut", 1)
    assert weight("cut") == weight("whole")
