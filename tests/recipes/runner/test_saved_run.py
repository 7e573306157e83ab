"""The file of a run's results, and its clock."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from datamodules.errors import UserError
from recipes.runner import saved_run
from recipes.runner.saved_run import RESULTS, Stopwatch, processor, read_results, read_run, write_rows
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer


def test_results_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = {"recipe": "mnist", "scores": {"test/accuracy": 0.5}, "seconds": {"train": 1.5, "total": 2.0}}
    write_rows(tmp_path / RESULTS, results)
    assert read_results(tmp_path) == results


def test_a_table_has_the_given_columns_or_those_of_its_first_row(tmp_path: Path) -> None:
    rows, path = [{"name": "été", "value": 1}, {"name": "a, b", "value": 2}], tmp_path / "a.csv"
    for columns, lines in (
        (None, ["name,value", "été,1", '"a, b",2']),
        (["value", "name", "more"], ["value,name,more", "1,été,", '2,"a, b",']),
    ):
        write_rows(path, rows, columns)
        assert path.read_text(encoding="utf-8").splitlines() == lines
    write_rows(tmp_path / "a.txt", [{"name": "one\ntwo"}], ["name"])
    assert (tmp_path / "a.txt").read_text() == "one two\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "expected the folder of a run that has finished"),
        ("{", "cannot be read"),
        ("[1]", "holds no results of a run"),
        ('{"scores": 3}', "holds no results of a run"),
    ],
)
def test_a_file_that_holds_no_results_is_rejected(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=problem):
        read_results(tmp_path)


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {}}, {"state_dict": {}, "loops": {}}])
def test_a_file_of_weights_is_no_checkpoint_of_a_run(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="a.ckpt is not a checkpoint of a run, which holds settings beside the weights"):
        read_run(tmp_path / "a.ckpt")


def test_the_processor_is_named_as_the_system_names_it() -> None:
    maker, model = processor()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    fields = {tuple(text.strip() for text in line.split(":", 1)) for line in lines if ":" in line}
    reported = dict(fields)
    assert ("vendor_id", maker) in fields or "vendor_id" not in reported
    assert ("model name", model) in fields or "model name" not in reported
    assert maker
    assert model


class Clock(pl.Callback):
    """Seconds that pass in a run: 1 in each training step, 10 in a batch of its validation, 100 in one around it."""

    def __init__(self) -> None:
        self.now = 5.0

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 1

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.now += 100 if trainer.sanity_checking or trainer.state.fn != "fit" else 10


def test_seconds_of_training_have_no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch, clock = Stopwatch(started_at=2.0), Clock()
    monkeypatch.setattr(saved_run, "time", SimpleNamespace(monotonic=lambda: clock.now))
    model = Tiny(image_network().double(), torch.optim.SGD, lr=0.1)
    loader = DataLoader(TensorDataset(*noisy_images(8)), 2)
    trainer = quiet_trainer(stopwatch, clock, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(model, loader, loader)
    trainer.validate(model, loader, verbose=False)
    start_up = 5 - 2 + 100
    assert stopwatch.seconds() == {"start_up": start_up, "train": 8, "total": start_up + 8 + 2 * 4 * 10 + 4 * 100}
    assert (stopwatch.epochs, stopwatch.sizes) == (2, {"train": 8, "val": 8})
