"""Files of pairs as corpora are published: read as they were meant, or each line that cannot be is named."""

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from datamodules import UserError
from datamodules.translation.corpus import CorpusFilter, prepare_corpus
from datamodules.translation.parallel_corpus import SentencePairs, read_aligned, read_pairs

COUNT = 20
PAIRS = [(f"Satz {n}", f"sentence {n}") for n in range(COUNT)]


def _read(path: Path) -> list[tuple[str, str]]:
    return [pair[1:] for pair in read_pairs(path).pairs]


def _settled(found: SentencePairs, choice: str) -> list[str]:
    keep = CorpusFilter("none", on_bad_lines=choice)  # type: ignore[arg-type]
    return prepare_corpus({"train": [found]}, {"train": "x"}, keep, 0, 0, 1).notes


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("x.tsv", "Hallo\tWelt\tHello world\n", "1 with more cells than most lines (line 21)"),
        ("x.tsv", "Hallo Welt\n", "1 without a tab (line 21)"),
        ("x.csv", "Hallo, Welt,Hello world\n", "1 with more cells than the header (line 22)"),
        ("x.csv", 'a, "b, c"\n', "1 with more cells than the header (line 22)"),
        ("x.csv", "Hallo Welt\n", "1 with fewer cells than the header (line 22)"),
        ("x.csv", '"Hallo" Welt,Hello world\n', "1 no CSV: ',' expected after '\"' (line 22)"),
        ("x.tsv", "<P>\tHello\n", "1 with markup on one side (line 21)"),
    ],
)
def test_a_line_of_another_form_is_a_fault_with_its_number(tmp_path: Path, name: str, line: str, reason: str):
    separator, header = ("\t", "") if name == "x.tsv" else (",", "de,en\n")
    (tmp_path / name).write_text(header + "".join(f"{separator.join(pair)}\n" for pair in PAIRS) + line)
    found = read_pairs(tmp_path / name)
    assert [pair[1:] for pair in found.pairs] == PAIRS
    assert found.faults.describe() == reason
    assert any(f"left out 1 of {found.read} lines: {reason}" in note for note in _settled(found, "skip"))
    with pytest.raises(UserError, match="1 of .* lines cannot be used"):
        _settled(found, "error")


def test_columns_that_are_not_used_are_named(tmp_path: Path):
    (tmp_path / "x.csv").write_text("de,en,source,score\n" + "".join(f"{a},{b},web,1\n" for a, b in PAIRS))
    line = read_pairs(tmp_path / "x.csv").describe_columns()
    assert line.endswith(
        "the source is 'de', the target 'en', as in 'Satz 0' and 'sentence 0'; not used: 'source', 'score'"
    )


@pytest.mark.parametrize("separator", [",", ";", "\t", "|", ", "])
def test_any_separator_of_a_header_is_that_of_its_rows(tmp_path: Path, separator: str):
    quoted = [(f'"{a}{separator} x"', f'"{b}"') for a, b in PAIRS]
    rows = ["de" + separator + "en", *(separator.join(pair) for pair in quoted)]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    assert _read(tmp_path / "x.csv") == [(f"{a}{separator} x".replace("\t", "\t"), b) for a, b in PAIRS]


def test_markup_about_texts_is_no_pair_and_is_counted(tmp_path: Path):
    head = ["<url>http://x/1</url>", "<speaker>X</speaker>", "<title>T</title>"]
    others = ['<SPEAKER ID=1 LANGUAGE="DE" NAME="X">', "<P>", "<CHAPTER ID=2>"]
    for side, name in enumerate(("x.de", "x.en")):
        (tmp_path / name).write_text("\n".join([*head, *(pair[side] for pair in PAIRS), *others, "<b>fett</b>"]))
    found = read_aligned(tmp_path / "x.de", tmp_path / "x.en")
    assert [pair[1:] for pair in found.pairs] == [*PAIRS, ("<b>fett</b>", "<b>fett</b>")]
    assert (found.apart, len(found.faults)) == ({"markup": 6}, 0)


TMX = (
    '<?xml version="1.0"?><!DOCTYPE tmx SYSTEM "tmx14.dtd"><tmx version="1.4"><header/><body>{}</body></tmx>',
    '<tu><tuv xml:lang="de"><seg>{}</seg></tuv><tuv xml:lang="en"><seg>{}</seg></tuv></tu>',
)


def test_opus_and_hugging_faces_forms_are_read(tmp_path: Path):
    lines = [json.dumps({"id": n, "translation": {"de": a, "en": b}}) for n, (a, b) in enumerate(PAIRS)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    units = "".join(TMX[1].format(a.replace("Satz", "<b>Satz</b>"), b) for a, b in PAIRS)
    (tmp_path / "x.tmx.gz").write_bytes(gzip.compress(TMX[0].format(units).encode()))
    with zipfile.ZipFile(tmp_path / "de-en.txt.zip", "w") as archive:
        for name in ("README", "LICENSE", "Books.de-en.xml"):
            archive.writestr(name, "about\n")
        for side, language in enumerate(("de", "en")):
            archive.writestr(f"Books.de-en.{language}", "".join(f"{pair[side]}\n" for pair in PAIRS))
    for name in ("x.jsonl", "x.tmx.gz", "de-en.txt.zip"):
        found = read_pairs(tmp_path / name)
        assert [pair[1:] for pair in found.pairs] == PAIRS
        assert found.columns == ("'de'", "'en'")
        swapped = read_pairs(tmp_path / name, ["en", "de"])
        assert [pair[1:] for pair in swapped.pairs] == [pair[::-1] for pair in PAIRS]
    (tmp_path / "cut.tmx").write_text(TMX[0].format(units)[:-40])
    with pytest.raises(UserError, match="cut.tmx is no TMX file, or damaged"):
        read_pairs(tmp_path / "cut.tmx")


def test_a_parquet_file_of_translations_is_read(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"translation": [{"de": a, "en": b} for a, b in PAIRS]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert _read(tmp_path / "x.parquet") == PAIRS
    missing = pyarrow.table({"de": ["a", None], "en": ["b", "c"]})
    pyarrow.parquet.write_table(missing, tmp_path / "y.parquet")
    assert read_pairs(tmp_path / "y.parquet").faults.describe() == "1 with an empty side (line 2)"


def test_a_table_of_one_column_is_refused_with_what_separates_columns(tmp_path: Path):
    (tmp_path / "x.csv").write_text("sentence\nhello\n")
    with pytest.raises(UserError, match="x.csv has one column, 'sentence'; expected two, separated by commas"):
        read_pairs(tmp_path / "x.csv")
