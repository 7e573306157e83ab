"""Labels that are known before they are loaded."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from datamodules import EvaluationLoader, ImageFolderDataModule, MNISTDataModule, TrainLoader
from datamodules.loading.worker_loaders import WorkerTrainLoader
from recipes.labels import labels_in_memory

INPUTS, LABELS = torch.zeros(6, 2), torch.tensor([0, 2, -100, 1, 2, 0])


class Relabeled(TensorDataset):
    """Labels that are not those of its tensors."""

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs, label + 1


class Own(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index):
        return INPUTS[index], LABELS[index]


def test_the_labels_of_loaders_in_memory_are_known(tmp_path: Path):
    rows = torch.tensor([5, 1, 2])
    tensors = TensorDataset(INPUTS, LABELS)
    subset = Subset(Subset(tensors, [4, 5, 1, 2]), [1, 2, 3])
    for loader in (
        TrainLoader(INPUTS, LABELS, rows, 2, seed=1),
        EvaluationLoader(INPUTS, LABELS, rows, 2),
        DataLoader(subset, 2, shuffle=True),
    ):
        known = labels_in_memory(loader)
        assert known is not None
        assert (known[0].tolist(), known[1].tolist()) == ([0, 2, -100], [5, 1, 2])
    whole = labels_in_memory(DataLoader(tensors))
    assert whole is not None
    assert whole[0] is LABELS
    for color in ("red", "green"):
        (tmp_path / color).mkdir()
        for i in range(4):
            Image.new("RGB", (8, 8), color).save(tmp_path / color / f"{i}.png")
    folder = ImageFolderDataModule(data_dir=str(tmp_path), image_size=8, batch_size=2, num_workers=0)
    folder.setup("fit")
    for loader in (folder.train_dataloader(), folder.val_dataloader()):
        known = labels_in_memory(loader)
        assert known is not None
        assert set(known[0].tolist()) <= {0, 1}
        assert len(known[0]) == len(loader.rows)  # type: ignore[union-attr]
    reader: Any = folder.train_dataloader().reader
    some = labels_in_memory(WorkerTrainLoader(reader, torch.tensor([5, 1]), 2, seed=1))
    assert some is not None
    assert (some[0].tolist(), some[1].tolist()) == ([1, 0], [5, 1])
    digits = MNISTDataModule("digits")
    digits.setup("fit")
    found = labels_in_memory(digits.train_dataloader())
    assert found is not None
    assert len(found[0]) == digits.sizes["train"]


def test_labels_that_loading_may_change_are_not_known():
    tensors = TensorDataset(INPUTS, LABELS)
    loaders = [
        DataLoader(Relabeled(INPUTS, LABELS)),
        DataLoader(Own()),
        DataLoader(ConcatDataset([tensors, tensors])),
        DataLoader(TensorDataset(INPUTS, LABELS, LABELS)),
        DataLoader(tensors, collate_fn=lambda samples: samples),
        [DataLoader(tensors)],
        None,
    ]
    assert [labels_in_memory(loader) for loader in loaders] == [None] * len(loaders)
