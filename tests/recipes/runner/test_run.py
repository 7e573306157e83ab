"""`fit`, called from Python: the command line's weights, and a program that goes on."""

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from callbacks import SeedControl
from datamodules import MNISTDataModule, UserError
from recipes import MNISTClassifier, RunResult, fit, run
from tests.support.minimal_recipe import Line, Points
from tests.support.ranks import run_ranks

QUIET = {"verbose": False, "logger": "none", "precision": "32-true", "accelerator": "cpu"}
FEW = QUIET | {"max_epochs": 2, "limit_train_batches": 3, "batch_size": np.int64(64)}


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    return torch.load(Path(folder) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _fitted_and_typed(folder: str) -> tuple[bool, list[str]]:
    os.chdir(folder)
    result = fit("mnist", dataset="digits", name="called", **FEW)
    flags = "--dataset digits --name typed --logger none --precision 32-true --accelerator cpu"
    flags += " --max-epochs 2 --limit-train-batches 3 --batch-size 64"
    run(MNISTClassifier, MNISTDataModule, args=flags.split())
    configs = [Path(f"runs/mnist/{name}/config.yaml").read_text().splitlines() for name in ("called", "typed")]
    assert set(configs[0]) ^ set(configs[1]) == {"devices: 1", "devices: auto"}
    assert result.folder == Path("runs/mnist/called")
    best = torch.load(result.checkpoint, weights_only=True)["state_dict"]
    assert same(result.model.state_dict(), best)
    assert not result.model.training
    return same(weights("runs/mnist/called"), weights("runs/mnist/typed")), sorted(result.scores)


def test_fit_trains_as_the_command_line_does(tmp_path: Path) -> None:
    (found,) = run_ranks(_fitted_and_typed, 1, str(tmp_path))
    assert found[0]
    assert {"val/accuracy", "test/accuracy"} <= set(found[1])


def _digits(folder: str) -> list[RunResult]:
    os.chdir(folder)
    digits = load_digits()
    images, labels = digits.images / 16, digits.target
    whole = fit("mnist", (images[:300], labels[:300]), **FEW, threads=2)
    assert torch.get_num_threads() == 1, "as before"
    parts = {"train": (images[:200], labels[:200]), "val": (images[200:240], labels[200:240])}
    given = fit("mnist", parts | {"test": (images[240:300], labels[240:300])}, **FEW)
    module = MNISTDataModule(batch_size=64)
    module.set_samples((images[:300], labels[:300]))
    built = fit(MNISTClassifier, module, **{name: value for name, value in FEW.items() if name != "batch_size"})
    assert built.data is module
    assert given.data is not None
    assert given.data.sizes == {"train": 200, "val": 40, "test": 60}
    return [sorted(result.scores) == sorted(whole.scores) for result in (given, built)]


def test_data_are_arrays_parts_or_a_data_module(tmp_path: Path) -> None:
    assert run_ranks(_digits, 1, str(tmp_path)) == [[True, True]]


def _other_arrays(folder: str) -> list[str]:
    os.chdir(folder)
    digits = load_digits()
    images, labels = digits.images[:300] / 16, digits.target[:300]
    rejected = []
    fit("mnist", (images, labels), name="one", **FEW)
    for other in ((images[:-1], labels[:-1]), (images[::-1], labels[::-1])):
        with pytest.raises(UserError) as raised:
            fit("mnist", other, name="one", resume="auto", **FEW | {"max_epochs": 3})
        rejected.append(str(raised.value))
    fit("mnist", (images, labels), name="one", resume="auto", **FEW | {"max_epochs": 3})
    return rejected


def test_a_run_is_not_resumed_with_other_arrays(tmp_path: Path) -> None:
    ((fewer, others),) = run_ranks(_other_arrays, 1, str(tmp_path))
    assert "of a run on 249 samples, found 248; resume" in fewer
    assert "others or in another order; resume with the same data" in others


def _named(folder: str) -> None:
    os.chdir(folder)
    digits = load_digits()
    images, names = digits.images[:300], np.array(["even", "odd"])[digits.target[:300] % 2]
    result = fit("mnist", (images / 16, names), **FEW, network="classic", lr=0.005, rotation=0)
    assert list(result.model.class_names) == ["even", "odd"]
    assert (result.model.hparams.lr, result.model.hparams.num_classes) == (0.005, 2)
    assert result.data is not None
    assert result.data.hparams.rotation == 0
    with pytest.raises(UserError, match="the train images are float64 from 0 to 16, .* pass images / 16"):
        fit("mnist", (images, names), **FEW)


def test_fit_takes_the_classes_from_the_labels(tmp_path: Path) -> None:
    run_ranks(_named, 1, str(tmp_path))


def _folds(folder: str) -> list[tuple[str, float]]:
    os.chdir(folder)
    digits = load_digits()
    folds = [(digits.images[start : start + 200] / 16, digits.target[start : start + 200]) for start in (0, 200)]
    return [(run.folder.name, run.scores["val/loss"]) for run in [fit("mnist", fold, **FEW) for fold in folds]]


def test_the_runs_of_a_job_are_found_again_in_their_order(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
    (runs,), (again,) = (run_ranks(_folds, 1, str(tmp_path), env=job) for _ in range(2))
    assert [name for name, _ in runs] == ["slurm-7", "slurm-7-2"]
    assert runs[0][1] != runs[1][1]
    assert again == runs


def _interactive(folder: str) -> float:
    os.chdir(folder)
    names = {"__name__": "__main__", "MNISTClassifier": MNISTClassifier}
    constructor = (
        "def __init__(self, extra: int = 3, **kwargs):\n  super().__init__(**kwargs)\n  self.save_hyperparameters()"
    )
    exec(f"class Mine(MNISTClassifier):\n title = 'mine'\n {constructor}", names)
    result = fit(names["Mine"], dataset="digits", name="one", callbacks=Noted(), **FEW)
    assert (result.model.hparams.extra, result.model.hparams.lr) == (3, 0.01)
    return result.scores["test/accuracy"]


def test_a_class_of_an_interactive_session_trains(tmp_path: Path) -> None:
    assert 0 < run_ranks(_interactive, 1, str(tmp_path))[0] <= 1


class Noted(pl.Callback):
    def __init__(self) -> None:
        self.updates = 0

    def on_train_batch_end(self, *args: object) -> None:
        self.updates += 1


class Interrupting(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGINT)


class Raising(pl.Callback):
    def on_train_batch_end(self, *_: object) -> None:
        raise KeyboardInterrupt


def _interrupted(folder: str) -> list[bool]:
    os.chdir(folder)
    options = QUIET | {"max_epochs": 3, "save_every": "1 steps"}
    noted = Noted()
    whole = fit(Line, Points, name="whole", callbacks=[noted], **options)
    with pytest.raises(KeyboardInterrupt):
        fit(Line, Points, name="stopped", callbacks=[Interrupting()], **options)
    with pytest.raises(KeyboardInterrupt):
        fit(Line, Points, name="raised", callbacks=[Raising()], **options)
    resumed = fit(Line, Points, name="stopped", resume="auto", **options)
    again = fit(Line, Points, name="stopped", resume="auto", **options)
    handlers = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert noted.updates > 4
    equal = [same(weights(whole.folder), weights(run.folder)) for run in (resumed, again)]
    return [
        *equal,
        same(resumed.model.state_dict(), again.model.state_dict()),
        again.scores == resumed.scores,
        handlers,
    ]


def test_an_interrupted_fit_raises_then_resumes(tmp_path: Path) -> None:
    assert run_ranks(_interrupted, 1, str(tmp_path)) == [[True] * 5]


def _on_ranks(folder: str) -> dict[str, torch.Tensor]:
    os.chdir(folder)
    size = 64 // int(os.environ.get("WORLD_SIZE", 1))
    options = QUIET | {"dataset": "digits", "global_batch_size": 64, "batch_size": size, "limit_train_batches": 3}
    first = fit("mnist", name="first", max_epochs=1, **options, sync_bn=True)
    second = fit("mnist", name="second", max_epochs=1, **options, seed=2)
    assert first.scores
    assert second.scores
    return first.model.state_dict()


def test_processes_of_a_launcher_train_together(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (alone,) = run_ranks(_on_ranks, 1, str(tmp_path / "one"))
    both = run_ranks(_on_ranks, 2, str(tmp_path))
    assert same(both[0], both[1])
    for name, value in alone.items():
        torch.testing.assert_close(value, both[0][name], rtol=1e-3, atol=1e-4)


class Untyped(Line):
    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)


WRONG = {
    "Untyped.__init__' does not specify a type": {"recipe": Untyped, "data": Points},
    "two SeedControl, and a checkpoint holds the state of one": {"callbacks": [SeedControl()], "dataset": "digits"},
    "fit() has no parameter sede; did you mean seed": {"sede": 2},
    "fit() takes no ckpt": {"ckpt": "best.ckpt"},
    "lr is a object, and settings are": {"lr": object()},
    "expected (images, labels)": {"data": 3},
    "with fast_dev_run there is none: pass devices=1": {"devices": 2, "fast_dev_run": True, "dataset": "digits"},
    "lr=x: expected FLOAT": {"lr": "x"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_used_is_rejected(message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        fit(**({"recipe": "mnist", "run_dir": tmp_path, "accelerator": "cpu"} | WRONG[message]))
    assert message in str(raised.value)
    assert list(tmp_path.rglob("*")) == []


def test_a_program_that_srun_should_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr("recipes.runner.run.program_name", lambda: "python train.py")
    with pytest.raises(UserError, match="srun --nodes=2 --ntasks-per-node=1 python train.py"):
        fit("mnist", dataset="digits", run_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fit_starts_the_processes_of_one_machine() -> None:
    nodes = {"num_nodes": 2, "node_rank": 1, "master_addr": "127.0.0.1"}
    with pytest.raises(
        UserError, match="^num_nodes=2: fit.. starts the processes of one machine; start the program by"
    ):
        fit("mnist", dataset="digits", **nodes)
