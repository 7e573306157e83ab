"""Tables are read as the program that wrote them meant, or their rows are named as faults."""

import gzip
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from datamodules import UserError
from datamodules.loading.table_files import parse_columns, read_table, read_text_table

FEWER = "with fewer cells than the first line"
MORE = "with more cells than the first line"


@pytest.mark.parametrize(
    ("text", "form", "rows", "faults"),
    [
        ("a,b\n1,x, y\n2,z", {}, [["2", "z"]], {MORE: [2]}),
        ("a,b\n1\n2,z\n\n", {}, [["2", "z"]], {FEWER: [2]}),
        # A comma at the end of each line is no cell.
        ("a,b,\n1,x,\n2,y,", {}, [["1", "x"], ["2", "y"]], {}),
        # Cells keep their blanks and their quotes.
        ("a,b\n x ,y \n", {}, [[" x ", "y "]], {}),
        ('a,b\n"he said ""no""", "x"\n', {}, [['he said "no"', ' "x"']], {}),
        # A separator that is declared.
        ('a, b\n1, "x, y"\n', {"separator": ", "}, [["1", "x, y"]], {}),
        ("a;b\n1,5;2,5\n", {"separator": ";"}, [["1,5", "2,5"]], {}),
        ("a\tb\n1, 2\t3\n", {"separator": "tab"}, [["1, 2", "3"]], {}),
    ],
)
def test_a_row_has_as_many_cells_as_the_header(text, form, rows, faults):
    table = read_text_table(text.splitlines(), "x.csv", form, comma=True, header=True)
    assert ([cells for _, cells in table.rows], table.faults.lines) == (rows, faults)


@pytest.mark.parametrize(
    ("text", "form", "rows", "faults"),
    [
        ("a\tb\tc\nd\te\nf\tg\n", {}, [["a", "b", "c"]], {FEWER: [2, 3]}),
        ("a\tb\nc\td\te\n", {}, [["a", "b"]], {MORE: [2]}),
        # Quotes of a program, where they are declared.
        ('"a\tb"\t"c"\n"d"\t"e"\n', {"quotes": "yes"}, [["a\tb", "c"], ["d", "e"]], {}),
        ('c\td\n"say ""a"""\tb\n', {"quotes": "yes"}, [["c", "d"], ['say "a"', "b"]], {}),
        ('c\td\n"say ""a"""\tb\n', {}, [["c", "d"]], {"with doubled quotes, as CSV has them": [2]}),
        # Quotes of the text.
        ('"a", he said.\tb\nc\t"d"\n', {}, [['"a", he said.', "b"], ["c", '"d"']], {}),
        ('"a" "b"\t"c""d"\n', {}, [['"a" "b"', '"c""d"']], {}),
    ],
)
def test_text_between_tabs_has_the_columns_of_its_first_line(text, form, rows, faults):
    table = read_text_table(text.splitlines(), "x.tsv", form, comma=False, header=False)
    assert ([cells for _, cells in table.rows], table.faults.lines) == (rows, faults)


def test_declared_columns_have_known_uses():
    text = "path=a, b,label=c=d,separator=,"
    assert parse_columns(text, ("path", "label")) == {"path": "a, b", "label": "c=d", "separator": ","}
    for wrong in ("a", "path", "paht=a", "[a, b]"):
        with pytest.raises(UserError, match="expected USE=COLUMN, separated by commas; the uses are path, label, sep"):
            parse_columns(wrong, ("path", "label"))


def test_a_line_that_is_no_json_object_is_a_fault(tmp_path: Path):
    path = tmp_path / "x.jsonl.gz"
    rows = [json.dumps({"a": 1, "b": "x"}), "[1]", "", json.dumps({"b": "y", "c": None}), "{"]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    table = read_table(path, {})
    assert table.names == ["a", "b", "c"]
    assert table.rows == [(1, [1, "x", ""]), (4, ["", "y", None])]
    assert (table.faults.lines, table.skipped_lines) == ({"no JSON object": [2, 5]}, {"blank": 1})


def test_a_parquet_file_names_its_classes(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    found = pyarrow.table({"label": [0, 1], "text": ["a", "b"]})
    features = {"label": {"names": ["ant", "bee"], "_type": "ClassLabel"}, "text": {"_type": "Value"}}
    found = found.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(found, tmp_path / "x.parquet")
    table = read_table(tmp_path / "x.parquet", {})
    assert (table.names, table.rows) == (["label", "text"], [(1, [0, "a"]), (2, [1, "b"])])
    assert table.class_names == {"label": ["ant", "bee"]}
    (tmp_path / "y.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"y.parquet is no Parquet file, or damaged"):
        read_table(tmp_path / "y.parquet", {})


def test_line_ends_of_old_macs_are_read(tmp_path: Path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"a,b\r1,2\r3,4\r")
    assert [cells for _, cells in read_table(path, {}).rows] == [["1", "2"], ["3", "4"]]


def test_mixed_line_ends_are_rejected(tmp_path: Path):
    path = tmp_path / "x.csv"
    # The first block has no other line ends.
    path.write_bytes(b"a,b\r" + b"1,2\r" * 40_000 + b"3,4\n")
    with pytest.raises(UserError, match="lines that end in CR and others in LF"):
        read_table(path, {})


def test_files_of_other_programs_are_named(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a,b\n1,2\n")
    with zipfile.ZipFile(tmp_path / "x.xlsx", "w") as archive:
        archive.write(tmp_path / "a.txt", "[Content_Types].xml")
        archive.write(tmp_path / "a.txt", "xl/workbook.xml")
    for mode, name in (("w:gz", "x.tar.gz"), ("w", "x.tar")):
        with tarfile.open(tmp_path / name, mode) as archive:  # type: ignore[call-overload]
            archive.add(tmp_path / "a.txt", "a.tsv")
            archive.add(tmp_path / "a.txt", "b.tsv")
    (tmp_path / "x.xls").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600))
    (tmp_path / "utf16.csv").write_text("a,b\n1,2\n", encoding="utf-16")
    cases = {
        "x.xlsx": "x.xlsx is a spreadsheet or a document; save its table as CSV",
        "x.xls": "x.xls is a file of an old Excel or Word",
        "x.tar.gz": "x.tar.gz is a tar archive; unpack it",
        "x.tar": "x.tar is a tar archive; unpack it",
        "utf16.csv": "utf16.csv is no text file: its text is in UTF-16",
    }
    for name, reason in cases.items():
        with pytest.raises(UserError, match=reason):
            read_table(tmp_path / name, {})


def test_zstd_is_read_where_its_library_is_installed(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    packed = pyarrow.compress(b"a,b\n1,2\n", codec="zstd", asbytes=True)
    (tmp_path / "x.csv.zst").write_bytes(packed)
    assert read_table(tmp_path / "x.csv.zst", {}).rows == [(2, ["1", "2"])]
