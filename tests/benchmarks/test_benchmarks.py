"""How ``python -m benchmarks`` measures, prints, writes and compares; and `benchmarks.gpu` and `benchmarks.faults`."""

import json
import math
import sys
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import benchmarks
from benchmarks import faults, gpu
from benchmarks.__main__ import main
from benchmarks.faults import FAULTS, FaultCase
from benchmarks.harness.measurements import Column, Goal, Section, Spread, alternate, stopwatch, write_json
from datamodules.errors import UserError


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


def test_statistics_are_formed_within_the_counted_rounds() -> None:
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


def test_every_other_round_runs_its_contenders_backwards() -> None:
    order: list[str] = []
    told: list[tuple[str, int, int]] = []

    def contender(name: str) -> Any:
        return lambda: float(order.append(name) or 1.0)  # type: ignore[func-returns-value]

    alternate({n: contender(n) for n in "abc"}, repeats=2, warmup=1, progress=lambda *now: told.append(now))
    assert "".join(order) == "abccbaabc"
    assert told == [(name, number, 9) for number, name in enumerate("abccbaabc", 1)]


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


def test_json_holds_every_figure(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"processor": "fake"}, {"fake": _section()})
    written = json.loads(path.read_text())
    assert written["machine"] == {"processor": "fake"}
    rows = written["sections"]["fake"]["rows"]
    assert rows["base"] == {"seconds": {"median": 3.0, "min": 2.0, "max": 4.0, "rounds": 2}, "times faster": None}
    assert written["sections"]["fake"]["goals"] == [{"goal": "fast", "found": "3 times", "met": True}]


def test_a_figure_that_is_not_finite_keeps_the_old_json(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(before := "{}")
    broken = _section()
    broken.rows["base"][0] = Spread((math.nan,))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {}, {"fake": broken})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_mistake_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*_: Any) -> Section:
        raise UserError("train-images is damaged; delete it")

    _fake_section(monkeypatch, "fake", run)
    for args, status, expected in (
        (["calbacks_cost"], 2, "no section 'calbacks_cost'; did you mean callbacks_cost?"),
        (["--repeats", "0"], 2, "0 is not 1 or greater"),
        (["fake"], 1, "python -m benchmarks: error in fake: train-images is damaged; delete it\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert ended.value.code == status
        assert expected in capsys.readouterr().err


def test_compare_says_what_changed_beyond_the_noise(monkeypatch, tmp_path, capsys) -> None:
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


# A GPU's figures, which mean nothing on a CPU


def test_a_quick_run_measures_both_loops_of_each_workload(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--quick", "--json", str(path)]) == 0
    sections = json.loads(path.read_text())["sections"]
    assert list(sections) == list(gpu.WORKLOADS)
    for section in sections.values():
        rates = [next(iter(row.values()))["median"] for row in section["rows"].values()]
        assert list(section["rows"]) == [gpu.PLAIN, gpu.RECIPE]
        assert min(rates) > 0


def test_a_failed_measurement_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> float:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(gpu, "recipe_seconds", fails)
    section = gpu.measure(gpu.mnist(quick=True), torch.device("cpu"), 1, 1, compiled=False)
    assert (list(section.rows), section.notes) == ([gpu.PLAIN], ["recipe failed: RuntimeError: no kernel"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no CUDA GPU here; --device cpu --quick shows that it runs" in capsys.readouterr().err


@pytest.mark.slow
def test_each_fault_case_is_reported_as_survived_or_failed(monkeypatch, capsys, tmp_path) -> None:
    good, wrong = "last.ckpt with a flipped bit", FaultCase({"kind": "raise", "at": 17}, "what no run prints", 0, 1)
    monkeypatch.setattr(faults, "FAULTS", {good: FAULTS[good], "wrong": wrong})
    assert faults.main(["--recipes", "mnist", "--picture", str(tmp_path / "a.svg")]) == 1
    survived, failed = capsys.readouterr().out.splitlines()[-2:]
    assert survived.startswith(f"| mnist | {good} | 1 |")
    assert survived.endswith("| as it has to be, weights equal |")
    ended_after, updates_after, repeated = map(float, survived.split("|")[4:7])
    assert 0 <= ended_after < updates_after
    assert repeated == 13
    texts = [
        text.text for text in ElementTree.parse(tmp_path / "a.svg").getroot().iter("{http://www.w3.org/2000/svg}text")
    ]
    assert texts[1:4] == [good, "mnist, 1 process", f"{updates_after:.1f} s"]
    assert "exit status 1" in failed
    assert "no match for 'what no run prints'" in failed
    assert "2 updates lost, at most 1 may be" in failed
