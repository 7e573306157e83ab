"""Data sets as people have them: what is taken is said, and so is what is left."""

import json
import re
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
from datamodules.images.finding import find_images
from datamodules.images.source import Source


def _image(path: Path, number: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def _images(folder: Path, form: str, numbers: Iterable[int] = range(12)) -> None:
    for number in numbers:
        _image(folder / form.format(n=number, c="ab"[number % 2]), number)


def _table(form: str, header: str, numbers: Iterable[int] = range(12), **cells: Any) -> str:
    rows = [form.format(n=n, c="ab"[n % 2], **{name: of(n) for name, of in cells.items()}) for n in numbers]
    return "\n".join([header, *rows]) + "\n"


def _sizes(source: Source) -> dict[str, int]:
    """How many samples the parts have; the images' classes are right."""
    for images, labels in source.parts.values():
        for name, label in zip(images, labels.tolist(), strict=True):
            number = int(re.findall(r"\d+", Path(name).stem)[-1])
            assert source.classes[label] in ("ab"[number % 2], str(number % 2))
    return {part: len(labels) for part, (_, labels) in source.parts.items()}


SPLITS = {
    # The column, what it says of sample n, and how many the parts have.
    "subset": (lambda n: ("train", "val", "test")[n // 4], {"train": 4, "val": 4, "test": 4}),
    "Usage": (lambda n: ("Training", "PublicTest", "PrivateTest")[n // 4], {"train": 4, "test": 8}),
    "partition": (lambda n: n // 4, {"train": 4, "val": 4, "test": 4}),
    "is_test": (lambda n: n > 8, {"train": 9, "test": 3}),
    "is_valid": (lambda n: "True" if n > 8 else "False", {"train": 9, "val": 3}),
    "is_training_image": (lambda n: int(n < 9), {"train": 9, "test": 3}),
    "phase": (lambda n: "dev" if n > 8 else "train", {"train": 9, "val": 3}),
    "Data-Split": (lambda n: "TEST" if n > 8 else "TRAIN", {"train": 9, "test": 3}),
    "role": (lambda n: "evaluation" if n > 8 else "training", {"train": 9, "val": 3}),
}


@pytest.mark.parametrize("column", SPLITS)
def test_a_column_that_names_parts_is_used_under_any_name(tmp_path: Path, column: str):
    part, sizes = SPLITS[column]
    _images(tmp_path, "{n}.png")
    (tmp_path / "x.csv").write_text(_table("{n}.png,{c},{part}", f"path,label,{column}", part=part))
    source = find_images(tmp_path / "x.csv")
    assert _sizes(source) == sizes
    assert f"the part is '{column}' (guessed)" in source.notes[0]


def test_a_column_that_may_be_of_parts_is_named_where_it_is_not_used(tmp_path: Path):
    _images(tmp_path, "{n}.png")
    for column in ("fold", "dataset", "usage", "label_fine"):
        (tmp_path / "x.csv").write_text(_table("{n}.png,{c},{n}", f"path,label,{column}"))
        source = find_images(tmp_path / "x.csv")
        assert source.notes == [f"{tmp_path}/x.csv: the path is 'path', the label is 'label', not used: {column!r}"]
        assert _sizes(source) == {"train": 12}


def test_cells_too_many_or_too_few_are_faults_with_their_lines(tmp_path: Path):
    _images(tmp_path, "{n}.png", range(4))
    (tmp_path / "x.csv").write_text("path,label\n0.png,a\n1.png,b, black\n2.png\n3.png,b\n")
    reason = r"2 of 4 lines .*: 1 with more cells than the header \(line 3\); 1 with fewer cells .* \(line 4\)"
    with pytest.raises(UserError, match=reason):
        find_images(tmp_path / "x.csv")
    assert _sizes(find_images(tmp_path / "x.csv", "skip")) == {"train": 2}


def test_paths_keep_their_blanks_and_labels_their_commas(tmp_path: Path):
    for number, name in enumerate(("0 .png", "0.png", " 1.png", "1.png")):
        _image(tmp_path / name, number)
    (tmp_path / "x.csv").write_text('path,label\n0 .png,"a, x"\n0.png,b\n 1.png,"a, x"\n1.png,b\n')
    source = find_images(tmp_path / "x.csv")
    listed = dict(
        zip((Path(name).name for name in source.parts["train"].images), source.parts["train"].labels.tolist())
    )
    assert (source.classes, listed) == (("a, x", "b"), {"0 .png": 0, "0.png": 1, " 1.png": 0, "1.png": 1})


@pytest.mark.parametrize(
    ("names", "sizes", "unused"),
    [
        (("Train.csv", "Val.csv", "Test.csv"), {"train": 4, "val": 4, "test": 4}, []),
        (("train.csv", "dev.csv"), {"train": 4, "val": 4}, []),
        (("train.csv", "val.csv", "eval.csv"), {"train": 4, "val": 4}, ["eval.csv"]),
        (("TRAIN.CSV", "validation.csv", "meta.csv"), {"train": 4, "val": 4}, ["meta.csv"]),
    ],
)
def test_lists_of_parts_are_found_by_their_names_and_others_named(tmp_path: Path, names, sizes, unused):
    _images(tmp_path, "images/{n}.png")
    for start, name in enumerate(names):
        rows = _table("images/{n}.png,{c}", "path,label", range(4 * start, 4 * start + 4))
        (tmp_path / name).write_text(rows)
    for place in (tmp_path, tmp_path / names[0]):
        source = find_images(place)
        assert _sizes(source) == sizes
        told = [note.partition(" is not used")[0] for note in source.notes if "is not used" in note]
        assert told == [str(tmp_path / name) for name in unused]


def test_tables_beside_class_folders_and_images_in_no_table_are_named(tmp_path: Path):
    _images(tmp_path, "train/{c}/{n}.png")
    _images(tmp_path, "test/{c}/{n}.png", range(12, 16))
    (tmp_path / "train.csv").write_text("path,label\n")
    assert find_images(tmp_path).notes == [f"{tmp_path}/train.csv is not used: the class folders are"]
    listed = tmp_path / "listed"
    _images(listed, "{n}.png")
    (listed / "train.csv").write_text(_table("{n}.png,{c}", "path,label", range(8)))
    assert find_images(listed).notes == [f"left out 4 images that no table names, such as {listed}/10.png"]


def test_a_test_table_without_a_column_of_labels_is_not_used(tmp_path: Path):
    _images(tmp_path, "{n}.png")
    (tmp_path / "train.csv").write_text(_table("{n}.png,{c}", "path,label", range(8)))
    (tmp_path / "test.csv").write_text(_table("{n}.png", "path", range(8, 12)))
    assert f"{tmp_path}/test.csv is not used: it has no labels" in find_images(tmp_path).notes


@pytest.mark.parametrize(
    ("header", "row", "form"),
    [
        ("id,breed", "{n:04x},{c}", "train/{n:04x}.png"),
        ("image_id,label", "{n},{c}", "images_part_{c}/{n}.png"),
        ("file_name,label", "{n}.png,{c}", "deep/er/{n}.png"),
        ("path,label", "deep\\{n}.png,{c}", "deep/{n}.png"),
    ],
)
def test_ids_without_endings_and_names_without_folders_are_found(tmp_path: Path, header: str, row: str, form: str):
    _images(tmp_path, form, range(8))
    (tmp_path / "labels.csv").write_text(_table(row, header, range(8)))
    source = find_images(tmp_path / "labels.csv")
    assert {part: len(labels) for part, (_, labels) in source.parts.items()} == {"train": 8}
    assert source.classes == ("a", "b")


def test_a_name_that_several_files_have_is_a_fault(tmp_path: Path):
    _images(tmp_path, "x/{n}.png", range(4))
    _images(tmp_path, "y/{n}.png", range(3))
    (tmp_path / "labels.csv").write_text(_table("{n},{c}", "id,label", range(4)))
    with pytest.raises(UserError, match=r"3 of a name that several files have \(lines 2, 3, 4\)"):
        find_images(tmp_path / "labels.csv")


# Formats of others


def test_hugging_faces_forms_are_read(tmp_path: Path):
    for part, numbers in (("train", range(8)), ("test", range(8, 12))):
        _images(tmp_path / "folder", f"{part}/{{n}}.png", numbers)
        lines = [json.dumps({"file_name": f"{n}.png", "label": n % 2}) for n in numbers]
        (tmp_path / "folder" / part / "metadata.jsonl").write_text("\n".join(lines))
    assert _sizes(find_images(tmp_path / "folder")) == {"train": 8, "test": 4}
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
        table = pyarrow.table({"image": images, "label": [number % 2 for number in numbers]})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pyarrow.parquet.write_table(table, tmp_path / "set" / "data" / f"{name}.parquet")
    source = find_images(tmp_path / "set")
    assert _sizes(source) == {"train": 8, "test": 4}
    images, _ = source.parts["test"]
    _image(tmp_path / "x.png", 9)
    assert images.read(1) == (tmp_path / "x.png").read_bytes()
    data = ImageFolderDataModule(data_dir=str(tmp_path / "set"), image_size=8, batch_size=4, num_workers=0)
    data.setup("fit")
    assert sum(len(labels) for _, labels in data.train_dataloader()) == data.sizes["train"]


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz", "x.tgz", "x.tar.xz"])
@pytest.mark.parametrize("with_table", [True, False])
def test_archives_hold_class_folders_or_tables(tmp_path: Path, monkeypatch, name: str, with_table: bool):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    _images(folder, "images/{n}.png" if with_table else "{c}/{n}.png")
    if with_table:
        (folder / "train.csv").write_text(_table("images/{n}.png,{c}", "path,label", range(10)))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if name == "x.zip":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path in files:
                archive.write(path, path.relative_to(tmp_path))
    else:
        mode = {"x.tar": "w", "x.tar.xz": "w:xz"}.get(name, "w:gz")
        with tarfile.open(tmp_path / name, mode) as archive:  # type: ignore[call-overload]
            archive.add(folder, "set")
    expected, source = find_images(folder), find_images(tmp_path / name)
    assert _sizes(source) == _sizes(expected) == {"train": 10 if with_table else 12}
    contents = [[one.parts["train"].images.read(row) for row in range(10)] for one in (expected, source)]
    assert contents[0] == contents[1]
    assert source.title == name


def test_a_truncated_tar_is_named(tmp_path: Path):
    _images(tmp_path, "{c}/{n}.png")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "a", "a")
        archive.add(tmp_path / "b", "b")
    content = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar.gz").write_bytes(content[:700])
    with pytest.raises(UserError, match="x.tar.gz cannot be unpacked into .*"):
        find_images(tmp_path / "x.tar.gz")
    images, _ = find_images(tmp_path / "x.tar").parts["train"]
    (tmp_path / "x.tar").write_bytes(content[:100])
    with pytest.raises(OSError, match="x.tar"):
        images.read(3)


def test_a_zip_of_windows_has_folders(tmp_path: Path):
    _images(tmp_path, "{c}/{n}.png")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for path in sorted(tmp_path.rglob("*.png")):
            member = zipfile.ZipInfo("x")
            member.filename = str(path.relative_to(tmp_path)).replace("/", "\\")
            archive.writestr(member, path.read_bytes())
    assert _sizes(find_images(tmp_path / "x.zip")) == {"train": 12}


def test_the_class_stands_in_names_where_a_pattern_says_so(tmp_path: Path):
    _images(tmp_path, "x/{c}.{n}.png")
    (tmp_path / "x" / "readme.txt").touch()
    source = find_images(f"{tmp_path}/x/{{class}}.*.png")
    assert (_sizes(source), source.title) == ({"train": 12}, "x")
    assert source.notes == [f"left out 1 files in {tmp_path}/x with other names, such as {tmp_path}/x/readme.txt"]
    with pytest.raises(
        UserError, match=r"no image in .*/x has a name like .*; expected images with names such as .*cat"
    ):
        find_images(f"{tmp_path}/x/{{class}}_*.png")
    data = ImageFolderDataModule(data_dir=f"{tmp_path}/x/{{class}}.*.png", image_size=8, num_workers=0)
    data.setup("fit")
    assert data.class_names == ("a", "b")


# Folders


@pytest.mark.parametrize(
    ("forms", "reason"),
    [
        ("JPEGImages/{n}.png SegmentationClass/{n}.png SegmentationObject/{n}.png", "without class folders"),
        ("RGB/{n}.png NIR/{n}.png", "holds images in NIR and RGB without class folders"),
        ("images/{n}.png originals/{n}.png", "without class folders"),
        ("batch1/{n}.png batch2/{n}.png", "without class folders"),
        ("cam1/a/{n}.png cam2/a/{n}.png cam2/b/{n}.png", "such as cam1 that each hold a, and which"),
        ("a/rgb/{n}.png a/depth/{n}.png b/rgb/{n}.png", "such as a that each hold rgb, and which"),
    ],
)
def test_folders_that_are_no_classes_are_refused(tmp_path: Path, forms: str, reason: str):
    for form in forms.split():
        _images(tmp_path, form, range(2))
    with pytest.raises(UserError, match=reason):
        find_images(tmp_path)


def test_classes_with_words_of_other_folders_remain_classes(tmp_path: Path):
    for names in (("original", "fake"), ("raw", "cooked"), ("ants", "bees")):
        for name in names:
            _image(tmp_path / names[0] / name / "images" / "1.png")
        assert find_images(tmp_path / names[0]).classes == tuple(sorted(names))


def test_a_class_is_the_same_however_its_letters_are_composed(tmp_path: Path):
    for part, form in (("train", "NFC"), ("val", "NFD")):
        for name in ("Bär", "Ameise"):
            _image(tmp_path / part / unicodedata.normalize(form, name) / "1.png", len(part))  # type: ignore[arg-type]
    assert find_images(tmp_path).classes == ("Ameise", "Bär")


def test_images_in_two_parts_are_named(tmp_path: Path):
    _images(tmp_path / "set", "train/{c}/{n}.png")
    _images(tmp_path / "set", "val/{c}/{n}.png", range(10, 14))
    for name in ("set", "x.zip"):
        if name == "x.zip":
            with zipfile.ZipFile(tmp_path / name, "w") as archive:
                for path in sorted((tmp_path / "set").rglob("*.png")):
                    archive.write(path, path.relative_to(tmp_path / "set"))
        (note,) = find_images(tmp_path / name).notes
        root = f"{tmp_path}/{name}"
        assert note == f"2 images of val are also in train, such as {root}/val/a/10.png and {root}/train/a/10.png"
