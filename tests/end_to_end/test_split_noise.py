"""Dropout drops the same elements of a sample however a run is split into processes and micro-batches, and resumed.

Each row trains two epochs in float64 with 16 samples to an update, as processes x micro-batches, and is compared with
one process that holds all 16 at once. A resumed row is saved in the middle of the first epoch and goes on as another
split.
The networks have no batch normalisation, which sees one forward pass at a time (`test_split_table`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from callbacks import GradientAccumulation, LeanLoop, SeedControl, stateless_dropout
from datamodules.loading.loaders import TrainLoader
from datamodules.translation.loaders import SentenceTrainLoader
from datamodules.translation.packed_sentences import PackedPairs, TranslationBatch, pack
from recipes.mnist.network import ClassicNet
from recipes.seq2seq.network import target_positions
from recipes.seq2seq.recurrent import Seq2SeqNet
from recipes.seq2seq.transformer import TransformerNet
from tests.support.ranks import run_ranks
from tests.support.tables import CLASSES, QUIET, Tiny, noisy_images, on_ranks, silence

GLOBAL_BATCH = 16
EPOCHS = 2
SPLITS = [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)]
BOUND = 1e-12
RESUMED = [((1, 4), (2, 1)), ((2, 2), (1, 1)), ((4, 1), (2, 2)), ((2, 1), (2, 1))]
SGD: dict[str, Any] = {"lr": 0.2, "momentum": 0.9}


class OwnNet(nn.Module):
    """A user's network: dropout of elements and channels, a recurrent network with dropout, time before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Dropout2d(0.3))
        self.recurrent = nn.GRU(9, 8, num_layers=3, dropout=0.4)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """A GRU over the channels, as if they were time."""
        channels = self.convolution(images).flatten(2)
        outputs, _ = self.recurrent(channels.transpose(0, 1))
        for layer in self.head:
            outputs = layer(outputs[-1] if outputs.dim() == 3 else outputs)
        return outputs


class Digits(Tiny):
    """The recipe's network of the tutorials with its two layers of dropout, on images that are made larger."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        images, targets = batch
        return super().training_step((nn.functional.interpolate(images, 28), targets), batch_idx)


class Sentences(pl.LightningModule):
    """The translation recipe's network, one layer of dropout at five places."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.network = self.build(**settings).double()

    def build(self, **settings: Any) -> nn.Module:
        return Seq2SeqNet(40, 40, hidden_size=8, num_layers=2, dropout=0.3, **settings)

    def training_step(self, batch: TranslationBatch, batch_idx: int) -> Any:
        if not len(batch.source):
            return {"loss": sum(p.sum() * 0 for p in self.parameters()), "count": 0}
        positions = target_positions(batch.target, batch.target_lengths)
        logits = self.network(batch.source, batch.source_lengths, batch.target, positions)
        targets = batch.target[:, 1:].flatten()[positions]
        return {"loss": nn.functional.cross_entropy(logits, targets), "count": len(targets)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), **SGD)


class Attentive(Sentences):
    """The Transformer, with dropout on embeddings and in each layer."""

    def build(self) -> nn.Module:
        return TransformerNet(40, 40, hidden_size=8, num_layers=2, heads=2, feedforward_size=12, dropout=0.3)


def pairs(n: int) -> PackedPairs:
    """Sentences of 1 to 12 tokens."""
    generator = torch.Generator().manual_seed(2)
    lines = [
        [" ".join(f"t{int(t)}" for t in torch.randint(30, (1 + i % 12,), generator=generator)) for i in range(n)]
        for _ in range(2)
    ]
    return PackedPairs(pack(lines[0])[0], pack(lines[1][::-1], start=True)[0])


def tiny(network: nn.Module, kind: type[Tiny] = Tiny) -> Tiny:
    return kind(network.double(), torch.optim.SGD, **SGD)


def classic() -> nn.Module:
    torch.manual_seed(3)
    return ClassicNet(CLASSES)


def own() -> nn.Module:
    torch.manual_seed(3)
    return stateless_dropout(OwnNet())


def images(n: int) -> Callable[..., Any]:
    def loader(batch_size: int, rank: int, world_size: int, micro_batches: int) -> Any:
        inputs, targets = noisy_images(n)
        return TrainLoader(inputs, targets, torch.arange(n), batch_size, 1, rank, world_size)

    return loader


def stock(batch_size: int, rank: int, world_size: int, micro_batches: int) -> Any:
    data = TensorDataset(*noisy_images(64))
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, world_size, rank, shuffle=False))


def translations(batch_size: int, rank: int, world_size: int, micro_batches: int, **settings: Any) -> Any:
    data = pairs(70)
    return SentenceTrainLoader(
        data, torch.arange(70), batch_size, 1, rank, world_size, micro_batches=lambda: micro_batches, **settings
    )


class Task(NamedTuple):
    module: Callable[[], pl.LightningModule]
    loader: Callable[..., Any]


TASKS = {
    "seq2seq": Task(Sentences, translations),
    "seq2seq, Transformer": Task(Attentive, translations),
    "MNIST, classic": Task(lambda: tiny(classic(), Digits), images(37)),
    "a user's network": Task(lambda: tiny(own()), images(69)),
    "a user's network, DataLoader": Task(lambda: tiny(own()), stock),
}
"""70 sentences, 37 and 69 images: the last update is short, and leaves some ranks with fewer samples or none."""


class SaveAt(pl.Callback):
    """Saves after so many updates."""

    def __init__(self, folder: Path, update: int) -> None:
        self.folder, self.update, self.saved = folder, update, False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.update and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.folder / "at.ckpt")


def train(
    name: str, world_size: int, micro_batches: int, save: Path | None = None, load: Path | None = None
) -> dict[str, Tensor]:
    """The weights after a run, or after the rest of a run."""
    task = TASKS[name]
    callbacks: list[pl.Callback] = [SeedControl(1), GradientAccumulation(global_batch_size=GLOBAL_BATCH)]
    if micro_batches == 1:
        callbacks.append(LeanLoop())
    if save:
        callbacks.append(SaveAt(save, 2))
    options = on_ranks(world_size) | QUIET
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=EPOCHS, callbacks=callbacks, **quiet, **options)
    module = task.module()
    batch_size = GLOBAL_BATCH // world_size // micro_batches
    loader = task.loader(batch_size, trainer.global_rank, world_size, micro_batches)
    trainer.fit(module, loader, ckpt_path=load and load / "at.ckpt", weights_only=True)
    return {key: tensor.clone() for key, tensor in module.state_dict().items()}


def folder_of(root: str, name: str, split: tuple[int, int]) -> Path:
    path = Path(root, f"{list(TASKS).index(name)}, {split}")
    path.mkdir(exist_ok=True)
    return path


def train_all(world_size: int, root: str, resumed: bool) -> dict[Any, dict[str, Tensor]]:
    """Every row of one number of processes: they start once."""
    silence()
    found = {}
    if not resumed:
        for name in TASKS:
            for split in SPLITS:
                if split[0] == world_size:
                    saved = any(split == begun for begun, _ in RESUMED) and "DataLoader" not in name
                    found[name, split] = train(name, *split, save=folder_of(root, name, split) if saved else None)
        return found
    for begun, split in RESUMED:
        for name in TASKS:
            if split[0] == world_size and "DataLoader" not in name:
                found[name, begun, split] = train(name, *split, load=folder_of(root, name, begun))
    return found


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight, relative to the largest value of its tensor."""
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath")
def test_dropout_is_equal_however_a_run_is_split_and_resumed(tmp_path: Path) -> None:
    runs = {size: run_ranks(train_all, size, size, str(tmp_path), False) for size in (1, 2, 4)}
    resumed = {size: run_ranks(train_all, size, size, str(tmp_path), True) for size in (1, 2)}
    rows: dict[str, float] = {}
    for name in TASKS:
        expected = runs[1][0][name, (1, 1)]
        for split in SPLITS:
            for rank in runs[split[0]]:
                row = f"{name:30}{split[0]} x {split[1]}"
                rows[row] = max(rows.get(row, 0.0), error(rank[name, split], expected))
        for begun, split in RESUMED:
            key = name, begun, split
            if key in resumed[split[0]][0]:
                row = f"{name:30}{begun[0]} x {begun[1]}, resumed {split[0]} x {split[1]}"
                rows[row] = max(error(rank[key], expected) for rank in resumed[split[0]])
    print("\nLargest relative error of a final weight, by processes x micro-batches")
    for row, found in rows.items():
        print(f"{row:60}{found:8.0e}")
    assert {row: found for row, found in rows.items() if not found <= BOUND} == {}
