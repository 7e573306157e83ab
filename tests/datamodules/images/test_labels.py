from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from datamodules import EvaluationLoader, ImageFolderDataModule, MNISTDataModule, TrainLoader, UserError
from datamodules.images.labels import check_labels, labels_in_memory
from datamodules.loading.worker_loaders import WorkerTrainLoader

INPUTS, LABELS = torch.zeros(6, 2), torch.tensor([0, 2, -100, 1, 2, 0])


def test_labels_that_are_classes_or_minus_100_pass_and_those_are_counted():
    assert check_labels(LABELS, 3, "the training set") == 1
    assert check_labels(LABELS[:0], 3, "the training set") == 0


OUTSIDE = {
    r"label 7 at row 2 of the set is outside 0\.\.2 \(2 of 5 .*; pass num_classes=8 or correct": [0, 1, 7, 4, -100],
    r"label -1 at row 2 of the set is outside 0\.\.2 .*correct the labels; -100 leaves a sample out$": [0, 1, -1],
    r"label -1 at row 0 of the set .*pass num_classes=4 or correct": [-1, 3],
}


def test_a_label_that_is_no_class_is_named_with_its_row_in_the_data_set_and_what_to_type():
    for message, labels in OUTSIDE.items():
        with pytest.raises(UserError, match=message):
            check_labels(torch.tensor(labels), 3, "the set")
    with pytest.raises(UserError, match="label 3 at row 40 of the set"):
        check_labels(torch.tensor([0, 3]), 3, "the set", rows=torch.tensor([10, 40]))


OTHERS = {
    r"are float32 of shape \(6,\), expected class numbers 0 to 2, whole .*: pass labels\.long\(\)$": LABELS.float(),
    r"are int64 of shape \(6, 3\).*: pass labels\.argmax\(1\)$": F.one_hot(LABELS.clamp(min=0)),
    r"are float32 of shape \(6, 4\), expected class numbers 0 to 2, whole .* \(6,\)$": torch.zeros(6, 4),
}


@pytest.mark.parametrize("message", OTHERS)
def test_labels_of_another_type_or_shape_are_refused_with_the_conversion(message: str):
    with pytest.raises(UserError, match=f"^the labels of the set {message}"):
        check_labels(OTHERS[message], 3, "the set")


class Relabelled(TensorDataset):
    """Labels that are not those of its tensors."""

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs, label + 1


class Own(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index):
        return INPUTS[index], LABELS[index]


def test_the_labels_of_loaders_in_memory_are_known_with_their_rows(tmp_path: Path):
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


def test_labels_that_could_be_others_when_they_are_loaded_are_not_known():
    tensors = TensorDataset(INPUTS, LABELS)
    loaders = [
        DataLoader(Relabelled(INPUTS, LABELS)),
        DataLoader(Own()),
        DataLoader(ConcatDataset([tensors, tensors])),
        DataLoader(TensorDataset(INPUTS, LABELS, LABELS)),
        DataLoader(tensors, collate_fn=lambda samples: samples),
        [DataLoader(tensors)],
        None,
    ]
    assert [labels_in_memory(loader) for loader in loaders] == [None] * len(loaders)
