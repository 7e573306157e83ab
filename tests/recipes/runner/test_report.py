"""The page of a run: one well-formed file that refers to no other, whatever the run's texts hold."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from PIL import Image
from typing_extensions import override

from datamodules.errors import RunFailedError
from recipes.evaluation_tables import Headline
from recipes.figures.images import ImageGrid, Picture
from recipes.figures.plots import attention_plot, confusion_plot
from recipes.mistakes import EXPLAINED_SIDE
from recipes.runner.loggers import curves
from recipes.runner.report import split_scores, write_page
from tests.support.command_lines import MNIST, typed
from tests.support.pages import Page, read_page

HOSTILE = "<script>alert('&amp;')</script>$x^$"


def page_of(
    folder: Path, pictures: Mapping[str, Picture] | None = None, headline: Sequence[Headline] = (), **more: Any
) -> Page:
    """The page of a run with these results."""
    folder.mkdir(exist_ok=True)
    names = "recipe command started_at ended_at host hardware num_nodes best stopped_early"
    results: dict[str, Any] = dict.fromkeys(names.split(), "")
    results |= {"scores": {}, "versions": {}, "config": {}, "peak_memory_bytes": {}}
    results |= {"parameters": 1, "trainable_parameters": 1, "samples_per_second": 0.0, "epochs": 2}
    results |= {"data": {"name": "", "sizes": {}, "left_out": {}}}
    return read_page(write_page(folder / "report.html", results | more, headline, {"time": "8.5 s"}, pictures or {}))


def test_a_page_shows_what_the_run_has(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "test_per_class.csv").write_text("class,f1\ncat,0.125\n" + "dog,0.5\n" * 30)
    page = page_of(
        folder,
        recipe="mnist",
        scores={"test/loss": 1.5, "val/accuracy": 0.75, "val/accuracy_class_0": 0.25},
        headline=[Headline("val accuracy", "val/accuracy", "75 %")],
        best={"checkpoint": "best.ckpt", "epoch": 1, "step": 20, "monitor": "val/accuracy", "value": 0.75},
        config={"lr": 0.1, "seed": 1, "layers": ["fc", None], "data_dir": "été"},
        command="python -m recipes.mnist --lr 0.1",
        hardware="1 x cpu",
        host="node-7",
        num_nodes=3,
        started_at="09:30",
        ended_at="10:45",
        versions={"torch": "2.15"},
    )
    assert page.text.index("0.125") > page.text.index("test_per_class.csv")
    assert page.text.count("dog") == 24, "a page holds the first rows"
    for text in ("mnist: one", "75 %", "best.ckpt", "python -m recipes.mnist --lr 0.1", "4 settings", "1 x cpu"):
        assert text in page.text
    lines = page.text.splitlines()
    assert {"lr0.1", "seed1", 'layers["fc", null]', "data_dirété"} <= {*lines}, "as in a file of settings"
    assert {"epochs2", "nodes3", "hostnode-7", "started09:30", "ended10:45"} <= {*lines}
    assert "8.5 s" in page.text


def test_texts_that_hold_html_stay_texts(tmp_path: Path) -> None:
    page = page_of(
        tmp_path / HOSTILE.replace("/", "-"),
        recipe=HOSTILE,
        scores={HOSTILE: 0.5},
        headline=[Headline(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)],
        config={"data_dir": HOSTILE, "names": [HOSTILE]},
        command=HOSTILE,
        host=HOSTILE,
        data={"name": HOSTILE, "sizes": {HOSTILE: 3}, "left_out": {HOSTILE: 4}},
        versions={HOSTILE: HOSTILE},
    )
    assert f"4 {HOSTILE}" in page.text
    assert page.text.count(HOSTILE) >= 10


def test_captions_that_hold_html_stay_texts(tmp_path: Path) -> None:
    pixels = torch.zeros(2, 3, 80, 80, dtype=torch.uint8)
    pictures = {
        "curve_loss": curves([{"step": "1", "lr": "0.5", "train/loss": "2.5"}], None)["curve_loss"],
        "mistakes": ImageGrid(HOSTILE, pixels, [(HOSTILE, "b")] * 2, HOSTILE),
        "confusion": confusion_plot([[1, 2], [3, 4]], [HOSTILE, "dog"], "test"),
        "attention_1": attention_plot([[0.5, 0.5]], [HOSTILE, "b"], ["c"]),
    }
    (tmp_path / "test_translations.csv").write_text(f'source,translation\n"{HOSTILE}",x\n')
    page = page_of(tmp_path, pictures)
    # Title, note and captions of the grid; its alternative texts are no text; labels of plots are cut.
    assert page.text.count(HOSTILE) == 2 + 2 + 1 + 3
    assert page.text.count("<script>aler") > page.text.count(HOSTILE)
    assert page.tags.count("img") == 2
    assert page.tags.count("svg") == 3


@pytest.mark.parametrize(("side", "explained_side"), [(112, EXPLAINED_SIDE), (64, 64), (32, 32)])
def test_the_page_of_a_large_run_stays_below_2_megabytes(side: int, explained_side: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (24, 3, side, side), generator=generator, dtype=torch.uint8)
    captions = [("a class of a long name", "is another", "file.jpeg")] * 24
    grid = ImageGrid("images", noise, captions)
    explained = torch.randint(0, 256, (120, 3, explained_side, explained_side), generator=generator, dtype=torch.uint8)
    mistakes = ImageGrid("mistakes", explained, captions * 5, group=5)
    matrix = torch.randint(0, 50, (1000, 1000), generator=torch.Generator().manual_seed(1)).tolist()
    names = [f"class {number}" for number in range(1000)]
    rows = [{"step": str(step), "train/loss": str(1 / (step + 1)), "lr": "0.1"} for step in range(20_000)]
    pictures: dict[str, Picture] = {**curves(rows, None), "training_images": grid, "mistakes": mistakes}
    pictures["confusion"] = confusion_plot(matrix, names, "test")
    page = page_of(tmp_path, pictures)
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    assert "The 25 of 1,000 classes with most mistakes." in page.text
    assert page.tags.count("img") == 24 + 120


def test_scores_stand_once_in_tiles_or_in_the_table() -> None:
    signature = "nrefs:1|case:mixed"
    headline = [
        Headline("val BLEU", "val/bleu", "61.00", "greedy"),
        Headline("test BLEU", "test/bleu", "62.00"),
        Headline("test chrF", "test/chrf", "70.00"),
        Headline("sacrebleu BLEU", "test/sacrebleu", "63.00", signature=signature),
        Headline("test exact match", "test/exact_match", "40.0 %"),
    ]
    scores = {"val/bleu": 61.0, "val/accuracy_class_0": 1.0, "test/bleu": 62.0, "test/chrf": 70.0}
    scores |= {"test/sacrebleu": 63.0, "test/exact_match": 0.4, "val/exact_match": 0.4, "test/loss": 1.5}
    tiles, rest, signatures = split_scores(headline, scores)
    assert tiles == headline[:3]
    assert rest == {
        "sacrebleu BLEU": "63.00",
        "test exact match": "40.0 %",
        "val/exact_match": "0.4",
        "test/loss": "1.5",
    }
    assert signatures == {"sacrebleu BLEU": signature}


def test_a_classifiers_page_shows_its_mistakes(tmp_path: Path) -> None:
    commands = (
        "--dataset digits --max-epochs 1 --limit-train-batches 4 --log-every-n-steps 1 --name a",
        "--max-epochs 2 --name a --resume auto",
    )
    first, second = typed(tmp_path, *commands, **MNIST)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    folder = tmp_path / "runs" / "mnist" / "a"
    page = read_page(folder / "report.html")
    for title in ("loss", "accuracy", "learning rate", "Training images", "Confusion matrix, test", "Mistakes, test"):
        assert title in page.text
    with (folder / "test_mistakes.csv").open(newline="") as file:
        mistakes = list(csv.DictReader(file))
    number = f"sample {int(mistakes[0]['sample']):,}"
    said = f"{mistakes[0]['predicted']} ({100 * float(mistakes[0]['probability_predicted']):.0f} %)"
    assert page.text.index(said) < page.text.index(number), "the most confident mistake comes first"
    assert page.tags.count("img") == 24 + min(24, len(mistakes))
    # Both parts of the run are one curve.
    assert "2468" in page.text.partition("More scores")[0], "the updates below the curves"
    pictures = sorted(path.stem for path in folder.glob("figures/*.png"))
    assert pictures == ["confusion", "curve_loss", "curve_rate", "curve_score", "mistakes", "training_images"]
    for path in folder.glob("figures/*.png"):
        with Image.open(path) as image:
            assert image.mode == "RGB"
    assert _images_in_tensorboard(folder) == {"confusion": 2, "mistakes": 2, "training_images": 2}, "once in a job"


def _images_in_tensorboard(folder: Path) -> dict[str, int]:
    """How often there is an image of each name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    return {name: len(events.Images(name)) for name in events.Tags()["images"]}


@pytest.mark.parametrize("options", ["--limit-val-batches 0", "--max-epochs 0", "--logger none"])
def test_a_run_without_a_part_has_a_page_without_it(tmp_path: Path, options: str) -> None:
    (done,) = typed(tmp_path, f"--dataset digits --max-epochs 1 --limit-train-batches 2 --name a {options}", **MNIST)
    assert done.status == 0, done.err
    assert "warning" not in done.err.replace("warning: --limit", "")
    page = read_page(tmp_path / "runs" / "mnist" / "a" / "report.html")
    assert ("Curves" in page.text) == (options == "--limit-val-batches 0")
    assert ("Training images" in page.text) == (options != "--max-epochs 0")
    assert ("validation" in page.text.partition("Settings")[0]) is False
    assert "Confusion matrix, test" in page.text


class EndsTheRun(pl.Callback):
    """Raises an error after three updates."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise RunFailedError("on purpose")


def test_a_run_that_is_interrupted_has_a_page_of_its_curves(tmp_path: Path) -> None:
    command = "--dataset digits --max-epochs 1 --log-every-n-steps 1 --name a"
    (ended,) = typed(tmp_path, command, callbacks=[f"{__name__}:EndsTheRun"], **MNIST)
    assert ended.status == 1
    folder = tmp_path / "runs" / "mnist" / "a"
    page = read_page(folder / "report.html")
    assert "interrupted by RunFailedError after 3 updates" in page.text
    assert "Curves over updates" in page.text
    assert "Training images" in page.text
    assert not (folder / "results.json").exists()


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
