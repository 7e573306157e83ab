"""A run in a notebook: one output that is kept up to date, one stream, and a result that shows itself."""

import re
from pathlib import Path
from typing import Any

import pytest

from datamodules.errors import UserError
from recipes import fit, predict
from tests.recipes.seq2seq.test_recipe import corpus

QUIET: dict[str, Any] = {"verbose": False, "logger": "csv", "max_epochs": 1, "accelerator": "cpu"}

ROOT = Path(__file__).parents[3]
CELLS = [
    f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    "from recipes import fit, predict\n"
    "result = fit('mnist', dataset='digits', max_epochs=2, accelerator='cpu', threads=1, limit_train_batches=6,"
    " log_every_n_steps=2)",
    "result",
    "len(predict(result.model, result.data))",
    "fit('mnist', dataset='digits', max_epochs=2, lr=-1.0)",
]


def _executed(folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of each of the `CELLS`."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(
        notebook, timeout=600, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return [list(cell.outputs) for cell in notebook.cells]


def test_a_notebook_shows_one_table_with_curves(tmp_path: Path) -> None:
    training, result, count, error = _executed(tmp_path)
    assert {output["name"] for output in training if output["output_type"] == "stream"} == {"stdout"}
    shown = [output["data"]["text/html"] for output in training if output["output_type"] == "display_data"]
    run = shown[1] if "<svg" in shown[1] else shown[0]
    assert sum("<svg" in output or "<table>" in output for output in shown) == 1
    assert run.count("<tr>") == 3, "a head and two epochs"
    assert run.count("<svg") == 3
    assert "<progress" not in "".join(shown), "bars go when they are full"
    (output,) = result
    assert re.fullmatch(
        r"<RunResult mnist: val accuracy [\d.]+ %, .*; runs/mnist/[\d_-]+>", output["data"]["text/plain"]
    )
    assert output["data"]["text/html"].count("<svg") == 3
    assert count[0]["data"]["text/plain"] == "360"
    (failed,) = [output for output in error if output["output_type"] == "error"]
    assert failed["traceback"] == ["UserError: lr=-1.0: expected above 0 and 1,000,000 at most"]


def test_predict_takes_the_data_of_a_fit(tmp_path: Path) -> None:
    digits = fit("mnist", dataset="digits", run_dir=str(tmp_path), **QUIET)
    rows = predict(digits.model, digits.data)
    assert len(rows) == 360
    with (digits.folder / "test_mistakes.csv").open() as file:
        mistakes = [line.split(",") for line in file.read().splitlines()[1:]]
    said = {row["file"]: row["class"] for row in rows}
    assert mistakes
    assert all(said[f"sample {number}"] == predicted for number, _, predicted, *_ in mistakes)


def test_predict_takes_the_sentences_of_a_fit(tmp_path: Path) -> None:
    settings = {"hidden_size": 16, "subwords": "none", "test_fraction": 0.2, "run_dir": str(tmp_path)}
    fitted = fit("seq2seq", corpus(tmp_path), **settings, **QUIET)
    rows = predict(fitted.model, fitted.data)
    assert len(rows) == fitted.data.sizes["test"]
    lines = (fitted.folder / "test_hypotheses.txt").read_text().splitlines()
    assert sorted(row["translation"] for row in rows) == sorted(lines)
    sources = fitted.data.source_texts(fitted.data.rows["test"])
    assert sorted(row["sentence"] for row in rows) == sorted(sources)
    (batch, *_) = fitted.data.test_dataloader()
    first = [row["sentence"] for row in rows[: len(batch.numbers)]]
    assert first == fitted.data.source_texts(batch.numbers), "a translation stands beside its sentence"


def test_data_without_a_part_to_predict_are_rejected(tmp_path: Path) -> None:
    settings = {"dataset": "digits", "val_fraction": 0.0, "run_dir": str(tmp_path)}
    fitted = fit("mnist", **settings, **QUIET)
    fitted.data.test_dataloader = list
    with pytest.raises(UserError, match="neither a test nor a validation part"):
        predict(fitted.model, fitted.data)
