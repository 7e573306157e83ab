"""Archives of class folders, read in place: what is in them, and what is wrong with them."""

import logging
import os
import pickle
import stat
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from datamodules import ImageFolderDataModule, UserError
from datamodules.images.file_pipeline import ImageFiles
from datamodules.images.layouts import find_images
from datamodules.images.pixel_cache import PixelCache
from datamodules.images.source import Source

LONG = "a long name " * 20 + ".png"


def _image(file: Path, number: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = torch.randint(0, 256, (30, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
    Image.fromarray(pixels.numpy()).save(file)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """photos/train/CLASS/, photos/val/CLASS/ with odd names, hidden files, others, and an empty class."""
    folder = tmp_path / "photos"
    for number in range(8):
        _image(folder / "train" / "ant" / f"{number}.png", number)
        _image(folder / "train" / "bee" / f"x{number}.jpg", 10 + number)
    for number, name in enumerate(("ä.png", "10.png", "9.png", LONG, ".hidden.png")):
        _image(folder / "train" / "bee" / name, 20 + number)
    for number in range(3):
        for name in ("ant", "bee"):
            _image(folder / "val" / name / f"{number}.png", 30 + number)
    for name in ("@eaDir", "$RECYCLE.BIN"):
        _image(folder / "train" / name / "0.png", 40)
    (folder / "train" / "empty").mkdir()
    (folder / "train" / "ant" / "notes.txt").write_text("x")
    (folder / "readme.md").write_text("x")
    return folder


def _zip(folder: Path, target: Path, top: str = "", compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(target, "w", compression) as archive:
        # Another order than that of the names.
        for file in sorted(folder.rglob("*"), reverse=True):
            archive.write(file, f"{top}{file.relative_to(folder)}")
    return target


def _found(tree: Source, root: Path) -> dict[str, list[tuple[str, int, bytes]]]:
    """Each file's path below train and val, its class and its content."""
    found = {}
    for part, (files, targets) in tree.parts.items():
        assert all(name.startswith(f"{root}/") for name in files)
        names = [f"{part}/{name.split(f'/{part}/')[1]}" for name in files]
        contents = [files.read(row) for row in range(len(files))]
        found[part] = list(zip(names, targets.tolist(), contents, strict=True))
    return found


@pytest.mark.parametrize(
    ("name", "top", "compression"), [("x.zip", "", zipfile.ZIP_DEFLATED), ("x.ZIP", "photos/", zipfile.ZIP_STORED)]
)
def test_an_archive_holds_its_folders_files_in_the_same_order(photos, tmp_path, name, top, compression):
    archive = _zip(photos, tmp_path / name, top, compression)
    expected, found = find_images(photos), find_images(archive)
    assert len(expected.parts["train"][0]) == 20
    assert _found(found, archive) == _found(expected, photos)
    assert (found.classes, found.left_out) == (expected.classes, expected.left_out)
    inside = f"{archive}/{top}".rstrip("/")
    assert found.notes == [note.replace(str(photos), inside) for note in expected.notes]
    assert len(found.notes) == 2
    again = pickle.loads(pickle.dumps(found.parts["train"][0]))
    assert [again.read(row) for row in range(20)] == [content for _, _, content in _found(found, archive)["train"]]


def test_cached_images_follow_a_changed_archive(photos, tmp_path, monkeypatch):
    archive = _zip(photos, tmp_path / "x.zip", compression=zipfile.ZIP_STORED)
    files = find_images(archive).parts["train"][0]
    cache = PixelCache(tmp_path / "cache", len(files.base_table()), 1 << 20)
    images = ImageFiles(files, 20, cache)
    before = [images[row].clone() for row in range(20)]
    with monkeypatch.context() as patch:
        patch.setattr("datamodules.images.file_pipeline.load_image", None)
        assert all(torch.equal(images[row], image) for row, image in enumerate(before))
    first, second = (photos / f"train/ant/{number}.png" for number in (0, 1))
    content = first.read_bytes()
    assert content != second.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    again = ImageFiles(find_images(_zip(photos, archive, compression=zipfile.ZIP_STORED)).parts["train"][0], 20, cache)
    assert torch.equal(again[0], before[1])
    assert torch.equal(again[1], before[0])


def test_later_files_of_an_archive_replace_earlier_ones(tmp_path: Path):
    for number, name in enumerate(("ant", "bee")):
        _image(tmp_path / f"{name}.png", number)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(tmp_path / "ant.png", "ant/1.png")
        archive.write(tmp_path / "bee.png", "bee/1.png")
        archive.write(tmp_path / "bee.png", "ant/1.png")
        archive.write(tmp_path / "bee.png", "../ant/2.png")
        link = zipfile.ZipInfo("bee/3.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "1.png")
    files = find_images(tmp_path / "x.zip").parts["train"][0]
    assert list(files) == [f"{tmp_path}/x.zip/ant/1.png", f"{tmp_path}/x.zip/bee/1.png"]
    assert {files.read(row) for row in range(2)} == {(tmp_path / "bee.png").read_bytes()}


def test_names_in_a_zip_are_read_as_utf_8_or_dos(tmp_path: Path):
    for encoding in ("utf-8", "cp437"):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            for number, name in enumerate(("Amsel", "Dohle")):
                _image(tmp_path / f"{name}.png", number)
                archive.write(tmp_path / f"{name}.png", f"{name}/A.png")
        umlaut = "ö".encode(encoding)
        packed = (tmp_path / "x.zip").read_bytes().replace(b"Dohle", b"D" + umlaut + b"hle"[len(umlaut) - 1 :])
        (tmp_path / "x.zip").write_bytes(packed)
        assert find_images(tmp_path / "x.zip").classes[1][:2] == "Dö"


def _encrypt(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1
    archive.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 30), r"x\.zip cannot be read: .* not a zip file"),
        (_encrypt, r"x\.zip: val/bee/2\.png is encrypted or not compressed by deflate; unpack the archive"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"PK\1\2", b"PK\1\3")),
            r"x\.zip cannot be read: .*; copy or download",
        ),
        (lambda path: path.rename(path.with_name("gone")), r"x\.zip' does not exist; pass a folder"),
    ],
)
def test_an_archive_that_cannot_be_read_is_named_in_one_line(photos, tmp_path, damage, reason):
    archive = _zip(photos, tmp_path / "x.zip")
    damage(archive)
    with pytest.raises(UserError, match=reason) as rejection:
        find_images(archive)
    assert "\n" not in str(rejection.value)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_file_in_a_zip_is_rejected_or_skipped_by_name(photos, tmp_path, caplog, compression):
    archive = _zip(photos, tmp_path / "x.zip", compression=compression)
    with zipfile.ZipFile(archive) as opened:
        at = opened.getinfo("train/ant/3.png").header_offset + 200
    content = archive.read_bytes()
    archive.write_bytes(content[:at] + bytes(30) + content[at + 30 :])

    def seen(**options: str) -> int:
        data = ImageFolderDataModule(data_dir=str(archive), image_size=24, num_workers=0, **options)
        data.setup("fit")
        return sum(len(labels) for _, labels in data.train_dataloader())

    with pytest.raises(UserError, match=r"x\.zip/train/ant/3\.png cannot be read .* is damaged there.*pass"):
        seen()
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        assert seen(on_corrupt="skip") == 19
    assert "x.zip/train/ant/3.png cannot be read as an image" in caplog.text


def test_an_archive_replaced_after_listing_is_an_error(photos: Path, tmp_path: Path):
    files = find_images(_zip(photos, tmp_path / "x.zip")).parts["train"][0]
    _zip(photos, tmp_path / "x.zip", compression=zipfile.ZIP_STORED)
    with pytest.raises(OSError, match=r"x\.zip has changed since it was listed; start the run again"):
        files.read(0)
