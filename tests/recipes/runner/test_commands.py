"""A run scores the checkpoint that it leaves, whatever its callbacks do to the weights."""

import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, StochasticWeightAveraging
from torch import Tensor
from typing_extensions import override

from recipes.runner.errors import escape_output
from recipes.runner.report import print_rows
from tests.support.command_lines import typed
from tests.support.minimal_recipe import Line, Points
from tests.support.ranks import run_ranks
from tests.support.stock_data import Quadrants

QUICK = ["--dataset", "digits", "--max-epochs", "2", "--network", "default", "--precision", "32"]
QUICK += ["--accelerator", "cpu", "--limit-train-batches", "4"]


class EvaluateAverage(pl.Callback):
    """A user's own average, which is in no checkpoint: it takes the weights' place during each evaluation."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        weights = [p.detach() for p in pl_module.parameters()]
        self.average = [0.95 * a + 0.05 * w for a, w in zip(self.average or weights, weights, strict=True)]

    def _exchange(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter, average in zip(pl_module.parameters(), self.average):
            weights = parameter.detach().clone()
            parameter.data.copy_(average)
            average.copy_(weights)

    on_validation_start = on_validation_end = on_test_start = on_test_end = _exchange


class Draw(pl.Callback):
    """Draws in each validation of a run, as users write it, with no look at which logger there is."""

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        logger: Any = trainer.logger
        if Path(trainer.default_root_dir).name == "run":  # The commands have no folder and no logger.
            logger.experiment.add_scalar("mine", 1.0, trainer.global_step)
            Path(str(trainer.log_dir)).joinpath("mine.txt").write_text("drawn")


def expect_saved_weights(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    saved = torch.load(str(trainer.ckpt_path), weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in pl_module.state_dict().items())


AVERAGES: dict[str, Callable[[], Sequence[pl.Callback]]] = {
    "Lightning's": lambda: [EMAWeightAveraging(decay=0.9)],
    "stochastic": lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)],
    "a user's own": lambda: [EvaluateAverage(), Draw()],
    "--ema 0.9 --save-every 3steps --precision 64-true": lambda: [LambdaCallback(on_test_start=expect_saved_weights)],
}


def _type(kind: str, folder: str, *commands: list[str]) -> None:
    from datamodules import MNISTDataModule
    from recipes import run
    from recipes.mnist import MNISTClassifier

    os.chdir(folder)
    for args in commands:
        with contextlib.redirect_stdout(io.StringIO()):
            run(MNISTClassifier, MNISTDataModule, AVERAGES[kind], args)


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("Lightning's", 1),
        pytest.param("Lightning's", 2, marks=pytest.mark.slow),
        ("--ema 0.9 --save-every 3steps --precision 64-true", 2),
        ("a user's own", 1),
        pytest.param("stochastic", 1, marks=pytest.mark.slow),
    ],
)
def test_averaged_weights_have_the_scores_of_their_checkpoint(kind: str, world_size: int, tmp_path: Path):
    best = tmp_path / "runs" / "mnist" / "run" / "checkpoints" / "best.ckpt"
    flags = kind.split() if kind.startswith("--") else []
    commands = [[*QUICK, "--name", "run", "--batch-size", str(128 // world_size), *flags]]
    if world_size > 1:
        run_ranks(_type, world_size, kind, str(tmp_path), *commands, env={"TORCHELASTIC_RUN_ID": "run"})
        commands = []
    given = ["--ckpt", str(best)]
    commands += [[name, *given, "--accelerator", "cpu", "--output", f"{name}.json"] for name in ("validate", "test")]
    commands.append(["export", *given, "--format", "state-dict", "--output", "weights.pt"])
    run_ranks(_type, 1, kind, str(tmp_path), *commands)

    scores = json.loads((best.parents[1] / "results.json").read_text())["scores"]
    alone = json.loads((tmp_path / "validate.json").read_text()) | json.loads((tmp_path / "test.json").read_text())
    assert {"val/loss", "val/accuracy", "test/loss", "test/accuracy"} <= alone.keys()
    assert {name: scores[name] for name in alone} == alone
    saved = torch.load(best, weights_only=True)
    exported = torch.load(tmp_path / "weights.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved["state_dict"][f"network.{name}"]) for name, value in exported.items())
    raw = saved.get("current_model_state", {})
    assert all(not torch.equal(exported[name], raw[f"network.{name}"]) for name in exported if raw and "weight" in name)


@pytest.mark.slow
def test_without_checkpoints_the_final_weights_are_tested(tmp_path: Path):
    fit = [*QUICK, "--name", "run", "--enable-checkpointing", "false"]
    run_ranks(_type, 1, "Lightning's", str(tmp_path), fit)
    # The average, which the callback has put into the module as the training ended: as in the last validation.
    with (tmp_path / "runs" / "mnist" / "run" / "metrics.csv").open() as file:
        last = [row["val/loss"] for row in csv.DictReader(file) if row["val/loss"]][-1]
    scores = json.loads((tmp_path / "runs" / "mnist" / "run" / "results.json").read_text())["scores"]
    assert scores["val/loss"] == float(last)


class Exhausted(Quadrants):
    """Runs out of memory with more than 4 samples."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
        return super().training_step(batch, batch_idx)


def test_a_run_out_of_memory_says_what_to_pass(tmp_path: Path):
    quick = "--max-epochs 1 --logger none"
    recipe = f"{__name__}:Exhausted"
    plain, given = typed(
        tmp_path, f"{quick} --batch-size 10", f"{quick} --batch-size 5 --global-batch-size 20", recipe=recipe
    )
    assert plain.status == given.status == 1
    assert plain.err.splitlines()[-1] == (
        "error: out of memory with --batch-size 10: pass a smaller one; a larger --accumulate, or --global-batch-size,"
        " keeps the samples of an update (OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.)"
    )
    assert "with --batch-size 5: pass a smaller one; a larger --accumulate, or" in given.err


class TwoParts(Points):
    test_dataloader = Points.train_dataloader

    def val_dataloader(self) -> list[Any]:
        return [self.train_dataloader(), self.train_dataloader()]


class Scored(Line):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/loss", 1.0 + dataloader_idx, add_dataloader_idx=dataloader_idx > 0)

    def test_step(self, batch: Any, batch_idx: int) -> None: ...


def test_the_scores_of_all_loaders_are_kept(tmp_path: Path):
    ckpt = "--ckpt runs/line/one/checkpoints/last.ckpt"
    commands = ("--name one --max-epochs 1 --logger none", f"validate {ckpt} --output scores.json", f"test {ckpt}")
    *_, tested = typed(tmp_path, *commands, recipe=f"{__name__}:Scored", data=f"{__name__}:TwoParts")
    results = json.loads((tmp_path / "runs/line/one/results.json").read_text())["scores"]
    assert results == json.loads((tmp_path / "scores.json").read_text())
    assert results == {"val/loss": 1.0, "val/loss/dataloader_idx_1": 2.0}
    assert (tested.status, tested.err) == (
        2,
        "error: test_step of Scored logs no score; call self.log(NAME, VALUE) in it\n",
    )


class Untested(TwoParts):
    def test_dataloader(self) -> list[Any]:
        return []


def test_a_part_that_the_data_lack_names_the_working_command(tmp_path: Path):
    ckpt = "--ckpt runs/line/one/checkpoints/last.ckpt"
    commands = ("--name one --max-epochs 1 --logger none", f"test {ckpt}")
    _, tested = typed(tmp_path, *commands, recipe=f"{__name__}:Scored", data=f"{__name__}:Untested")
    problem, command = tested.err.splitlines()
    assert problem.startswith(
        "error: there is nothing to test: the data have no such part, or it is empty; this scores"
    )
    assert command.endswith(f" validate {ckpt}")


def test_a_name_in_another_encoding_is_printed_with_escapes(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    escape_output()
    print_rows([{"file": "\u00fc\udcff.png"}])
    stream.flush()
    assert stream.buffer.getvalue() == b"file\n\\xfc\\udcff.png\n"  # type: ignore[attr-defined]
