"""Images by lists, and files that are no images."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from PIL import Image

from datamodules import ImageFolderDataModule, UserError
from datamodules.images.finding import find_images, holds_images
from datamodules.images.labels import class_order

NAMES = ("ant", "bee")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """pics/ant 0.png to pics/bee 9.png, ten of each."""
    (tmp_path / "pics").mkdir()
    for number in range(10):
        for name in NAMES:
            Image.new("RGB", (9, 9), (number, number, number)).save(tmp_path / "pics" / f"{name} {number}.png")
    return tmp_path


def _rows(part: str) -> list[tuple[str, str]]:
    numbers = range(7) if part == "train" else range(7, 10)
    return [(f"pics/{name} {number}.png", name) for number in numbers for name in NAMES]


def _expected(folder: Path, part: str) -> tuple[list[str], list[int]]:
    return [str(folder / path) for path, _ in _rows(part)], [NAMES.index(name) for _, name in _rows(part)]


def _csv(*parts: str, header: str = "path,label", split: bool = False) -> str:
    rows = [f"{path},{name}{f',{part}' * split}" for part in parts for path, name in _rows(part)]
    return "\n".join([header, *rows]) + "\n"


LISTS: dict[str, tuple[dict[str, str], str]] = {
    "csv": ({"train.csv": _csv("train"), "validation.csv": _csv("val", header="file_name,label")}, "."),
    "a list and the one beside it": ({"train.csv": _csv("train"), "val.csv": _csv("val"), "val.txt": "x"}, "train.csv"),
    "a column of parts": ({"all.csv": _csv("train", "val", header="Image-Path,Class,Split", split=True)}, "all.csv"),
    "windows": ({"train.csv": "\ufeff" + _csv("train").replace("\n", "\r\n"), "val.csv": _csv("val")}, "."),
    "semicolons": (
        {"all.csv": _csv("train", "val", header="path,label,split", split=True).replace(",", ";")},
        "all.csv",
    ),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_paths_and_labels_are_read_however_they_are_written(pictures: Path, kind: str):
    files, place = LISTS[kind]
    for name, text in files.items():
        (pictures / name).write_text(text)
    assert holds_images(pictures / place)
    found = find_images(pictures / place)
    assert found.classes == NAMES
    listed = {part: (list(files), targets.tolist()) for part, (files, targets) in found.parts.items()}
    assert listed == {"train": _expected(pictures, "train"), "val": _expected(pictures, "val")}
    assert (found.notes, found.left_out) == ([], {})


def test_a_list_alone_is_split_and_trained_on(pictures: Path):
    (pictures / "labels.csv").write_text(_csv("train", "val", header="path,label"))
    data = ImageFolderDataModule(data_dir=str(pictures / "labels.csv"), image_size=8, batch_size=4, val_fraction=0.2)
    data.setup("fit")
    assert (data.dataset, data.title, data.sizes) == ("folder", "labels.csv", {"train": 16, "val": 4})
    labels = torch.cat([labels for _, labels in data.val_dataloader()])
    assert sorted(labels.tolist()) == [0, 0, 1, 1]
    data.teardown("fit")


def test_class_folders_come_before_lists_and_numbers_sort_as_numbers(pictures: Path):
    for name in NAMES:
        (pictures / "train" / name).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(pictures / "train" / name / "1.png")
    for name in ("train.txt", "train.csv"):
        (pictures / name).write_text("whatever it is\n")
    assert len(find_images(pictures).parts["train"][0]) == 2
    assert class_order(str(i) for i in range(12)) == tuple(str(i) for i in range(12))


WRONG = "path,label\npics/ant 0.png,ant\npics/ant 1.png\n\npics/gone.png,bee\npics/bee 0.png,bee\n,bee\n"


def test_wrong_rows_are_named_with_their_lines_and_refused_or_skipped(pictures: Path, caplog: pytest.LogCaptureFixture):
    (pictures / "train.csv").write_text(WRONG)
    reason = (
        "1 with fewer cells than the header (line 3); 1 whose file does not exist (line 5); 1 without a path (line 7)"
    )
    refusal = re.escape(f"train.csv: 3 of 5 lines cannot be used: {reason}; expected columns such as path,label")
    with pytest.raises(UserError, match=f"{refusal}.*pass on_corrupt='skip'"):
        ImageFolderDataModule(data_dir=str(pictures)).setup("fit")
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        data = ImageFolderDataModule(data_dir=str(pictures), on_corrupt="skip", val_fraction=0)
        data.setup("fit")
    assert f"train.csv: left out 3 of 5 lines: {reason}" in caplog.text
    assert data.sizes == {"train": 2}
    assert data.left_out == {"with fewer cells than the header": 1, "whose file does not exist": 1, "without a path": 1}
    assert sum(data.left_out.values()) + data.sizes["train"] == 5


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("training.csv", _csv("train"), "holds both train.csv and training.csv; pass one"),
        ("train.csv", "", "train.csv is empty"),
        (
            "train.csv",
            _csv("train") + "./pics/ant 0.png,bee\npics/bee 1.png,bee\n",
            r"2 of a file that was listed before \(lines 16, 17\)",
        ),
    ],
)
def test_lists_that_cannot_be_read_are_refused_with_the_reason(pictures: Path, name: str, text: str, reason: str):
    (pictures / "train.csv").write_text(_csv("train"))
    (pictures / name).write_text(text)
    with pytest.raises(UserError, match=reason):
        find_images(pictures)


def test_lists_as_text_are_refused_and_no_part_is_passed_over(pictures: Path):
    (pictures / "train.csv").write_text(_csv("train"))
    (pictures / "val.txt").write_text("pics/ant 8.png ant\n")
    refusal = r"val\.txt is no table; write it as val\.csv, with a line path,label above"
    for place in (pictures, pictures / "val.txt"):
        with pytest.raises(UserError, match=refusal):
            find_images(place)


def test_files_in_train_and_in_val_are_named(pictures: Path):
    (pictures / "train.csv").write_text(_csv("train"))
    (pictures / "val.csv").write_text(_csv("val") + "pics/ant 0.png,ant\n")
    assert "1 files are in train and in val, such as" in find_images(pictures).notes[0]


# Layouts of known data sets: an image's class is its number modulo 2.


def _files(forms: str, numbers: Iterable[int] = range(8)) -> list[str]:
    return [form.format(n=n, c=("cat", "dog")[n % 2], last=n > 5) for n in numbers for form in forms.split()]


def _lay_out(folder: Path, forms: str, tables: dict[str, str], numbers: Iterable[int] = range(8)) -> None:
    texts = {name: "\n".join([*text.split()[:-1], *_files(text.split()[-1], numbers)]) for name, text in tables.items()}
    for name in [*_files(forms, numbers), *tables]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(texts.get(name, ""))


READ: dict[str, tuple[str, dict[str, str], str]] = {
    # Images, tables with a form of their rows, and how many images the parts have.
    "Kaggle, Cat and Dog": ("training_set/{c}/{n}.jpg test_set/{c}/{n}.jpg", {}, "train 8, test 8"),
    "Kaggle, Intel scenes": (
        "seg_train/seg_train/{c}/{n}.jpg seg_test/seg_test/{c}/{n}.jpg seg_pred/seg_pred/{n}.jpg",
        {},
        "train 8, test 8",
    ),
    "other words": ("train_data/{c}/{n}.png ValData/{c}/{n}.png testset/{c}/{n}.png", {}, "train 8, val 8, test 8"),
    "classes with the name of a part": ("test_{c}/{n}.png", {}, "train 8"),
    "a table of other things": ("{c}/{n}.png", {"metadata.csv": "file_name,size {n},{n}"}, "train 8"),
    "a test table without labels": (
        "train/{n}.png test/{n}.png",
        {"train.csv": "image,label {n}.png,{c}", "test.csv": "image,label {n}.png,"},
        "train 8",
    ),
}


@pytest.mark.parametrize("layout", READ)
def test_data_sets_are_read_as_they_are_published(tmp_path: Path, layout: str):
    forms, tables, sizes = READ[layout]
    _lay_out(tmp_path, forms, tables)
    found = find_images(tmp_path)
    assert ", ".join(f"{part} {len(files)}" for part, (files, _) in found.parts.items()) == sizes
    assert len(found.classes) == 2
    for names, targets in found.parts.values():
        assert [int(re.sub(r"\D", "", Path(name).stem)) % 2 for name in names] == targets.tolist()


REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "a class in val alone": ("train/{c}/{n}.jpg val/bee/{n}.jpg", {}, "no image of: bee; expected only cat, dog"),
    "no folders": (
        *("{n}.jpg", {}),
        r"holds no class with images \(found 24 .jpg.*\); expected a folder of images for each",
    ),
    "one class": ("ant/{n}.jpg", {}, "holds images of one class only, ant; expected a folder"),
    "no images": ("{c}/{n}.txt", {}, "holds no class with images"),
    "no train": ("val/{c}/{n}.jpg", {}, "holds val with class folders, but no train"),
    "no classes": ("train/{n}.jpg test/{n}.jpg", {}, "holds images in test and train without class folders; expected"),
    "Kaggle's tables": (
        "train/{n}.jpg test/{n}.jpg",
        {"sample_submission.csv": "id,label {n},{c}", "train_info.csv": "id,x", "train_labels.csv": "id,label {n},{c}"},
        "without class folders; .* or pass a table as data_dir='.*/train_labels.csv'",
    ),
    "val twice": ("train/{c}/{n}.jpg val/{c}/{n}.jpg valid/{c}/{n}.jpg", {}, "holds both val and valid; keep one"),
    "PACS": ("photo/{c}/{n}.png sketch/{c}/{n}.png", {}, "such as photo that each hold cat and dog, and which"),
    "COVID-19 Radiography": ("{c}/images/{n}.png {c}/masks/{n}.png", {}, "each hold images and masks"),
    "folds without classes": ("fold1/{n}.png fold2/{n}.png", {}, "images in fold1 and fold2 without class folders"),
    "BUSI": ("{c}/x({n}).png {c}/x({n})_mask.png", {}, r"12 masks beside images, such as x\(0\)_mask"),
    "tiny-imagenet": ("train/{c}/images/{c}_{n}.JPEG val/images/{n}.JPEG", {}, "no image of: images"),
    "CUB": ("images/{c}/{n}.jpg", {"images.txt": "{n},{c}/{n}.jpg"}, "one class only, images; expected"),
    "unknown columns": (
        *("a/{n}.png", {"x.csv": "image,id,choice a/{n}.png,7{n},{c}"}),
        r"x\.csv: the first line is image,id,choice; expected the names .* called path, file, .*, and one label, la",
    ),
    "no header": ("{n}.jpg", {"x.csv": "0.jpg,cat {n}.jpg,{c}"}, "the first line is 0.jpg,cat; expected the names"),
    "a class in one list": (
        *("{n}.jpg", {"train.csv": "path,label {n}.jpg,{c}", "val.csv": "path,label {n}.jpg,cow"}),
        "such as cow in line 2; expected only cat, dog",
    ),
    "one class in a list": ("{n}.jpg", {"train.csv": "path,label {n}.jpg,ant"}, "lists images of one class only, ant"),
    "an empty table": (
        *("", {"train.csv": "path,label path,label"}),
        "lists no image to train on; expected CSV with path,label",
    ),
    "no part": ("{n}.jpg", {"x.csv": "path,label,split {n}.jpg,{c},trian"}, r"24 of no part .* \(lines 2, 3"),
}


@pytest.mark.parametrize("layout", REFUSED)
def test_what_is_no_set_of_classes_is_refused(tmp_path: Path, layout: str):
    forms, tables, reason = REFUSED[layout]
    _lay_out(tmp_path, forms, tables, range(24))
    with pytest.raises(UserError, match=reason) as refusal:
        find_images(tmp_path / ("x.csv" if "x.csv" in tables else ""), None if "24 " in reason else "skip")
    assert "\n" not in str(refusal.value)


def test_unknown_endings_are_counted_and_named(tmp_path: Path):
    for name, endings in (("ant", (".XYZ", ".xyz", ".abc", "")), ("cow", (".xyz",)), ("bee", ())):
        (tmp_path / name).mkdir()
        for number, ending in enumerate(endings):
            (tmp_path / name / f"{number}{ending}").touch()
    for name in NAMES:
        Image.new("RGB", (9, 9)).save(tmp_path / name / "9.png")
    found = find_images(tmp_path)
    assert found.left_out == {".xyz": 3, ".abc": 1, "no ending": 1}
    assert found.notes == [
        f"class cow is left out of train: {tmp_path}/cow holds no image, but 1 .xyz, such as {tmp_path}/cow/0.xyz",
        "left out 5 files that are no images by their endings: 3 .xyz, 1 .abc, 1 without an ending, "
        f"such as {tmp_path}/ant/0.XYZ",
    ]
    for name in NAMES:
        (tmp_path / name / "9.png").unlink()
    with pytest.raises(UserError, match=r"holds no class with images \(found 3 .xyz, 1 .abc"):
        find_images(tmp_path)
