"""``python -m recipes compare``: runs side by side, also unfinished and damaged ones, in a terminal and in files."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from datamodules.errors import UserError
from recipes.cli.compare import compare, find_runs, print_table, read_runs
from recipes.files import write_rows
from recipes.results.curves import read_curves
from recipes.text_scores import TRANSLATIONS
from tests.support.pages import read_page
from tests.support.saved_runs import save_run

ROOT = Path(__file__).parents[3]
CURVES = "epoch,step,train/loss,val/loss\n0,9,2.0,\n0,9,,2.5\n1,19,1.0,\n1,19,,1.5\n"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of one recipe, one of another, an unfinished one and two damaged ones, in the current folder."""
    monkeypatch.chdir(tmp_path)
    best = {"checkpoint": "best.ckpt", "epoch": 1, "step": 20, "monitor": "val/loss", "value": 1.5}

    def results(lr: float, loss: float, **more: Any) -> dict[str, Any]:
        config = {"lr": lr, "seed": 1, "network": "default", "max_epochs": 2}
        scores = {"val/loss": loss, "val/accuracy_class_0": 0.5}
        seconds = {"train": 60.0 + lr, "total": 75.5}
        return {"scores": scores, "config": config, "seconds": seconds, "best": best, "recipe": "mnist"} | more

    save_run(tmp_path / "mnist/one", CURVES, **results(0.1, 1.5), changed=["lr"])
    save_run(tmp_path / "mnist/two", CURVES, **results(0.2, 1.25), changed=["lr"])
    other = {"lr": 0.1, "seed": 1, "beam_size": 3, "freeze": True}
    save_run(tmp_path / "other/one", **results(0.1, 2.0, config=other, recipe="other"), changed=["beam_size"])
    unfinished = save_run(tmp_path / "mnist/unfinished", CURVES)
    (unfinished / "results.json").unlink()
    (unfinished / "config.yaml").write_text("lr: 0.1\nseed: 7\n1: 2\nodd: {2026-01-01: 3}\n")
    broken = save_run(tmp_path / "mnist/broken", "\0\0", scores={"val/loss": "x"})
    (broken / "results.json").write_text('{"scores": {"val/lo')
    wrong = {"seconds": {"train": "long"}, "best": 3, "versions": [], "changed": 4, "config": 5, "data": "x"}
    save_run(tmp_path / "mnist/wrong", "a\n", **{"scores": {"val/loss": None}} | wrong)
    (tmp_path / "mnist/notes.txt").write_text("")
    return tmp_path


def _rows(text: str) -> dict[str, list[str]]:
    """The cells of a printed table by name of the row."""
    lines = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {row[0]: row[1:] for row in cells if row}


def test_settings_that_differ_scores_and_seconds_stand_side_by_side(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(["mnist/one", "mnist/two"], "recipes")
    out = capsys.readouterr().out
    rows = _rows(out)
    assert rows["one"] == ["two"]
    assert rows["lr"] == ["0.1", "0.2"]
    assert rows["val/loss"] == ["1.5000", "1.2500"]
    assert (rows["train"], rows["total"]) == (["1 min 0 s", "1 min 0 s"], ["1 min 16 s", "1 min 16 s"])
    assert rows["state"] == ["finished", "finished"]
    assert not {"seed", "network", "recipe", "val/accuracy_class_0"} & rows.keys()


def test_runs_of_different_recipes_show_what_was_changed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(["mnist/one", "other/one"], "recipes")
    rows = _rows(capsys.readouterr().out)
    assert rows["mnist/one"] == ["other/one"]
    assert rows["recipe"] == ["mnist", "other"]
    assert rows["beam_size"] == ["3"]
    assert not {"freeze", "network", "lr"} & rows.keys(), "a default that only one recipe has is no difference"


def test_unfinished_and_damaged_runs_show_what_can_be_read(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(["mnist/*", "--output", "table.json"], "recipes")
    assert "results.json is damaged" in capsys.readouterr().out
    table = {run["name"]: run for run in json.loads(Path("table.json").read_text())}
    assert set(table) == {"one", "two", "unfinished", "broken", "wrong"}
    assert table["unfinished"]["about"]["state"] == "unfinished: last scores"
    assert table["unfinished"]["scores"] == {"train/loss": 1.0, "val/loss": 1.5}
    assert table["unfinished"]["settings"]["seed"] == 7
    assert table["broken"]["about"]["state"] == "results.json is damaged, config.yaml is damaged"


@pytest.mark.parametrize(("width", "blocks"), [(40, 5), (60, 3), (80, 3), (200, 1), (None, 1)])
def test_the_table_fits_a_terminal_of_any_width(
    runs: Path, width: int | None, blocks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(read_runs(find_runs(["mnist/*", "other/one"])), width)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= (width or 1000)
    assert out.count("val/loss") == blocks
    assert all(name in out for name in ("mnist/two", "unfinished", "0.2", "1.2500"))


def test_the_curves_of_the_runs_are_written_as_a_picture(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(["mnist/one", "mnist/two", "mnist/broken", "--output", "compare.png"], "recipes")
    assert "written: compare.png" in capsys.readouterr().out
    with Image.open("compare.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or []}
    assert {(0x2F, 0x81, 0xF7), (0xE8, 0x73, 0x0C)} <= colours, "a curve of each run"


def test_a_page_holds_curves_and_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "mnist/two").rename(runs / "mnist/<b>$two$")
    compare(["mnist/one", "mnist/<b>$two$", "--output", "compare.html"], "recipes")
    page = read_page(Path("compare.html"))
    assert page.tags.count("svg") == 1
    assert "<b>$two$" in page.text
    assert "1.2500" in page.text


def test_a_csv_file_has_a_row_for_each_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(["mnist/one", "other/one", "--output", "compare.csv"], "recipes")
    with Path("compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["mnist/one", "other/one"]
    assert [row["settings.beam_size"] for row in rows] == ["", "3"]
    assert [row["scores.val/loss"] for row in rows] == ["1.5", "2.0"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["mnist/one"], "two runs or more, got mnist/one$"),
        (["mnist/one", "mnist/../mnist/one"], "two runs or more, got mnist/one$"),
        (["mnist"], r"mnist is no folder of a run, which holds config.yaml; pass 'mnist/\*' for the runs in it"),
        (["mnist/one", "mnist/three"], "there is no mnist/three; expected folders of runs"),
        (["nothing/*", "mnist/one"], r"there is no nothing/\*"),
        (["mnist/one", "x" * 5000], "there is no xxx"),
        (["mnist/*", "--output", "a.txt"], "a.txt: expected a name that ends in .png, .html, .csv, .json"),
        (["mnist/*", "--output", "no/a.png"], "no/a.png: there is no folder no"),
        (["other/one", "mnist/wrong", "--output", "a.png"], "a.png: none of these runs has curves"),
        (["mnist/*", "--outptu", "a.png"], "unrecognized arguments: --outptu a.png"),
        ([], "the following arguments are required: run"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs: Path, args: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(args, "recipes")
    assert not list(runs.glob("a.*"))


@pytest.mark.parametrize(
    "more",
    [
        {"best": {"monitor": 5, "step": 20, "value": 1.0}},
        {"best": {"monitor": "val/loss", "step": 10**400, "value": 1.0}},
        {"seconds": {"train": float("nan"), "total": float("inf")}},
        {"scores": {"a": 10**400, "b": [1]}, "samples_per_second": float("inf")},
        {"peak_memory_bytes": {"host": 10**400}, "changed": [[1], {}], "versions": {"a": [1]}},
    ],
)
def test_a_damaged_value_is_shown_as_it_is(
    runs: Path, more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = CURVES + "1,19,,inf\n2,19,,1e308\n3,25,-1e308,1\nnan,nan,nan,nan\n"
    save_run(runs / "odd", metrics, **{"scores": {"val/loss": 1.0}} | more)
    for suffix in ("png", "html", "csv", "json"):
        compare(["mnist/one", "odd", "--output", f"odd.{suffix}"], "recipes")
    assert "odd" in read_page(Path("odd.html")).text


def test_a_pattern_leaves_out_what_is_no_run(runs: Path) -> None:
    assert [path.name for path in find_runs(["mnist/*"])] == ["broken", "one", "two", "unfinished", "wrong"]


def test_the_command_starts_without_torch_and_an_error_takes_one_line(runs: Path) -> None:
    code = "import sys, recipes.__main__ as m; m.main(); assert not {'torch', 'matplotlib'} & sys.modules.keys()"
    command = [sys.executable, "-c", code, "compare"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([*command, "mnist/one", "mnist/two"], **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert _rows(done.stdout)["lr"] == ["0.1", "0.2"]
    done = subprocess.run([*command, "mnist/one", "\x1b[31mred"], **options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no \\x1b[31mred; expected folders of runs, such as runs/mnist/NAME\n"


def test_curves_lie_at_the_epochs_completed(tmp_path: Path) -> None:
    half = "epoch,step,val/loss\n0,4,4.0\n0,9,3.0\n1,14,2.0\n1,19,1.0\n2,24,0.5\n"
    curve = read_curves(save_run(tmp_path / "half", half)).panels["loss"]["val"]
    assert curve.epochs == [0.5, 1.0, 1.5, 2.0, 2.5], "validated twice in an epoch, and the last one ended early"
    curves = read_curves(save_run(tmp_path / "none", "step,loss\n4,4.0\n9,3.0\n"))
    assert (curves.unit, curves.panels["loss"]["run"].epochs) == ("update", [5.0, 10.0])
    assert curves.last_values() == {"loss": 3.0}
    rates = "epoch,step,lr,lr/bias,lr/head,started\n0,9,1,1,2,0.5\n1,19,2,2,3,\n"
    panels = read_curves(save_run(tmp_path / "rates", rates)).panels
    assert {name: list(parts) for name, parts in panels.items()} == {"learning rate": ["lr", "lr/head"]}
    few = "epoch,step,train/loss,train/loss_epoch\n0,4,4.0,\n0,9,2.0,\n0,9,,3.0\n"
    several = few + "".join(f"{epoch},{10 * epoch + 9},,{epoch}\n" for epoch in (1, 2))
    assert read_curves(save_run(tmp_path / "few", few)).panels["loss"]["train"].values == [4.0, 2.0]
    assert read_curves(save_run(tmp_path / "several", several)).panels["loss"]["train"].values == [3.0, 1.0, 2.0]


SENTENCES = [f"the {size} {animal} sees a house ." for size in ("big", "small", "old") for animal in ("dog", "cat")]


def _translator(folder: Path, translations: list[str], references: list[str] = SENTENCES) -> None:
    save_run(folder, scores={"test/bleu": 1.0}, config={"bleu_tokenize": "13a"})
    rows = zip(map(str, range(len(references))), translations, references, strict=True)
    write_rows(
        folder / TRANSLATIONS, [dict(zip(("source", "translation", "reference"), row, strict=True)) for row in rows]
    )


def test_translators_are_compared_by_paired_bootstrap_on_the_same_test_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _translator(tmp_path / "bad", [text.replace("sees a", "is") for text in SENTENCES])
    _translator(tmp_path / "good", [*SENTENCES[:-1], "the old cat"])
    _translator(tmp_path / "same", [text.replace("sees a", "is") for text in SENTENCES])
    compare(["bad", "good", "same", "--output", "table.json"], "python -m recipes")
    text = capsys.readouterr().out
    rows = _rows(text)
    assert rows["test sentences"] == ["6", "6", "6"]
    assert rows["BLEU"][0] == rows["BLEU"][2] != rows["BLEU"][1]
    assert rows["BLEU against bad"][1] == "+0.00, p = 1.000"
    assert rows["BLEU against bad"][0].startswith("+")
    assert rows["BLEU against bad"][0].endswith("p = 0.001")
    assert "BLEU: nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:13a|smooth:exp|version:" in text
    assert json.loads(Path("table.json").read_text())[1]["translations"]["BLEU"] == rows["BLEU"][1]


def test_translators_of_different_test_sentences_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _translator(tmp_path / "one", SENTENCES)
    _translator(tmp_path / "two", SENTENCES[1:], SENTENCES[1:])
    _translator(tmp_path / "unfinished", SENTENCES)
    (tmp_path / "unfinished/results.json").unlink()
    (tmp_path / "unfinished/config.yaml").write_text("lr: 0.1\n")
    _translator(tmp_path / "damaged", SENTENCES)
    (tmp_path / "damaged" / TRANSLATIONS).write_text("source,translation\na\n")
    compare(["one", "two", "unfinished", "damaged"], "python -m recipes")
    text = capsys.readouterr().out
    assert text.endswith("two and one were tested on different sentences, so their translations are not compared\n")
    assert "test sentences" not in _rows(text)
