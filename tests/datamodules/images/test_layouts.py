"""What is recognized, what is declared, and the flag that an error prints for everything else."""

import json
import re
import shlex
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules import ImageFolderDataModule, UserError
from datamodules.errors import spelling_as_flags
from datamodules.images.arrays import from_arrays
from datamodules.images.layouts import find_images
from datamodules.images.source import Source


def _image(path: Path, number: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def _lay_out(folder: Path, forms: str, tables: dict[str, str], numbers: Iterable[int] = range(12)) -> Path:
    """Write images, and tables of which the last line is repeated for each image; a and b alternate as classes."""
    for number in numbers:
        for form in forms.split():
            _image(folder / _filled(form, number), number)
    for name, text in tables.items():
        *first, row = text.split("\n")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join([*first, *(_filled(row, number) for number in numbers)]) + "\n")
    return folder


def _filled(form: str, number: int) -> str:
    return (
        form.replace("<n>", str(number))
        .replace("<c>", "ab"[number % 2])
        .replace("<part>", ("train", "train", "val", "test")[number // 3 % 4])
        .replace("<held out>", str(number > 8))
    )


def _sizes(source: Source) -> dict[str, int]:
    """Return how many images the parts have, after a check that the classes of the images are right."""
    for images, labels in source.parts.values():
        for name, label in zip(images, labels.tolist(), strict=True):
            number = int(re.findall(r"\d+", Path(name).stem)[-1])
            assert source.classes[label] in ("ab"[number % 2], str(number % 2))
    return {part: len(labels) for part, (_, labels) in source.parts.items()}


PARTS = {"train": 6, "val": 3, "test": 3}
READ: dict[str, tuple[str, dict[str, str], dict[str, Any], dict[str, int]]] = {
    # Images, tables, what is declared, and how many images the parts have. A table called x is passed itself.
    "classes": ("<c>/<n>.png", {}, {}, {"train": 12}),
    "parts": ("Train/<c>/<n>.png Validation/<c>/<n>.png test/<c>/<n>.png", {}, {}, dict.fromkeys(PARTS, 12)),
    "a table": ("i/<n>.png", {"x.csv": "path,label\ni/<n>.png,<c>"}, {}, {"train": 12}),
    "a table with parts": ("<n>.png", {"x.csv": "Path,Label,Split\n<n>.png,<c>,<part>"}, {}, PARTS),
    "json": ("<n>.png", {"x.jsonl": '\n{"path": "<n>.png", "label": "<c>", "split": "<part>"}'}, {}, PARTS),
    "tabs": ("<n>.png", {"x.tsv": "path\tlabel\n<n>.png\t<c>"}, {}, {"train": 12}),
    "windows": ("<n>.png", {"x.csv": "\ufeffpath,label\r\n<n>.png,<c>\r"}, {}, {"train": 12}),
    "a table of each part": (
        "<n>.png",
        {"TRAIN.csv": "path,label\n<n>.png,<c>", "val.csv": "path,label\n<n>.png,<c>"},
        {},
        {"train": 12, "val": 12},
    ),
    "the Hub's metadata": (
        "train/images/<n>.png test/images/<n>.png",
        {
            "train/metadata.jsonl": '\n{"file_name": "images/<n>.png", "label": "<c>"}',
            "test/metadata.csv": "file_name,label\nimages/<n>.png,<c>",
        },
        {},
        {"train": 12, "test": 12},
    ),
    "a test table without labels": (
        "<n>.png",
        {"train.csv": "path,label\n<n>.png,<c>", "test.csv": "path\n<n>.png"},
        {},
        {"train": 12},
    ),
    "a class called train": ("train/<n>.png dev/<n>.png", {}, {"layout": "{class}/*"}, {"train": 24}),
    "a layout of parts": ("<part>/images/<c>_<n>.png", {}, {"layout": "{split}/images/{class}_*.png"}, PARTS),
    "a layout of names": ("x/<c>.<n>.png", {}, {"layout": "x/{class}.[0-9]*.png"}, {"train": 12}),
    "columns": (
        "<n>.png",
        {"x.csv": "breed,file,fold\n<c>,<n>.png,<part>"},
        {"columns": "path=file,label=breed,split=fold"},
        PARTS,
    ),
    "numbers of columns": (
        "<n>.png",
        {"x.txt": "\n<n>.png <c>"},
        {"columns": "path=1,label=2,separator=space"},
        {"train": 12},
    ),
    "a path of columns": (
        "i_<c>/<n>.png",
        {"x.csv": "id,kind,label\n<n>,<c>,<c>"},
        {"columns": "path=i_{kind}/{id}.png"},
        {"train": 12},
    ),
    "a column of yes or no": (
        "<n>.png",
        {"x.csv": "path,label,is_valid\n<n>.png,<c>,<held out>"},
        {"columns": "val=is_valid"},
        {"train": 9, "val": 3},
    ),
}


@pytest.mark.parametrize("layout", READ)
def test_recognized_or_declared_images_are_read(tmp_path: Path, layout: str):
    forms, tables, declared, sizes = READ[layout]
    _lay_out(tmp_path, forms, tables)
    place = next((tmp_path / name for name in tables if name.startswith("x.")), tmp_path)
    if layout == "a class called train":
        source = find_images(place, **declared)
        assert source.classes == ("dev", "train")
    else:
        source = find_images(place, **declared)
        assert _sizes(source) == sizes
    assert {part: len(labels) for part, (_, labels) in source.parts.items()} == sizes
    assert (source.left_out == {}) == (layout != "a test table without labels")


TYPED: dict[str, tuple[str, dict[str, str], dict[str, int]]] = {
    # What is not recognized is read after the flag that the error prints, and the second error's where there is one.
    "Kaggle, Cat and Dog": ("training_set/<c>/<n>.png test_set/<c>/<n>.png", {}, {"train": 12, "test": 12}),
    "Kaggle, Intel scenes": (
        "seg_train/seg_train/<c>/<n>.png seg_test/seg_test/<c>/<n>.png",
        {},
        {"train": 12, "test": 12},
    ),
    "PACS": ("photo/<c>/<n>.png sketch/<c>/<n>.png", {}, {"train": 24}),
    "CUB": ("images/<c>/<n>.png", {}, {"train": 12}),
    "tiny-imagenet": ("train/<c>/images/<c>_<n>.png", {}, {"train": 12}),
    "COVID-19 Radiography": ("<c>/images/<n>.png <c>/masks/<n>.png", {}, {"train": 12}),
    "one camera without a class": ("cam1/a/<n>0.png cam2/<c>/<n>.png", {}, {"train": 24}),
    "the class in names": ("<c>.<n>.png", {}, {"train": 12}),
    "a folder below": ("x/train/<c>/<n>.png x/val/<c>/<n>.png", {}, {"train": 12, "val": 12}),
    "a table in a folder": ("i/<n>.png", {"labels.csv": "path,label\ni/<n>.png,<c>"}, {"train": 12}),
    "Kaggle, a table of ids": ("train/<n>.png", {"train.csv": "id,breed\n<n>,<c>"}, {"train": 12}),
    "Kaggle, names in a folder": ("train_i/<n>.png", {"x.csv": "image_id,label\n<n>.png,<c>"}, {"train": 12}),
    "other columns": ("i/<n>.png", {"x.csv": "image,id,choice\ni/<n>.png,<n>,<c>"}, {"train": 12}),
    "semicolons": ("<n>.png", {"x.csv": "path;label\n<n>.png;<c>"}, {"train": 12}),
    "a blank after each comma": ("<n>.png", {"x.csv": 'path, label\n<n>.png, "<c>"'}, {"train": 12}),
    "no header": ("<n>.png", {"x.csv": "\n<n>.png,<c>"}, {"train": 12}),
    "a list as text": ("<n>.png", {"x.txt": "\n<c> <n>.png"}, {"train": 12}),
    "a subset": ("<n>.png", {"x.csv": "path,label,subset\n<n>.png,<c>,<part>"}, PARTS),
    "a part under any name": ("<n>.png", {"x.csv": "path,label,role\n<n>.png,<c>,<part>"}, PARTS),
    "fastai": ("<n>.png", {"x.csv": "path,label,is_valid\n<n>.png,<c>,<held out>"}, {"train": 9, "val": 3}),
    "is_test": ("<n>.png", {"x.csv": "path,label,is_test\n<n>.png,<c>,<held out>"}, {"train": 9, "test": 3}),
    "two faults": ("<n>.png", {"x.csv": "file;label\n<n>.png;<c>"}, {"train": 12}),
}


@pytest.mark.parametrize("layout", TYPED)
def test_the_printed_flag_reads_the_images(tmp_path: Path, layout: str):
    forms, tables, sizes = TYPED[layout]
    _lay_out(tmp_path, forms, tables)
    place = str(next((tmp_path / name for name in tables if name.startswith("x.")), tmp_path))
    declared: dict[str, str] = {}
    for _ in range(3):
        try:
            with spelling_as_flags(["data_dir", "layout", "columns"]):
                source = find_images(place, **declared)
        except UserError as error:
            words = shlex.split(str(error).partition("pass ")[2])
            name = words[0].removeprefix("--").replace("-", "_")
            if name == "data_dir":
                place = words[1].rstrip(",")
            else:
                declared[name] = words[1].rstrip(",")
        else:
            break
    assert _sizes(source) == sizes
    assert declared or layout == "a table in a folder"


REJECTED: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "a class in val alone": ("train/<c>/<n>.png val/bee/<n>.png", {}, {}, "no image of: bee; expected only a, b"),
    "no folders": (
        "<n>.jpg.txt",
        {},
        {},
        r"holds 12 files such as .*\.txt; expected CLASS/IMAGE .*; pass `layout` with",
    ),
    "one class": ("ant/<n>.png", {}, {}, "holds images of one class only, ant; expected CLASS/IMAGE"),
    "no train": ("val/<c>/<n>.png", {}, {}, r"holds val/ \(a/, b/\); expected"),
    "no classes": ("train/<n>.png test/<n>.png", {}, {}, r"layout='{class}/\*' if test and train are classes"),
    "train and dev": ("train/<n>.png dev/<n>.png", {}, {}, r"layout='{class}/\*' if dev and train are classes"),
    "unlabeled": ("train/<n>.png unlabeled/<n>.png", {}, {}, "if train and unlabeled are classes"),
    "Kaggle's tables": (
        "train/<n>.png test/<n>.png",
        {"sample_submission.csv": "id,label\n<n>,<c>", "train_labels.csv": "id,label\n<n>,<c>"},
        {},
        "pass data_dir='.*/train_labels.csv'",
    ),
    "val twice": ("train/<c>/<n>.png val/<c>/<n>.png valid/<c>/<n>.png", {}, {}, "holds both val and valid; keep one"),
    "Pascal VOC": (
        "JPEGImages/<n>.png SegmentationClass/<n>.png",
        {},
        {},
        "holds JPEGImages/ .*; expected CLASS/IMAGE",
    ),
    "folds": ("fold1/<n>.png fold2/<n>.png", {}, {}, "if fold1 and fold2 are classes"),
    "BUSI": ("<c>/x<n>.png <c>/x<n>_mask.png", {}, {}, r"holds a/ \(12 .png\), b/"),
    "a class that may be longer": (
        "a_<c>_<n>.png",
        {},
        {"layout": "{class}_*"},
        r"may be a or a_[ab]; write .*\[0-9\]",
    ),
    "a layout without a class": ("<c>/<n>.png", {}, {"layout": "*/*"}, r"layout='\*/\*': expected {class} in it"),
    "another layout": (
        "<c>/<n>.png",
        {},
        {"layout": "x/{class}/*"},
        r"is in layout='x/{class}/\*'; .*pass layout='{class}",
    ),
    "a layout of a table": ("<n>.png", {"x.csv": "path,label\n<n>.png,<c>"}, {"layout": "{class}/*"}, "has no layout"),
    "columns of folders": ("<c>/<n>.png", {}, {"columns": "path=a"}, "columns='path=a': .* holds no table"),
    "an unknown use": (
        "<n>.png",
        {"x.csv": "p,label\n<n>.png,<c>"},
        {"columns": "paht=p"},
        "the uses are path, label, spl",
    ),
    "an unknown column": (
        "<n>.png",
        {"x.csv": "path,label\n<n>.png,<c>"},
        {"columns": "label=kind"},
        r"x.csv has the columns 'path', 'label' and not 'kind'; pass columns='path=path,label=label'",
    ),
    "several labels": (
        "<n>.png",
        {"x.jsonl": '\n{"path": "<n>.png", "label": [0, 1]}'},
        {},
        r"label \[0, 1\]: several lab",
    ),
    "an object": ("<n>.png", {"x.jsonl": '\n{"path": "<n>.png", "label": {"a": 1}}'}, {}, "several labels an image"),
    "measured numbers": ("<n>.png", {"x.csv": "path,label\n<n>.png,0.<n>7"}, {}, "label 0.07: measured numbers are no"),
    "rows of pixels": (
        "",
        {"x.csv": f"label,{','.join(f'p{i}' for i in range(784))}\n"},
        {},
        "save rows of pixels as arr",
    ),
    "a class in one table": (
        "<n>.png",
        {"train.csv": "path,label\n<n>.png,<c>", "val.csv": "path,label\n<n>.png,cow"},
        {},
        "no image of: cow; expected only a, b",
    ),
    "one class in a table": (
        "<n>.png",
        {"x.csv": "path,label\n<n>.png,ant"},
        {},
        "lists images of one class only, ant",
    ),
    "an empty table": ("<n>.png", {"x.csv": "path,label\n"}, {}, "lists no image to train on; expected path,label"),
    "no part": (
        "<n>.png",
        {"x.csv": "path,label,split\n<n>.png,<c>,trian"},
        {},
        r"12 of no part \(lines 2, 3, .*expected train, val, valid, ",
    ),
    "two tables of a part": (
        "<n>.png",
        {"train.csv": "path,label\n<n>.png,<c>", "train.tsv": "path\tlabel\n<n>.png\t<c>"},
        {},
        "holds both .*train.csv and .*train.tsv; pass one",
    ),
}


@pytest.mark.parametrize("layout", REJECTED)
def test_what_is_no_set_of_classes_is_rejected(tmp_path: Path, layout: str):
    forms, tables, declared, reason = REJECTED[layout]
    if layout == "no folders":
        for number in range(12):
            (tmp_path / f"{number}.txt").touch()
    else:
        _lay_out(tmp_path, forms, tables)
    place = next((tmp_path / name for name in tables if name.startswith("x.")), tmp_path)
    with pytest.raises(UserError, match=reason) as error:
        find_images(place, **declared)
    assert "\n" not in str(error.value)


def test_files_that_are_left_out_are_counted(tmp_path: Path):
    _lay_out(tmp_path, "train/<c>/<n>.png loose<n>.png train/<n>.png other/x/<n>.png", {})
    for name in ("0.XYZ", "1.xyz", "2"):
        (tmp_path / "train" / "a" / name).touch()
    (tmp_path / "train" / "cow").mkdir()
    source = find_images(tmp_path)
    assert _sizes(source) == {"train": 12}
    assert source.left_out == {".png": 36, ".xyz": 2, "no ending": 1}
    assert source.notes == [
        f"{tmp_path}/other is not used: it is no folder train, val or test of classes",
        f"class cow is left out: {tmp_path}/train/cow holds no image",
        f"left out 36 images that are not in {{split}}/{{class}}/*, such as {tmp_path}/loose0.png",
        "left out 3 files that are no images by their endings: 2 .xyz, 1 without an ending, such as "
        f"{tmp_path}/train/a/0.XYZ",
    ]


def test_tables_that_are_not_used_are_named(tmp_path: Path):
    rows = "path,label\n<n>.png,<c>"
    _lay_out(tmp_path / "alone", "<n>.png", {"train.csv": rows, "Val.csv": rows, "x.csv": rows})
    (note,) = (note for note in find_images(tmp_path / "alone" / "train.csv").notes if "not used" in note)
    assert note.endswith(f"alone/Val.csv; pass data_dir='{tmp_path}/alone' for all parts")
    assert f"not used: {tmp_path}/alone/x.csv" in find_images(tmp_path / "alone").notes
    _lay_out(tmp_path / "folders", "train/<c>/<n>.png", {"train.csv": rows})
    assert find_images(tmp_path / "folders").notes[-1].endswith("folders/train.csv is not used: the class folders are")


def test_images_in_no_table_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _lay_out(tmp_path, "<n>.png", {})
    _lay_out(tmp_path, "", {"train.csv": "path,label\n<n>.png,<c>"}, range(8))
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, Path()):
        source = find_images(place)
        assert _sizes(source) == {"train": 8}
        assert source.left_out == {"in no table": 4}


WRONG = "path,label\n0.png,a\n1.png\n\ngone.png,b\n3.png,b\n,b\n0.png,b\n4.png,a,x\n5.png,\n"


def test_wrong_rows_are_named_with_their_lines(tmp_path: Path):
    _lay_out(tmp_path, "<n>.png", {})
    (tmp_path / "x.csv").write_text(WRONG)
    reasons = (
        "1 with fewer cells than the first line (line 3)",
        "1 with more cells than the first line (line 9)",
        "1 whose file does not exist (line 5)",
        "1 without a path (line 7)",
        "1 of a file that was listed before (line 8)",
        "1 without a label (line 10)",
    )
    listed = re.escape(f"x.csv: 6 of 8 lines cannot be used: {'; '.join(reasons)}; expected paths relative to")
    with pytest.raises(UserError, match=f'{listed}.*pass on_corrupt="?.skip'):
        ImageFolderDataModule(data_dir=str(tmp_path / "x.csv")).setup("fit")
    source = find_images(tmp_path / "x.csv", on_faults="skip")
    assert {part: len(labels) for part, (_, labels) in source.parts.items()} == {"train": 2}
    assert sum(source.left_out.values()) == 6
    assert any("left out 6 of 8 lines" in note for note in source.notes)


def test_a_tables_fields_are_read_unchanged(tmp_path: Path):
    for number, name in enumerate(("0 .png", "0.png", " 1.png", "1.png")):
        _image(tmp_path / name, number)
    (tmp_path / "x.csv").write_text('path,label\n0 .png,"a, x"\n0.png,b\n 1.png,"a, x"\n1.png,b\n')
    source = find_images(tmp_path / "x.csv")
    names = [Path(name).name for name in source.parts["train"].images]
    assert dict(zip(names, source.parts["train"].labels.tolist())) == {"0 .png": 0, "0.png": 1, " 1.png": 0, "1.png": 1}
    assert source.classes == ("a, x", "b")


def test_numbered_classes_have_one_order(tmp_path: Path):
    for number in range(12):
        _image(tmp_path / "set" / str(number) / "1.png", number)
        _image(tmp_path / "flat" / f"{number}.a.png", number)
    (tmp_path / "set" / "x.csv").write_text("path,label\n" + "".join(f"{n}/1.png,{n}\n" for n in range(12)))
    images = np.full((12, 9, 9), 200, np.uint8)
    ways = {
        "folder": find_images(tmp_path / "set"),
        "table": find_images(tmp_path / "set" / "x.csv"),
        "layout": find_images(tmp_path / "flat", layout="{class}.a.png"),
        "arrays of numbers": from_arrays({"train": (images, np.arange(12))}),
        "arrays of texts": from_arrays({"train": (images, np.arange(12).astype(str))}),
    }
    by_value = tuple(map(str, range(12)))
    assert {way: source.classes for way, source in ways.items()} == dict.fromkeys(ways, by_value)


def test_a_class_is_the_same_however_its_letters_are_composed(tmp_path: Path):
    for part, form in (("train", "NFC"), ("val", "NFD")):
        for name in ("Bär", "Ameise"):
            _image(tmp_path / part / unicodedata.normalize(form, name) / "1.png", len(part))  # type: ignore[arg-type]
    assert find_images(tmp_path).classes == ("Ameise", "Bär")


def test_images_in_two_parts_are_named(tmp_path: Path):
    _lay_out(tmp_path / "set", "train/<c>/<n>.png", {})
    _lay_out(tmp_path / "set", "val/<c>/<n>.png", {}, range(10, 14))
    for name in ("set", "x.zip"):
        if name == "x.zip":
            _pack(tmp_path / "set", tmp_path / name)
        (note,) = find_images(tmp_path / name).notes
        root = f"{tmp_path}/{name}" + "/set" * (name == "x.zip")
        assert note == f"2 images of val are also in train, such as {root}/val/a/10.png and {root}/train/a/10.png"


# Archives and formats of others


def _pack(folder: Path, path: Path) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for file in files:
                archive.write(file, file.relative_to(folder.parent))
    else:
        mode = {"x.tar": "w", "x.tar.xz": "w:xz"}.get(path.name, "w:gz")
        with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
            archive.add(folder, folder.name)


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz", "x.tgz", "x.tar.xz"])
@pytest.mark.parametrize("form", ["classes", "a table", "metadata", "a layout"])
def test_an_archive_is_read_as_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forms, tables, declared = {
        "classes": ("<c>/<n>.png", {}, {}),
        "a table": ("images/<n>.png", {"train.csv": "path,label\nimages/<n>.png,<c>"}, {}),
        "metadata": ("train/i/<n>.png", {"train/metadata.csv": "file_name,label\ni/<n>.png,<c>"}, {}),
        "a layout": ("i/x/<c>_<n>.png", {}, {"layout": "x/{class}_[0-9]*"}),
    }[form]
    folder = _lay_out(tmp_path / "set", forms, tables)
    _pack(folder, tmp_path / name)
    # The only folder of an archive is left out, and so is the only one in it.
    expected = find_images(folder / "i" if declared else folder, **declared)
    source = find_images(tmp_path / name, **declared)
    assert _sizes(source) == _sizes(expected) == {"train": 12}
    contents = [[one.parts["train"].images.read(row) for row in range(12)] for one in (expected, source)]
    assert contents[0] == contents[1]
    assert source.title == name


def test_a_killed_unpacking_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _pack(_lay_out(tmp_path / "set", "<c>/<n>.png", {}), tmp_path / "x.tar.gz")
    find_images(tmp_path / "x.tar.gz")
    (folder,) = (path for path in (tmp_path / "cache/lightning-recipes/archives").iterdir() if path.name[0] != ".")
    # As a killed process leaves it.
    partial = folder.rename(folder.with_name(f".{folder.name}.part"))
    (partial / "set/a/0.png").unlink()
    assert _sizes(find_images(tmp_path / "x.tar.gz")) == {"train": 12}
    assert not partial.exists()


def test_a_truncated_tar_is_named(tmp_path: Path):
    _pack(_lay_out(tmp_path / "set", "<c>/<n>.png", {}), tmp_path / "x.tar")
    content = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar.gz").write_bytes(content[:700])
    with pytest.raises(UserError, match="x.tar.gz cannot be unpacked into .*"):
        find_images(tmp_path / "x.tar.gz")
    images, _ = find_images(tmp_path / "x.tar").parts["train"]
    (tmp_path / "x.tar").write_bytes(content[:100])
    with pytest.raises(OSError, match="x.tar"):
        images.read(3)


def test_a_zip_of_windows_has_folders(tmp_path: Path):
    _lay_out(tmp_path, "<c>/<n>.png", {})
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for path in sorted(tmp_path.rglob("*.png")):
            member = zipfile.ZipInfo("x")
            member.filename = str(path.relative_to(tmp_path)).replace("/", "\\")
            archive.writestr(member, path.read_bytes())
    assert _sizes(find_images(tmp_path / "x.zip")) == {"train": 12}


def test_parquet_files_of_the_hub_are_read(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    (tmp_path / "set" / "data").mkdir(parents=True)
    names = {"train-00000-of-00002": range(4), "train-00001-of-00002": range(4, 8), "test-00000-of-00001": range(8, 12)}
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    for name, numbers in names.items():
        images = []
        for number in numbers:
            _image(tmp_path / "x.png", number)
            images.append({"bytes": (tmp_path / "x.png").read_bytes(), "path": f"{number}.png"})
        # A test part without labels has -1.
        images.append({"bytes": b"", "path": "x.png"})
        table = pyarrow.table({"image": images, "label": [*(number % 2 for number in numbers), -1]})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pyarrow.parquet.write_table(table, tmp_path / "set" / "data" / f"{name}.parquet")
    with pytest.raises(UserError, match=r"1 without a label \(line 5\)"):
        find_images(tmp_path / "set")
    source = find_images(tmp_path / "set", on_faults="skip")
    assert _sizes(source) == {"train": 8, "test": 4}
    images, _ = source.parts["test"]
    _image(tmp_path / "x.png", 9)
    assert images.read(1) == (tmp_path / "x.png").read_bytes()
    options = {"image_size": 8, "batch_size": 4, "num_workers": 0}
    data = ImageFolderDataModule(data_dir=str(tmp_path / "set"), on_corrupt="skip", **options)
    data.setup("fit")
    assert sum(len(labels) for _, labels in data.train_dataloader()) == data.sizes["train"]


def test_a_data_module_reads_what_is_declared(tmp_path: Path):
    _lay_out(tmp_path / "x", "i/<c>_<n>.png", {})
    data = ImageFolderDataModule(
        data_dir=str(tmp_path / "x"), layout="i/{class}_*", image_size=8, num_workers=0, val_fraction=0.2
    )
    data.setup("fit")
    assert (data.class_names, data.title, data.sizes) == (("a", "b"), "x", {"train": 10, "val": 2})
    data.teardown("fit")
