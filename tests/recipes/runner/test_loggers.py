"""A run's folder on a disk that fills up or is emptied while the run trains."""

import csv
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typing_extensions import override

from datamodules import UserError
from recipes import MNISTClassifier
from recipes.runner.loggers import curves, log_settings, loggers
from recipes.runner.saved_run import SavedRun, read_results
from tests.support.command_lines import MNIST, typed
from tests.support.ranks import run_ranks


class FillsTheDisk(pl.Callback):
    """In the second and third epoch no file of this process may grow, as on a full disk."""

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = 0 if trainer.current_epoch in (1, 2) else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_logs_that_cannot_be_written_end_no_training(tmp_path: Path) -> None:
    command = "--name one --max-epochs 4 --precision 32-true --save-every '9 epochs' --log-every-n-steps 1"
    (done,) = typed(tmp_path, command, callbacks=[f"{__name__}:FillsTheDisk"])
    folder = tmp_path / "runs" / "quadrants" / "one"
    assert "Traceback" not in done.err
    assert done.err.count("the TensorBoard log cannot be written (File too large); the run continues") == 1
    # There is room again in the last epoch, so that the rows are there.
    assert [row["epoch"] for row in _rows(folder / "metrics.csv") if row["val/loss"]] == ["0", "1", "2", "3"]
    assert (folder / "results.json").is_file()
    lost = "the TensorBoard log (File too large)"
    assert f"warning: not saved: {lost}; the weights and results.json are in" in done.err
    assert done.status == 0


def _save_on_a_full_disk(folder: str) -> list[Any]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    (logger,) = loggers(Path(folder), None, ["csv"])
    contents = []

    def log(limit: int, **values: float) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        logger.log_metrics(values, step=len(contents))
        logger.save()
        contents.append((Path(folder) / "metrics.csv").read_text())

    log(10**6, a=1.0)
    size = len(contents[0])
    log(size + 3, a=2.0)  # A row that fits by half.
    log(size + 3, a=3.0, b=4.0)  # The file would be written anew, with another column.
    log(10**6, a=5.0)
    return contents


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="this system does not limit the size of files")
def test_metrics_csv_gets_all_rows_once_there_is_room(tmp_path: Path) -> None:
    ((first, second, third, last),) = run_ranks(_save_on_a_full_disk, 1, str(tmp_path))
    assert first == second == third
    assert [(row["a"], row["b"]) for row in csv.DictReader(last.splitlines())] == [
        *(("1.0", ""), ("2.0", ""), ("3.0", "4.0"), ("5.0", ""))
    ]
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".part"] == []


def _log_after_a_resume(folder: str) -> list[str]:
    file = Path(folder) / "metrics.csv"
    first = os.environ.get("NODE_RANK", "0") == "0"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    (logger,) = loggers(Path(folder), SavedRun(Path("last.ckpt"), {}, updates=2, epochs=0), ["csv"])
    contents = [file.read_text()] if first else []
    for limit in (0, 10**6):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        logger.log_metrics({"b": 4.0}, step=2 + len(contents))
        logger.save()
        contents += [file.read_text()] if first else []
    return contents


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="this system does not limit the size of files")
def test_what_was_logged_before_a_resume_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("a,step\n1.0,0\n2.0,1\n3.0,2\n4.0")  # The last row is cut.
    ((first, full, last),) = run_ranks(_log_after_a_resume, 1, str(tmp_path))
    assert first == full == "a,step\n1.0,0\n2.0,1\n"
    rows = [(row["a"], row["b"], row["step"]) for row in csv.DictReader(last.splitlines())]
    assert rows == [("1.0", "", "0"), ("2.0", "", "1"), ("", "4.0", "3"), ("", "4.0", "4")]


def test_only_rank_0_opens_the_metrics_of_a_shared_folder(tmp_path: Path) -> None:
    # Reading this fails, as it did at times while rank 0 wrote the file.
    (tmp_path / "metrics.csv").write_bytes(b"\xff")
    assert run_ranks(_log_after_a_resume, 1, str(tmp_path), env={"NODE_RANK": "1"}) == [[]]


def test_the_summary_has_a_row_for_each_epoch(tmp_path: Path) -> None:
    options = "--name a --precision 32-true --log-every-n-steps 2 --check-val-every-n-epoch 2 --schedule constant"
    whole, first, more, short = typed(
        tmp_path,
        f"--max-epochs 4 {options}",
        f"--max-epochs 1 {options} --run-dir other",
        "--max-epochs 4 --name a --run-dir other --resume auto",
        "--max-steps 3 --name b --log-every-n-steps 1",
    )
    assert [done.status for done in (whole, first, more, short)] == [0, 0, 0, 0], more.err
    rows = _rows(tmp_path / "runs" / "quadrants" / "a" / "summary.csv")
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    assert [int(row["updates"]) for row in rows] == [7, 14, 21, 28]
    assert [row["val/loss"] == "nan" for row in rows] == [True, False, True, False]
    assert all(cell for row in rows for cell in row.values())
    assert not any(name.endswith("_epoch") or name.startswith("test/") for name in rows[0])
    logged = [row["train/loss_epoch"] for row in _rows(tmp_path / "runs" / "quadrants" / "a" / "metrics.csv")]
    assert [row["train/loss"] for row in rows] == [mean for mean in logged if mean]
    timed = "train/samples_per_second"
    speeds = [row[f"{timed}_epoch"] for row in _rows(tmp_path / "runs" / "quadrants" / "a" / "metrics.csv")]
    assert [row[timed] for row in rows] == [speed for speed in speeds if speed], "that of the epoch, not of its end"
    resumed = _rows(tmp_path / "other" / "quadrants" / "a" / "summary.csv")
    assert [{**row, timed: ""} for row in resumed] == [{**row, timed: ""} for row in rows]
    assert [row["updates"] for row in _rows(tmp_path / "runs" / "quadrants" / "b" / "summary.csv")] == ["3"]


def test_tensorboard_shows_the_settings_that_differ_first(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams.backend_context import Context

    for name, lr in (("a", 0.1), ("b", 0.2)):
        made = loggers(tmp_path / name, None, ["tensorboard"])
        log_settings(made, {"accumulate": 1, "callbacks": None, "devices": "auto", "lr": lr, "seed": 1})
        made[0].log_metrics({"val/loss": 2.0}, step=7)
        made[0].finalize("success")
    assert {path.name.partition(".")[0] for path in (tmp_path / "a").iterdir()} == {"events"}
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert [event.step for event in runs.GetAccumulator("a").Tensors("val/loss")] == [7]
    context = Context(TBContext(data_provider=MultiplexerDataProvider(runs, str(tmp_path))))
    request = RequestContext()
    found = context.experiment_from_metadata(
        request, "", True, context.hparams_metadata(request, ""), context.hparams_from_data_provider(request, "", None)
    )
    assert [info.name for info in found.hparam_infos] == ["lr", "accumulate", "callbacks", "devices", "seed"]
    assert [info.name.tag for info in found.metric_infos] == ["val/loss"]


def test_a_summary_or_a_graph_changes_no_bit_of_the_weights(tmp_path: Path) -> None:
    common = "--dataset digits --max-epochs 1 --limit-train-batches 2 --threads 1 --precision 32-true"
    plain, shown, rejected = typed(
        tmp_path,
        f"{common} --name plain",
        f"{common} --name shown --summary --log-graph",
        f"{common} --name rejected --log-graph --logger csv",
        **MNIST,
    )
    results = [read_results(tmp_path / "runs" / "mnist" / name) for name in ("plain", "shown")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    # Two for each multiplication with an addition: 4 convolutions without padding, and the head.
    convolutions = (24 * 24 * 25 * 16, 10 * 10 * 9 * 16 * 32, 8 * 8 * 9 * 32 * 64, 2 * 2 * 9 * 64 * 128)
    assert [result["flops"] for result in results] == [None, 2 * (sum(convolutions) + 512 * 10)]
    assert results[1]["versions"]["cuda"] is None or torch.cuda.is_available()
    assert "network.block1.0" not in plain.err
    assert re.search(r"network.block1.0 +\| Conv2d +\| 400 +\|.*\[1, 16, 24, 24\]", shown.err)
    events = [EventAccumulator(str(tmp_path / "runs" / "mnist" / name)).Reload() for name in ("plain", "shown")]
    assert [event.Tags()["graph"] for event in events] == [False, True]
    assert rejected.status == 2
    assert "--log-graph: the graph is for TensorBoard; pass --logger tensorboard,csv" in rejected.err


def test_a_recipe_without_an_example_input_has_no_graph(tmp_path: Path) -> None:
    (done,) = typed(tmp_path, "--name one --max-steps 1 --summary --log-graph")
    assert done.status == 0
    assert "the graph of the network cannot be written (Quadrants has no example_input_array" in done.err
    assert read_results(tmp_path / "runs" / "quadrants" / "one")["flops"] is None


def test_writing_a_graph_changes_no_mode_or_random_number(tmp_path: Path) -> None:
    recipe = MNISTClassifier(network="classic")
    next(recipe.network.children()).eval()
    modes = [module.training for module in recipe.modules()]
    state = torch.get_rng_state()
    log_settings(made := loggers(tmp_path, None, ["tensorboard"]), {}, recipe)
    made[0].finalize("success")  # Events are written by a thread.
    assert EventAccumulator(str(tmp_path)).Reload().Tags()["graph"]
    assert [module.training for module in recipe.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_wandb_without_a_login_is_rejected_with_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match=r"logger='wandb' cannot start: .*`wandb login`.*WANDB_MODE=offline, or leave"):
        loggers(tmp_path / "runs" / "one", None, ["wandb"])


LOGGED = [
    {"step": "0", "train/loss": "2", "train/accuracy": "0.5", "val/accuracy": "0.25", "lr": "0.1", "val/loss": ""},
    {"step": "1", "train/loss": "1", "train/accuracy": "0.75", "val/accuracy": "0.5", "lr": "0.2", "val/loss": "1.5"},
]


@pytest.mark.parametrize(
    ("monitor", "score"),
    [
        ("val/accuracy", "accuracy over updates: training from 0.5 to 0.75, validation from 0.25 to 0.5"),
        ("train/accuracy", "accuracy over updates:  from 0.5 to 0.75"),
        ("val/loss", None),
        (None, None),
    ],
)
def test_the_curves_are_loss_rate_or_the_score_of_a_run(monitor: str | None, score: str | None) -> None:
    expected = {
        "curve_loss": "loss over updates: training from 2 to 1, validation 1.5",
        "curve_rate": "learning rate over updates: lr from 0.1 to 0.2",
    }
    found = {name: plot.name for name, plot in curves(LOGGED, monitor).items()}
    assert found == expected | ({"curve_score": score} if score else {})
