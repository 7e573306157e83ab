"""The page of a run: one well-formed file that refers to no other, whatever the run's texts hold."""

from pathlib import Path
from typing import Any

from recipes.runner.report import write_report
from tests.support.command_lines import typed
from tests.support.pages import Page, read_page

HOSTILE = "<script>alert('&amp;')</script>$x^$"


def page_of(folder: Path, **more: Any) -> Page:
    """The page of a run with these results."""
    folder.mkdir(exist_ok=True)
    names = "recipe command started_at ended_at host hardware num_nodes best stopped_early"
    results: dict[str, Any] = dict.fromkeys(names.split(), "")
    results |= {"scores": {}, "headline": {}, "versions": {}, "config": {}, "peak_memory_bytes": {}}
    results |= {"parameters": 1, "trainable_parameters": 1, "samples_per_second": 0.0, "epochs": 2}
    results |= {"data": {"name": "", "sizes": {}, "left_out": {}}}
    results |= {"seconds": {"start_up": 2.0, "train": 6.0, "total": 8.5}}
    return read_page(write_report(folder, results | more))


def test_a_page_shows_what_the_run_has_and_refers_to_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "test_per_class.csv").write_text("class,f1\ncat,0.125\n" + "dog,0.5\n" * 30)
    page = page_of(
        folder,
        recipe="mnist",
        scores={"test/loss": 1.5, "val/accuracy": 0.75, "val/accuracy_class_0": 0.25},
        headline={"val accuracy": "75 %"},
        best={"checkpoint": "best.ckpt", "epoch": 1, "step": 20, "monitor": "val/accuracy", "value": 0.75},
        config={"lr": 0.1, "seed": 1},
        command="python -m recipes.mnist --lr 0.1",
        hardware="1 x cpu",
        versions={"torch": "2.15"},
    )
    assert page.text.index("0.125") > page.text.index("test_per_class.csv")
    assert page.text.count("dog") == 24, "a page holds the first rows"
    for text in ("mnist: one", "75 %", "best.ckpt", "python -m recipes.mnist --lr 0.1", "2 settings", "1 x cpu"):
        assert text in page.text
    assert "8.5 s, of which start-up 2.0" in page.text


def test_texts_that_hold_html_stay_texts(tmp_path: Path) -> None:
    page = page_of(
        tmp_path / HOSTILE.replace("/", "-"),
        recipe=HOSTILE,
        scores={HOSTILE: 0.5},
        headline={HOSTILE: HOSTILE},
        config={"data_dir": HOSTILE, "names": [HOSTILE]},
        command=HOSTILE,
        host=HOSTILE,
        data={"name": HOSTILE, "sizes": {HOSTILE: 3}, "left_out": {HOSTILE: 4}},
        versions={HOSTILE: HOSTILE},
    )
    assert f"4 {HOSTILE}" in page.text
    assert page.text.count(HOSTILE) >= 10


def test_a_run_writes_its_page_unless_it_cannot(tmp_path: Path) -> None:
    first, bare = typed(
        tmp_path, "--max-epochs 2 --name a --lr 0.5 --logger csv", "--max-epochs 1 --name b --logger none"
    )
    assert (first.status, bare.status) == (0, 0), first.err + bare.err
    runs = tmp_path / "runs" / "quadrants"
    page = read_page(runs / "a" / "report.html")
    assert "details" in page.tags
    assert "quadrants: a" in page.text
    assert "\nlr0.5" in page.text
    assert "report" in first.out
    assert "quadrants: b" in read_page(runs / "b" / "report.html").text
    (runs / "a" / "report.html").unlink()
    (runs / "a" / "report.html").mkdir()
    (longer,) = typed(tmp_path, "--max-epochs 3 --name a --resume auto")
    assert longer.status == 0
    assert "warning: report.html cannot be written (Is a directory)" in longer.err
    assert (runs / "a" / "results.json").is_file()
    assert sorted(path.name for path in runs.glob("a/*report*")) == ["report.html"]
