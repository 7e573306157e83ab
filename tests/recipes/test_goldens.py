import json
from dataclasses import replace
from pathlib import Path

import pytest

from datamodules.errors import RunFailedError, UserError
from recipes import goldens
from recipes.goldens import TRAININGS, WAYS, Golden, differences_from, golden_of, read_goldens, write_golden

ROW = Golden("AuthenticAMD AVX2", "AMD EPYC", {"torch": "2.15.0"}, "2026-11-30", dict.fromkeys(TRAININGS, "0" * 12))


def test_a_row_of_the_same_versions_is_preferred_to_a_newer_one() -> None:
    newer = replace(ROW, versions={"torch": "2.16.0"}, date="2027-01-01")
    other = replace(ROW, processor="GenuineIntel AVX512")
    assert golden_of(ROW.processor, {"torch": "2.15.0"}, [newer, other, ROW]) == ROW
    assert golden_of(ROW.processor, {"torch": "2.14.0"}, [ROW, newer, other]) == newer
    assert golden_of("aarch64", {"torch": "2.15.0"}, [ROW, newer, other]) is None


def test_a_difference_names_what_differs_between_the_machines() -> None:
    own = replace(ROW, model="AMD Ryzen", versions={"torch": "2.16.0"}, hashes=ROW.hashes | {TRAININGS[0]: "f" * 12})
    compared = differences_from(own, ROW)
    assert compared.pop(TRAININGS[0]) == (
        "expected 000000000000: processor is AMD Ryzen, and was AMD EPYC; torch is 2.16.0, and was 2.15.0"
    )
    assert set(compared.values()) == {""}
    assert differences_from(own, None) == {}


def test_a_written_row_replaces_an_earlier_one_of_its_processor(tmp_path: Path) -> None:
    path = tmp_path / "goldens.json"
    other = replace(ROW, versions={"torch": "2.14.0"})
    for row in (ROW, other, replace(ROW, date="2027-01-01")):
        write_golden(row, path)
    assert read_goldens(path) == [other, replace(ROW, date="2027-01-01")]
    path.write_text(json.dumps([{"processor": "x"}]))
    with pytest.raises(UserError, match=f"{path} is no file of known hashes"):
        read_goldens(path)


def test_the_shipped_rows_are_of_the_trainings() -> None:
    rows = read_goldens()
    assert rows, "goldens.json is shipped with the package"
    for row in rows:
        assert list(row.hashes) == list(TRAININGS), "measure again with --write after a change of the trainings"


@pytest.mark.parametrize(
    ("hashes", "status", "said"),
    [
        (["a", "a", "a"], 0, "holds: mnist"),
        (["b", "b", "b"], 1, "differs: mnist --max-steps 1: expected a"),
        (["a", "a", "b"], 1, "the ways of a training have ended with several hashes"),
    ],
)
def test_the_status_says_whether_all_hashes_are_as_expected(
    hashes: list[str], status: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, model = goldens.processor_kind()
    row = replace(ROW, processor=kind, model=model, hashes={"mnist --max-steps 1": "a"})
    monkeypatch.setattr(goldens, "TRAININGS", tuple(row.hashes))
    monkeypatch.setattr(goldens, "read_goldens", lambda: [row])
    of_ways = dict(zip(WAYS, hashes, strict=True))
    monkeypatch.setattr(goldens, "train", lambda _training, way, _folder: of_ways[way])
    assert goldens.main([], "lightning-recipes") == status
    assert said in "".join(capfd.readouterr())


def test_the_error_of_a_run_names_the_training(tmp_path: Path) -> None:
    training = "mnist --dataset digits --lr -1"
    with pytest.raises(RunFailedError, match=f"{training} --devices 1: lr=-1.0: expected above 0"):
        goldens.train(training, "one device", tmp_path)


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(goldens, "train", interrupt)
    assert goldens.main([], "lightning-recipes") == 130


@pytest.mark.slow
def test_a_stranger_who_compares_gets_one_hash_of_each_training(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(goldens, "TRAININGS", TRAININGS[:1])
    own, is_one_hash = goldens.measure()
    assert is_one_hash, capfd.readouterr().out
    assert len(own.hashes[TRAININGS[0]]) == 12
