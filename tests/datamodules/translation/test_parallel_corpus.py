"""Files of pairs as corpora are published: read as they were meant, or each line that cannot be is named."""

import gzip
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
        ("x.tsv", "Hallo\tWelt\tHello world\n", "1 with more cells than the first line (line 21)"),
        ("x.tsv", "Hallo Welt\n", "1 with fewer cells than the first line (line 21)"),
        ("x.csv", "Hallo, Welt,Hello world\n", "1 with more cells than the first line (line 22)"),
        ("x.csv", 'a, "b, c"\n', "1 with more cells than the first line (line 22)"),
        ("x.csv", "Hallo Welt\n", "1 with fewer cells than the first line (line 22)"),
        ("x.csv", '"Hallo" Welt,Hello world\n', "1 no CSV: ',' expected after '\"' (line 22)"),
        ("x.tsv", "<P>\tHello\n", "1 of markup (line 21)"),
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
    line = read_pairs(tmp_path / "x.csv", "source=de,target=en").describe_columns()
    assert line.endswith(
        "the source is 'de', the target 'en', as in 'Satz 0' and 'sentence 0'; not used: 'source', 'score'"
    )


TYPED: dict[str, tuple[str, str]] = {
    # File and form of its lines, after a header where there is one.
    "Tatoeba's export": ("x.tsv", "1000\t{a}\t5000\t{b}"),
    "manythings.org": ("x.txt", "{a}\t{b}\t12 (CK)"),
    "CCMatrix": ("x.tsv", "1.001\t{a}\t{b}"),
    "ParaCrawl": ("x.tsv", "http://a.de/0\thttp://a.com/0\t{a}\t{b}\t0.9"),
    "a provenance": ("x.csv", "source,german,english\nted,{a},{b}"),
    "numbers": ("x.csv", "idx,question,answer\n7,{a},{b}"),
    "of the Hub": ("x.jsonl", '{{"id": 7, "translation": {{"de": "{a}", "en": "{b}"}}}}'),
    "semicolons": ("x.csv", "de;en\n{a};{b}"),
    "bars": ("x.csv", "de|en\n{a}|{b}"),
    "tabs": ("x.csv", "de\ten\n{a}\t{b}"),
    "blanks": ("x.csv", 'de, en\n"{a}", "{b}"'),
    "bars without a name": ("x.txt", "{a}|{b}"),
    "quotes": ("x.tsv", '"{a}"\t"{b}"'),
}


@pytest.mark.parametrize("kind", TYPED)
def test_the_printed_columns_read_the_pairs(tmp_path: Path, kind: str):
    name, form = TYPED[kind]
    *header, line = form.split("\n")
    pairs = [(f"{a} x", f"{b} y") for a, b in PAIRS]
    (tmp_path / name).write_text("\n".join([*header, *(line.format(a=a, b=b) for a, b in pairs)]) + "\n")
    with pytest.raises(UserError, match="pass columns='") as error:
        read_pairs(tmp_path / name)
    columns = str(error.value).partition("columns='")[2].partition("'")[0]
    assert [pair[1:] for pair in read_pairs(tmp_path / name, columns).pairs] == pairs


def test_doubled_quotes_are_faults_until_they_are_declared(tmp_path: Path):
    lines = ["c\td", '"say ""a"""\tb', '"a," he said, "b."\t"c""d"']
    (tmp_path / "x.tsv").write_text("\n".join(lines[:2]) + "\n")
    assert read_pairs(tmp_path / "x.tsv").faults.describe() == "1 with doubled quotes, as CSV has them (line 2)"
    found = read_pairs(tmp_path / "x.tsv", "quotes=yes")
    assert [pair[1:] for pair in found.pairs] == [("c", "d"), ('say "a"', "b")]
    # A quotation in a text.
    (tmp_path / "x.tsv").write_text("\n".join([lines[0], lines[2]]) + "\n")
    assert len(read_pairs(tmp_path / "x.tsv").pairs) == 2


def test_a_first_line_unlike_the_others_is_named(tmp_path: Path):
    (tmp_path / "x.tsv").write_text("a\tb\tc\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS))
    with pytest.raises(UserError, match="line 1 has 3 cells, unlike most lines; correct it"):
        read_pairs(tmp_path / "x.tsv")


def test_lines_of_markup_are_faults(tmp_path: Path):
    head = ["<url>http://x/1</url>", "<P>", '<SPEAKER ID=1 LANGUAGE="DE" NAME="X">']
    for side, name in enumerate(("x.de", "x.en")):
        (tmp_path / name).write_text("\n".join([*head, *(pair[side] for pair in PAIRS), "<b>a</b> b"]))
    found = read_aligned(tmp_path / "x.de", tmp_path / "x.en")
    assert [pair[1:] for pair in found.pairs] == [*PAIRS, ("<b>a</b> b", "<b>a</b> b")]
    assert found.faults.describe() == "3 of markup (lines 1, 2, 3)"


def test_formats_of_others_are_rejected_with_what_to_write(tmp_path: Path):
    (tmp_path / "x.tmx.gz").write_bytes(gzip.compress(b"<tmx/>"))
    with zipfile.ZipFile(tmp_path / "de-en.txt.zip", "w") as archive:
        for name in ("README", "Books.de-en.de", "Books.de-en.en"):
            archive.writestr(name, "about\n")
    with pytest.raises(
        UserError, match="x.tmx.gz is a translation memory; write its units as lines of SOURCE<tab>TARG"
    ):
        read_pairs(tmp_path / "x.tmx.gz")
    with pytest.raises(
        UserError, match="de-en.txt.zip holds 3 files, expected one text: README, Books.de-en.de, .*unpa"
    ):
        read_pairs(tmp_path / "de-en.txt.zip")


def test_a_parquet_file_of_translations_is_read(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"translation": [{"de": a, "en": b} for a, b in PAIRS]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert _read(tmp_path / "x.parquet") == PAIRS
    missing = pyarrow.table({"de": ["a", None], "en": ["b", "c"]})
    pyarrow.parquet.write_table(missing, tmp_path / "y.parquet")
    assert read_pairs(tmp_path / "y.parquet").faults.describe() == "1 with an empty side (line 2)"


def test_a_table_of_one_column_is_rejected(tmp_path: Path):
    (tmp_path / "x.csv").write_text("sentence\nhello\n")
    with pytest.raises(
        UserError, match="x.csv has one column, as in 'sentence'; expected two: separated by commas or t"
    ):
        read_pairs(tmp_path / "x.csv")
