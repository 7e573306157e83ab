import json
import math
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks.__main__ import INTERRUPTED, main
from benchmarks.harness.measurements import Column, Goal, Options, Section, Spread, alternate, stopwatch, write_json
from datamodules.errors import UserError

ROOT = Path(__file__).parents[2]


class FakeClock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def contender(self, *seconds: float) -> Any:
        """Work that takes these times, one after the other, and the stopwatch on it."""
        remaining = iter(seconds)

        def work() -> None:
            self.now += next(remaining)

        return stopwatch(work, self)


def finite(text: str) -> Any:
    """Strict JSON: Python alone would read NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_statistics_are_those_of_the_counted_rounds_on_a_known_clock() -> None:
    clock = FakeClock()
    contenders = {"slow": clock.contender(90.0, 4.0, 6.0, 12.0), "fast": clock.contender(70.0, 2.0, 1.0, 4.0)}
    timings = alternate(contenders, repeats=3, warmup=1)
    assert timings.seconds == {"slow": [4.0, 6.0, 12.0], "fast": [2.0, 1.0, 4.0]}
    assert (timings.rounds, timings.interrupted) == (3, False)
    slow = timings.spread("slow", unit=0.5)
    assert (slow.median, slow.low, slow.high) == (12.0, 8.0, 24.0)
    # Ratios and differences are formed within a round; the ratio of the medians would be 3.
    ratio, added = timings.ratio("slow", to="fast"), timings.added("slow", to="fast")
    assert (ratio.values, ratio.median) == ((2.0, 6.0, 3.0), 3.0)
    assert (added.values, added.median) == ((2.0, 5.0, 8.0), 5.0)


def test_a_drift_of_the_machine_cancels_out_of_ratios_but_not_of_times() -> None:
    clock = FakeClock()
    drifting = {"a": clock.contender(1.0, 2.0, 40.0), "b": clock.contender(3.0, 6.0, 120.0)}
    timings = alternate(drifting, repeats=3, warmup=0)
    assert timings.ratio("b", to="a").values == (3.0, 3.0, 3.0)
    assert timings.spread("a").high == 40.0


def test_contenders_run_in_turn_and_every_other_round_backwards() -> None:
    order: list[str] = []
    told: list[tuple[str, int, int]] = []

    def contender(name: str) -> Any:
        return lambda: float(order.append(name) or 1.0)  # type: ignore[func-returns-value]

    alternate({n: contender(n) for n in "abc"}, repeats=2, warmup=1, progress=lambda *now: told.append(now))
    assert "".join(order) == "abccbaabc"
    assert told == [(name, number, 9) for number, name in enumerate("abccbaabc", 1)]


def test_ctrl_c_keeps_the_complete_rounds_only() -> None:
    def contender(*seconds: float) -> Any:
        remaining = iter(seconds)

        def measure() -> float:
            for value in remaining:
                return value
            raise KeyboardInterrupt

        return measure

    timings = alternate({"a": contender(9.0, 1.0, 2.0, 3.0), "b": contender(9.0, 4.0, 5.0)}, repeats=5)
    assert timings.seconds == {"a": [1.0, 2.0], "b": [4.0, 5.0]}
    assert timings.interrupted
    with pytest.raises(KeyboardInterrupt):
        alternate({"a": contender(9.0), "b": contender()}, repeats=5)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0 repeats of 1 contenders"):
        alternate({"a": lambda: 1.0}, repeats=0)


def _section(interrupted: bool = False) -> Section:
    rows: dict[str, list[Spread | None]] = {
        "base": [Spread((2.0, 4.0)), None],
        "ours": [Spread((1.0, 1.0)), Spread((2.0, 4.0))],
    }
    return Section(
        "a fake", {"threads": "1"}, [Column("seconds"), Column("times faster")], rows,
        [Goal("fast", "3 times", True)], ["a note"], interrupted,
    )  # fmt: skip


def _fake_section(monkeypatch: pytest.MonkeyPatch, name: str, run: Any) -> None:
    module = types.ModuleType(f"benchmarks.sections.{name}")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(benchmarks.SECTIONS, name, "for this test")


def test_json_holds_every_figure_with_the_values_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"processor": "fake"}, {"fake": _section()})
    written = finite(path.read_text())
    assert written["machine"] == {"processor": "fake"}
    rows = written["sections"]["fake"]["rows"]
    assert rows["base"]["seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0, "values": [2.0, 4.0]}
    assert rows["base"]["times faster"] is None
    assert written["sections"]["fake"]["goals"] == [{"goal": "fast", "found": "3 times", "met": True}]


def test_json_refuses_what_is_not_finite_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {}, {"fake": _section()})
    before = path.read_text()
    broken = _section()
    broken.rows["base"][0] = Spread((math.nan,))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {}, {"fake": broken})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("within_a_section", [True, False])
def test_ctrl_c_ends_the_run_and_keeps_what_is_done(
    within_a_section: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def first(options: Options, progress: Any) -> Section:
        return _section()

    def second(options: Options, progress: Any) -> Section:
        if within_a_section:
            return _section(interrupted=True)
        raise KeyboardInterrupt

    def third(options: Options, progress: Any) -> Section:
        raise AssertionError("ran after Ctrl-C")

    for name, run in (("first", first), ("second", second), ("third", third)):
        _fake_section(monkeypatch, name, run)
    path = tmp_path / "out.json"
    assert main(["first", "second", "third", "--json", str(path)]) == INTERRUPTED
    written = finite(path.read_text())
    assert written["interrupted"]
    assert list(written["sections"]) == (["first", "second"] if within_a_section else ["first"])
    printed = capsys.readouterr()
    assert "3 (2..4)" in printed.out
    assert "what was done is kept" in printed.err


def test_sections_get_what_the_command_line_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []

    def run(options: Options, progress: Any) -> Section:
        asked.append(options)
        return _section()

    _fake_section(monkeypatch, "fake", run)
    assert main(["fake", "fake", "--quick", "--repeats", "2", "--threads", "1", "--data-dir", "there"]) == 0
    assert asked == [Options(quick=True, repeats=2, threads=1, data_dir="there")]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["calbacks_cost"], "no section 'calbacks_cost'; did you mean callbacks_cost?"),
        (["input-pipelin"], "did you mean input_pipeline?"),
        (["zzz"], "did you mean training_loop or time_to_accuracy or allocator"),
        (["--repeats", "0"], "0 is not 1 or greater"),
        (["--json", "no/such/folder/out.json"], "name a file in a folder that exists"),
    ],
)
def test_a_mistake_ends_with_status_2_and_says_what_to_type(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_importing_benchmarks_and_asking_for_help_loads_neither_torch_nor_rich() -> None:
    code = (
        "import sys, runpy, benchmarks\n"
        "sys.argv = ['benchmarks', '--help']\n"
        "try:\n    runpy.run_module('benchmarks', run_name='__main__')\n"
        "except SystemExit as ended:\n    assert ended.code == 0\n"
        "print(sorted({'torch', 'lightning', 'rich', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *help_page, loaded = found.stdout.splitlines()
    assert loaded == "[]"
    assert all(any(line.startswith(f"  {name} ") for line in help_page) for name in benchmarks.SECTIONS)


@pytest.fixture
def _threads_put_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


QUICK_SECTIONS = ["input_pipeline", "images", "image_listing", "callbacks_cost", "dropout", "fine_tuning", "seq2seq"]


def run_tiny(names: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """What the sections write and print; each must have figures, a goal and a plot."""
    path = folder / "out.json"
    args = ["--quick", "--repeats", "1", "--threads", "1", "--json", str(path), "--data-dir", str(folder)]
    assert main([*names, *args, "--plot", str(folder / "plots")]) == 0
    printed = capsys.readouterr().out
    written = finite(path.read_text())
    assert list(written["sections"]) == names
    assert not written["interrupted"]
    assert {file.stem for file in (folder / "plots").glob("*.png")} == set(names)
    for section in written["sections"].values():
        assert section["title"] in printed
        assert section["header"]["precision"]
        assert section["header"]["threads"].startswith("1 of torch")
        assert section["goals"]
        for row, figures in section["rows"].items():
            first = next(iter(figures.values()))
            assert first["min"] == first["median"] == first["max"] > 0, row
    return written, printed


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_put_back")
@pytest.mark.parametrize(
    "name",
    [name for name in benchmarks.SECTIONS if name not in QUICK_SECTIONS],
)
def test_a_section_runs_once_tiny(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_tiny([name], tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_put_back")
def test_the_quick_sections_run_once_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, printed = run_tiny(QUICK_SECTIONS, tmp_path, capsys)
    pipeline, cost = (written["sections"][name] for name in ("input_pipeline", "callbacks_cost"))
    assert "SYNTHETIC" in pipeline["header"]["data"]
    assert "SYNTHETIC" in printed
    rows = pipeline["rows"]
    stock, ours = rows["torchvision, DataLoader"], rows["MNISTDataModule, augmented"]
    seconds = "seconds an epoch"
    expected = stock[seconds]["median"] / ours[seconds]["median"]
    assert ours["times faster than torchvision"]["median"] == pytest.approx(expected)
    rows = cost["rows"]
    added = (
        rows["all four"]["microseconds an update"]["median"] - rows["bare Trainer"]["microseconds an update"]["median"]
    )
    assert rows["all four"]["added"]["median"] == pytest.approx(added)


def test_both_sides_of_the_input_pipeline_yield_the_same_images(tmp_path: Path) -> None:
    from benchmarks.sections.input_pipeline import our_loader, stock_loader, write_files

    images = torch.randint(256, (300, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    # All images differ by their first pixels, by which they are put in the same order.
    images[:, 0, 0], images[:, 0, 1] = torch.arange(300) % 256, torch.arange(300) // 256
    write_files(tmp_path, images, (torch.arange(300) % 10).to(torch.uint8))

    def everything(loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = (torch.cat(parts) for parts in zip(*loader))
        order = (images[:, 0, 0, 1] * 1000 + images[:, 0, 0, 0]).argsort()
        return images[order], labels[order]

    ours, stock = everything(our_loader(tmp_path, augment=False)), everything(stock_loader(tmp_path))
    torch.testing.assert_close(ours[0], stock[0], rtol=0, atol=1e-5)
    assert torch.equal(ours[1], stock[1])
    augmented = everything(our_loader(tmp_path))[0]
    assert augmented.shape == ours[0].shape
    assert not torch.equal(augmented, ours[0])


def test_compare_says_what_changed_beyond_the_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, now = tmp_path / "old.json", _section()
    write_json(path, {"processor": "another"}, {"fake": _section()})
    now.rows["ours"][0] = Spread((3.0, 5.0))
    now.rows["base"][0] = Spread((3.9, 5.0))
    _fake_section(monkeypatch, "fake", lambda *_: now)
    assert main(["fake", "--compare", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "fake: ours, seconds: 1 -> 4 (x 4.00)" in printed
    assert "base, seconds" not in printed, "its ranges overlap"
    assert "compared with another machine: processor: another" in printed
    path.write_text("{}")
    with pytest.raises(SystemExit):
        main(["fake", "--compare", str(path)])
    assert "holds no results; pass a file that --json has written" in capsys.readouterr().err


def test_a_plot_is_written_as_a_file_and_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from benchmarks.harness.plots import write_plots

    path = write_plots(tmp_path / "new folder", "fake", _section())
    assert path.read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(path.parent))
    events.Reload()
    assert events.Tags()["images"] == ["benchmarks/fake"]


@pytest.mark.usefixtures("_threads_put_back")
def test_what_the_callbacks_are_compared_with_learns_the_same() -> None:
    """Else a difference in time could be one of work; `WarmupLR` alone is there to change what is learned."""
    from benchmarks.harness.bare_trainer import suppress_output
    from benchmarks.sections.callbacks_cost import BARE, BARE_4, OURS_4, Classifier, fit, trainers

    torch.set_num_threads(1)
    torch.manual_seed(1)
    initial = Classifier(8).state_dict()
    learned = {}
    with suppress_output():
        for name, how in trainers().items():
            model = Classifier(8)
            model.load_state_dict(initial)
            assert fit(model, 4, *how) > 0, name
            learned[name] = model.state_dict()["network.0.weight"]
    assert not torch.equal(learned[BARE], initial["network.0.weight"])
    assert not torch.equal(learned[BARE], learned["WarmupLR, warming up"])
    for name in ("SeedControl", "GradientAccumulation(1)", "SyncBN", "four callbacks that do nothing"):
        assert torch.equal(learned[name], learned[BARE]), name
    assert not torch.equal(learned[BARE], learned[BARE_4])
    torch.testing.assert_close(learned[OURS_4], learned[BARE_4])


def test_ctrl_c_in_a_training_step_reaches_the_harness_and_the_next_one_is_heard() -> None:
    """Lightning exits the program instead, and ignores further interrupts."""
    from benchmarks.harness.bare_trainer import suppress_output
    from benchmarks.sections.callbacks_cost import Classifier, fit

    class Interrupted(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            signal.raise_signal(signal.SIGINT)
            return super().training_step(batch, batch_idx)

    handler = signal.getsignal(signal.SIGINT)
    with suppress_output(), pytest.raises(KeyboardInterrupt):
        fit(Interrupted(8), 4, 1, list)
    assert signal.getsignal(signal.SIGINT) == handler


def test_what_a_user_can_correct_is_printed_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: Options, progress: Any) -> Section:
        raise UserError("train-images is damaged; delete it")

    _fake_section(monkeypatch, "fake", run)
    with pytest.raises(SystemExit) as ended:
        main(["fake"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "python -m benchmarks: error in fake: train-images is damaged; delete it\n"
