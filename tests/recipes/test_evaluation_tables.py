"""The table of classes and the mistakes of an evaluation: complete, named and the same on any number of ranks."""

import csv
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, TensorDataset

from datamodules import ImageFolderDataModule, MNISTDataModule
from datamodules.contract import DataContract
from datamodules.loading.loaders import EvaluationLoader, sample_numbers
from recipes.evaluation_tables import class_table
from recipes.runner.report import tables_of
from recipes.runner.saved_run import write_rows
from recipes.runner.training import evaluate_each_sample_once, shard_loader
from tests.support.command_lines import MNIST, typed
from tests.support.own_training import TrainedClassifier
from tests.support.ranks import run_ranks
from tests.support.tables import on_ranks, quiet_trainer


class Brightness(nn.Module):
    """Takes an image for the second class by its brightness."""

    def forward(self, images: Tensor) -> Tensor:
        brightness = images.mean((1, 2, 3))
        return torch.stack((-brightness, brightness), 1)


class Bright(TrainedClassifier):
    def build_network(self) -> nn.Module:
        return Brightness()


def save_images(folder: Path, unreadable: bool = True) -> None:
    """Gray images of 20 levels, of which those with an odd number under 6 and above 14 lie in the wrong class."""
    for number in range(20):
        wrong = number % 2 and not 6 <= number <= 14
        name = ("dark", "light")[(number >= 10) != bool(wrong)]
        for part in ("val", "train"):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (12 * number,) * 3).save(folder / part / name / f"{number:02}.png")
    for name in ("dark/00.png", "dark/07.png", "light/12.png") if unreadable else ():
        (folder / "val" / name).write_bytes(b"no image")


MISTAKEN = ["01.png", "03.png", "05.png", "15.png", "17.png", "19.png"]


def _evaluate(world_size: int, folder: str) -> tuple[Any, Any]:
    """The scores, and the tables as the bytes of their files."""
    data = ImageFolderDataModule("folder", folder, image_size=8, eval_batch_size=3, on_corrupt="skip")
    recipe = Bright(num_classes=2)
    scores = quiet_trainer(**on_ranks(world_size)).validate(recipe, data, verbose=False)
    files = {}
    with tempfile.TemporaryDirectory() as written:
        for name, table in tables_of(recipe.trainer).items():
            write_rows(Path(written, name), table.rows, table.columns)
            files[name] = Path(written, name).read_text()
    return scores, files


def test_two_ranks_write_the_files_of_one(tmp_path: Path):
    save_images(tmp_path, unreadable=True)
    (one,) = run_ranks(_evaluate, 1, 1, str(tmp_path))
    for found in run_ranks(_evaluate, 2, 2, str(tmp_path)):
        assert found == one
    tables = {name: list(csv.DictReader(io.StringIO(text))) for name, text in one[1].items()}
    rows = tables["val_mistakes.csv"]
    assert sorted(Path(row["file"]).name for row in rows) == MISTAKEN
    for row in rows:
        assert Path(row["file"]).is_file()
        assert Path(row["file"]).parent.name == row["true"] != row["predicted"]
        assert float(row["probability_predicted"]) + float(row["probability_true"]) == pytest.approx(1)
    confidence = [float(row["probability_predicted"]) for row in rows]
    assert confidence == sorted(confidence, reverse=True)
    # The extremes are the most confident.
    assert {Path(row["file"]).name for row in rows[:2]} == {"01.png", "19.png"}
    assert sum(int(row["samples"]) for row in tables["val_per_class.csv"]) == 17


def test_mistakes_among_your_own_files_are_named(tmp_path: Path):
    save_images(tmp_path)
    data = MNISTDataModule("custom", str(tmp_path / "train"), val_fraction=0.5, eval_batch_size=4)
    recipe = Bright(num_classes=2)
    quiet_trainer().validate(recipe, data, verbose=False)
    part = data._parts["val"]
    images, labels = part.images, part.labels
    expected = {}
    for row in part.rows.tolist():
        name = data.sample_names("val")[row]
        assert Path(name).parent.name == ("dark", "light")[labels[row]]
        if (images[row].float().mean() / 255 > 0.1307) != labels[row]:
            expected[name] = Path(name).parent.name
    rows = tables_of(recipe.trainer)["val_mistakes.csv"].rows
    assert {row["file"]: row["true"] for row in rows} == expected
    assert rows
    digits = MNISTDataModule("digits")
    recipe = Bright(num_classes=10)
    recipe.network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    quiet_trainer().validate(recipe, digits, verbose=False)
    labels = digits._parts["val"].labels
    rows = tables_of(recipe.trainer)["val_mistakes.csv"].rows
    assert {row["sample"] for row in rows} < set(digits._parts["val"].rows.tolist())
    assert all(row["true"] == str(int(labels[row["sample"]])) for row in rows)


def test_mistakes_keep_file_names_in_any_encoding(tmp_path: Path):
    save_images(tmp_path, unreadable=False)
    for path in (tmp_path / "val").glob("*/*.png"):
        path.rename(path.with_name(os.fsdecode(b"\xe9" + os.fsencode(path.name))))
    recipe = Bright(num_classes=2)
    data = ImageFolderDataModule("folder", str(tmp_path), image_size=8)
    quiet_trainer().validate(recipe, data, verbose=False)
    assert data.val_dataloader().reader.is_in_memory
    table = tables_of(recipe.trainer)["val_mistakes.csv"]
    write_rows(tmp_path / "val.csv", table.rows, table.columns)
    lines = (tmp_path / "val.csv").read_bytes().splitlines()[1:]
    files = [os.fsdecode(line.split(b",")[0]) for line in lines]
    assert sorted(Path(file).name[1:] for file in files) == MISTAKEN
    assert all(Path(file).is_file() for file in files)


def test_the_order_of_an_unshuffled_stock_loader_is_known():
    data = TensorDataset(torch.arange(7))
    assert sample_numbers(DataLoader(Subset(data, [4, 2, 6]), 2)).tolist() == [0, 1, 2]
    shares = [sample_numbers(shard_loader(DataLoader(data, 2), rank, 2)).tolist() for rank in (0, 1)]
    assert shares == [[0, 1, 4, 5], [2, 3, 6]]
    assert sample_numbers(shard_loader(DataLoader(data, 2), 0, 1)).tolist() == list(range(7))
    batches = BatchSampler(RandomSampler(data), 2, drop_last=False)
    shuffled = DataLoader(data, shuffle=True)
    unknown = [shuffled, DataLoader(data, batch_sampler=batches), DataLoader(data, None), [1], None]
    assert [sample_numbers(loader) for loader in [*unknown, shard_loader(shuffled, 0, 1)]] == [None] * 6
    rows = torch.tensor([3, 5, 6, 0, 1])
    own = [EvaluationLoader(torch.arange(7), torch.arange(7), rows, 2, rank, 2) for rank in (0, 1)]
    assert [sample_numbers(loader).tolist() for loader in own] == [[3, 5, 1], [6, 0]]


class Named(pl.LightningDataModule):
    """A stock data module with the names of its samples, and another loader on request."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def test_dataloader(self) -> DataLoader:
        images = torch.linspace(-1, 1, 6).view(6, 1, 1, 1).expand(6, 1, 8, 8)
        return DataLoader(TensorDataset(images, torch.tensor([0, 1, 0, -100, 0, 1])), 4, **self.options)


class Contract(Named, DataContract):
    """The names are those of the samples where there are six."""

    def sample_names(self, part: str) -> list[str]:
        return [f"{part} {number}" for number in range(self.hparams["names"])]


def test_samples_of_a_stock_loader_are_numbered():
    recipe = Bright(num_classes=2)
    quiet_trainer().test(recipe, Named(), verbose=False)
    rows = tables_of(recipe.trainer)["test_mistakes.csv"].rows
    assert [(row["sample"], row["true"], row["predicted"]) for row in rows] == [(1, "1", "0"), (4, "0", "1")]
    quiet_trainer().test(recipe, Named(shuffle=True), verbose=False)
    assert list(tables_of(recipe.trainer)) == ["test_per_class.csv"]
    for names, column in ((6, ["file test 1", "file test 4"]), (5, ["sample 1", "sample 4"])):
        data = Contract()
        data.hparams["names"] = names
        quiet_trainer().test(recipe, data, verbose=False)
        rows = tables_of(recipe.trainer)["test_mistakes.csv"].rows
        assert [f"{name} {row[name]}" for row in rows for name in list(row)[:1]] == column


def _test_stock(world_size: int) -> Any:
    data, recipe = Contract(), Bright(num_classes=2)
    data.hparams["names"] = 6
    evaluate_each_sample_once(data, int(os.environ.get("RANK", "0")), world_size)
    quiet_trainer(**on_ranks(world_size)).test(recipe, data, verbose=False)
    return tables_of(recipe.trainer)


def test_a_stock_loader_has_the_same_tables_on_two_ranks():
    (one,) = run_ranks(_test_stock, 1, 1)
    assert [row["file"] for row in one["test_mistakes.csv"].rows] == ["test 1", "test 4"]
    assert run_ranks(_test_stock, 2, 2) == [one, one]


def test_the_scores_of_classes_are_those_of_scikit_learn():
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    generator = torch.Generator().manual_seed(1)
    targets, predicted = torch.randint(5, (2, 200), generator=generator)
    matrix = torch.from_numpy(confusion_matrix(targets, predicted, labels=range(5)))
    table = class_table(matrix, list("abcde"))
    expected = precision_recall_fscore_support(targets, predicted)
    for row, *values in zip(table.rows, *expected, strict=True):
        assert [row[name] for name in ("precision", "recall", "f1", "samples")] == pytest.approx(values, abs=1e-6)
    wrong = matrix - matrix.diag().diag()
    most = [("abcde"[int(counts.argmax())], int(counts.max())) for counts in wrong]
    assert [(row["taken_for"], row["times"]) for row in table.rows] == most
    empty = class_table(torch.tensor([[3, 0, 0], [0, 0, 0], [1, 0, 0]]), list("abc")).rows
    assert [row["precision"] for row in empty] == [0.75, None, None]
    assert [row["recall"] for row in empty] == [1, None, 0]
    assert [row["f1"] for row in empty] == [pytest.approx(6 / 7, abs=1e-6), None, 0]
    assert [row["taken_for"] for row in empty] == [None, None, "a"]


def test_each_command_writes_its_tables(tmp_path: Path):
    fit, test, bare = typed(
        tmp_path,
        "--dataset digits --max-epochs 1 --name one",
        "test --ckpt runs/mnist/one/checkpoints/best.ckpt --output scores.json",
        "test --ckpt runs/mnist/one/checkpoints/best.ckpt",
        **MNIST,
    )
    assert (fit.status, test.status, bare.status) == (0, 0, 0), fit.err + test.err
    folder = tmp_path / "runs" / "mnist" / "one"
    results = json.loads((folder / "results.json").read_text())

    def read(path: Path) -> list[dict[str, str]]:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    for part in ("val", "test"):
        classes, mistakes = read(folder / f"{part}_per_class.csv"), read(folder / f"{part}_mistakes.csv")
        size = results["data"]["sizes"][part]
        assert sum(int(row["samples"]) for row in classes) == size
        assert 1 - len(mistakes) / size == pytest.approx(results["scores"][f"{part}/accuracy"], abs=1e-6)
    assert "test_mistakes.csv" in fit.out
    scores = json.loads((tmp_path / "scores.json").read_text())
    mistakes = read(tmp_path / "scores_test_mistakes.csv")
    assert scores["test/loss"] == results["scores"]["test/loss"]
    for name in ("mistakes", "per_class"):
        tables = (tmp_path / f"scores_test_{name}.csv", folder / f"test_{name}.csv")
        assert len({path.read_bytes() for path in tables}) == 1
    assert 1 - len(mistakes) / 360 == pytest.approx(scores["test/accuracy"], abs=1e-6)
    assert list(mistakes[0]) == ["sample", "true", "predicted", "probability_predicted", "probability_true"]
    assert "accuracy_class" not in test.out, "the table has them"
    assert f"scores_test_mistakes.csv ({len(mistakes)} rows)" in test.out
    assert "--output FILE.json writes  FILE_test_per_class.csv (10 rows), FILE_test_mistakes.csv" in bare.out
    assert not list(tmp_path.glob("FILE*"))
