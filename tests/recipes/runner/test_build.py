"""Settings that were left open are completed from the data and the recipe, and saved as they were used."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from datamodules import DataContract
from datamodules.contract import data_contract
from recipes import fit
from tests.support.own_training import TrainedClassifier
from tests.support.ranks import run_ranks


class Points(pl.LightningDataModule, DataContract):
    """Points of as many classes as there are.

    Args:
        num_classes: how many; by default as many as the points have.
        shade: of the points; "auto" is found out.
        batch_size: points in a batch.
    """

    built = 0

    def __init__(self, num_classes: int | None = None, shade: str = "auto", batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        Points.built += 1

    @property
    def num_classes(self) -> int:
        return self.hparams["num_classes"] or 3

    @property
    def class_names(self) -> Sequence[str]:
        return ("a", "b", "c")

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": 24}

    def resolve(self) -> dict[str, Any]:
        return {"shade": "gray"}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.rand(24, 4), torch.arange(24) % 3), batch_size=self.hparams["batch_size"])

    val_dataloader = test_dataloader = train_dataloader


class Points3(TrainedClassifier):
    """A linear classifier."""

    title = "points"
    trainer_defaults = {"max_epochs": 1}  # noqa: RUF012

    def __init__(self, num_classes: int | None = None, lr: float | None = None, **kwargs: Any) -> None:
        if lr is None:
            lr = 0.004
        super().__init__(num_classes=num_classes, lr=lr, **kwargs)

    def build_network(self) -> nn.Module:
        return nn.Linear(4, self.hparams.num_classes)

    @classmethod
    def settings_from_data(cls, data: pl.LightningDataModule, **settings: Any) -> dict[str, Any]:
        found = super().settings_from_data(data, **settings)
        if settings["max_epochs"] == -1:
            return found
        return found | {"lr": data_contract(data).sizes["train"] * settings["max_epochs"] / 1000}


def _typed(args: list[str], folder: str, callbacks: Sequence[pl.Callback] = ()) -> tuple[int, int]:
    import os

    from recipes import run

    os.chdir(folder)
    status, Points.built = 0, 0
    common = ["--accelerator", "cpu", "--precision", "32", "--enable-progress-bar=false"]
    try:
        run(
            Points3,
            Points,
            lambda: callbacks,
            args=[*args[:1], *common, *args[1:]] if args[:1] == ["validate"] else [*common, *args],
        )
    except SystemExit as end:
        status = int(end.code or 0)
    return status, Points.built


class _Threads(pl.Callback):
    """Keeps the number of threads of each batch."""

    seen: ClassVar[set[int]] = set()

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.add(torch.get_num_threads())

    on_validation_batch_start = on_train_batch_start


def _typed_with(own: list[int], args: list[str], folder: str) -> tuple[int, set[int]]:
    """On ranks that set these numbers of threads, if any; returns the status, and the numbers of the batches."""
    import os

    if own:
        torch.set_num_threads(own[int(os.environ.get("RANK", "0"))])
    before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    status, _ = _typed(args, folder, [_Threads()])
    assert (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")) == before
    return status, _Threads.seen


def test_what_recipe_shares_with_the_data_is_saved_as_found(tmp_path: Path) -> None:
    assert run_ranks(_typed, 1, ["--name", "run"], str(tmp_path)) == [(0, 1)], "the data module is built once"
    settings = yaml.safe_load((tmp_path / "runs/points/run/config.yaml").read_text())
    assert (settings["num_classes"], settings["shade"]) == (3, "gray")
    last = "runs/points/run/checkpoints/last.ckpt"
    checkpoint = torch.load(tmp_path / last, weights_only=True)
    assert checkpoint["config"] == settings
    assert checkpoint["datamodule_hyper_parameters"]["shade"] == "gray"
    # What a file of settings leaves open, as --print-config prints it, is what the run has resolved.
    (tmp_path / "open.yaml").write_text("num_classes: null\nthreads: null\nlr: null\nshade: auto\n")
    for line in (["validate", "--ckpt", last], ["--resume", last, "--max-epochs", "2"]):
        assert run_ranks(_typed, 1, [*line, "--config", "open.yaml"], str(tmp_path))[0][0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "open.yaml"}, "a validation logs into no folder"


def test_the_recipes_wishes_are_set_in_a_passed_data_module(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Points3, "settings_for_data", lambda _: {"shade": "white"})
    passed = [Points(shade=shade) for shade in ("auto", "black")]
    for data in passed:
        fit(Points3, data, run_dir=tmp_path, verbose=False, logger="none")
    assert [data.hparams.shade for data in passed] == ["white", "black"]


def test_the_rate_follows_the_length_of_the_run(tmp_path: Path) -> None:
    def rate(name: str, *args: str) -> float:
        assert run_ranks(_typed, 1, ["--name", name, *args], str(tmp_path))[0][0] == 0
        checkpoint = torch.load(tmp_path / f"runs/points/{name}/checkpoints/last.ckpt", weights_only=True)
        assert checkpoint["config"]["lr"] == checkpoint["hyper_parameters"]["lr"]
        return checkpoint["config"]["lr"]

    assert rate("run", "--max-epochs", "2") == 0.048
    assert rate("run", "--resume", "auto", "--max-epochs", "3", "--lr", "null") == 0.048
    assert rate("given", "--lr", "0.5") == 0.5
    assert run_ranks(_typed, 1, ["--name", "given", "--resume", "auto", "--lr", "null"], str(tmp_path))[0][0] == 2
    # An epoch has 3 updates, and the default is one epoch: steps alone have no bound of epochs.
    assert rate("steps", "--max-steps", "4") == rate("steps", "--resume", "auto", "--max-steps", "7")
    saved = torch.load(tmp_path / "runs/points/steps/checkpoints/last.ckpt", weights_only=True)
    assert (saved["global_step"], saved["config"]["lr"]) == (7, 0.004)


def test_all_ranks_take_the_threads_of_rank_0(tmp_path: Path) -> None:
    line = ["--name", "run", "--resume", "auto"]

    def typed(own: list[int], args: list[str]) -> list[tuple[int, set[int]]]:
        found: list[tuple[int, set[int]]] = run_ranks(
            _typed_with, max(1, len(own)), own, args, str(tmp_path), sets_threads=False
        )
        return found

    assert typed([3, 2], line) == [(0, {3}), (0, {3})]
    run = tmp_path / "runs/points/run"
    assert yaml.safe_load((run / "config.yaml").read_text())["threads"] == 3
    assert typed([2], [*line, "--max-epochs", "2"]) == [(0, {3})]
    assert typed([], ["validate", "--ckpt", str(run / "checkpoints/last.ckpt")]) == [(0, {3})]
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 1


def test_threads_of_the_flag_hold_in_each_process(tmp_path: Path) -> None:
    for world_size in (1, 2):
        line = ["--name", f"on-{world_size}", "--threads", "3"]
        ended = run_ranks(_typed_with, world_size, [], line, str(tmp_path), sets_threads=False)
        assert ended == [(0, {3})] * world_size
        scored = ["validate", "--ckpt", f"runs/points/on-{world_size}/checkpoints/last.ckpt"]
        assert run_ranks(_typed_with, world_size, [], scored, str(tmp_path), sets_threads=False) == ended
        record = (tmp_path / f"runs/points/on-{world_size}/weights.jsonl").read_text().splitlines()
        assert json.loads(record[0])["start"]["environment"]["threads"] == 3


@pytest.mark.parametrize(
    ("batch_size", "line"),
    [
        (8, "global batch 64 = 8 micro-batches of 8 on 4 devices of 1 node, "),
        (20, "global batch 64 = 4 micro-batches of 20, the last of 4, on 4 devices of 1 node, "),
    ],
)
def test_the_updates_of_a_checkpoint_count_on_other_devices(batch_size, line, tmp_path, capsys):
    from recipes.runner.build import _global_batch_text, build_run
    from recipes.runner.command import Command
    from recipes.runner.flags import ParsedArguments, Request, RunClasses
    from recipes.runner.launch import Launch
    from recipes.runner.spec import Resolver
    from tests.recipes.runner.test_folder import save

    config = {"batch_size": batch_size, "accumulate": 1, "num_classes": 3, "shade": "gray"}
    last = str(save(tmp_path / "last.ckpt", 3, 0, config))  # On one device.
    classes = RunClasses(Points3, Points, list)
    typed = Command("prog")
    spec = Resolver(classes, typed).resolve(Request("fit", ParsedArguments({"resume": last}, {})))
    built = build_run(spec, classes, Launch("local", 1, 4), typed)
    assert _global_batch_text(built) == line
    assert "devices: 1 before, 4 now; the updates and their order stay" in capsys.readouterr().out
