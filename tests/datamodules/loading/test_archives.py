"""Archives of class folders, read in place: what is in them, and what is wrong with them."""

import logging
import os
import pickle
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from datamodules import ImageFolderDataModule, UserError
from datamodules.images.files import ImageFiles
from datamodules.images.known_sets import IMAGENET_MEAN, IMAGENET_STD
from datamodules.images.pixel_cache import PixelCache
from datamodules.loading.image_lists import find_images
from datamodules.loading.image_tree import ImageTree, scan_tree

LONG = "a long name " * 20 + ".png"


def _image(file: Path, number: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = torch.randint(0, 256, (30, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
    Image.fromarray(pixels.numpy()).save(file)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """photos/train/CLASS/, photos/val/CLASS/ with odd names, subfolders, hidden files, others, and an empty class."""
    folder = tmp_path / "photos"
    for number in range(8):
        _image(folder / "train" / "ant" / f"{number}.png", number)
        _image(folder / "train" / "bee" / "sub/folder" / f"{number}.jpg", 10 + number)
    for number, name in enumerate(("ä.png", "10.png", "9.png", LONG, ".hidden.png")):
        _image(folder / "train" / "bee" / name, 20 + number)
    for number in range(3):
        for name in ("ant", "bee"):
            _image(folder / "val" / name / f"{number}.png", 30 + number)
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


def _tar(folder: Path, target: Path, top: str = "", form: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(target, "w", format=form) as archive:
        for file in sorted(folder.rglob("*"), reverse=True):
            archive.add(file, f"{top}{file.relative_to(folder)}", recursive=False)
    return target


KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "deflated zip": lambda folder, target: _zip(folder, target / "x.zip"),
    "stored ZIP with a top folder": lambda folder, target: _zip(
        folder, target / "x.ZIP", "photos/", zipfile.ZIP_STORED
    ),
    "tar of GNU": lambda folder, target: _tar(folder, target / "x.tar", "./photos/"),
    "tar of POSIX": lambda folder, target: _tar(folder, target / "x.tar", form=tarfile.PAX_FORMAT),
    "tar of 1988": lambda folder, target: _tar(folder, target / "x.tar", "photos/", tarfile.USTAR_FORMAT),
}


def _found(tree: ImageTree, root: Path) -> dict[str, list[tuple[str, int, bytes]]]:
    """Each file's path below train and val, its class and its content."""
    found = {}
    for part, (files, targets) in tree.parts.items():
        assert all(name.startswith(f"{root}/") for name in files)
        names = [f"{part}/{name.split(f'/{part}/')[1]}" for name in files]
        contents = [files.read(row) for row in range(len(files))]
        found[part] = list(zip(names, targets.tolist(), contents, strict=True))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_holds_what_its_folder_holds_in_the_same_order(photos: Path, tmp_path: Path, kind: str):
    if "1988" in kind:  # That format has no room for it.
        (photos / "train/bee" / LONG).rename(photos / "train/bee/long.png")
    archive = KINDS[kind](photos, tmp_path)
    expected, found = scan_tree(photos), find_images(archive)
    assert len(expected.parts["train"][0]) == 20
    assert _found(found, archive) == _found(expected, photos)
    assert (found.classes, found.left_out) == (expected.classes, expected.left_out)
    top = f"{archive}/photos" if any(name in kind for name in ("top", "GNU", "1988")) else str(archive)
    assert found.notes == [note.replace(str(photos), top) for note in expected.notes]
    assert len(found.notes) == 2
    again = pickle.loads(pickle.dumps(found.parts["train"][0]))
    assert [again.read(row) for row in range(20)] == [content for _, _, content in _found(found, archive)["train"]]


def _batches(folder: Path, num_workers: int, cache_gb: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    options = {"image_size": 64, "batch_size": 3, "num_workers": num_workers, "cache_gb": cache_gb}
    data = ImageFolderDataModule(data_dir=str(folder), **options)
    data.setup("fit")
    batches = [batch for loader in (data.train_dataloader(), data.val_dataloader()) for batch in loader]
    data.teardown("fit")
    return batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_from_archives_are_those_from_the_folder_to_the_bit_cached_or_not(
    photos: Path, tmp_path: Path, num_workers: int
):
    expected = _batches(photos, 0)
    assert len(expected) == 8
    (tmp_path / "link.tar").symlink_to(_tar(photos, tmp_path / "photos.tar", "photos/"))
    for archive in (_zip(photos, tmp_path / "photos.zip"), tmp_path / "link.tar"):
        for cache_gb in (0, 1, 1):
            for (images, labels), (other_images, other_labels) in zip(
                _batches(archive, num_workers, cache_gb), expected, strict=True
            ):
                assert torch.equal(images, other_images)
                assert torch.equal(labels, other_labels)


def test_decoded_images_that_are_kept_are_those_of_the_archive_as_it_is(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    archive = _tar(photos, tmp_path / "x.tar")
    files = find_images(archive).parts["train"][0]
    cache = PixelCache(tmp_path / "cache", len(files.whole()), 1 << 20)
    images = ImageFiles(files, 20, cache)
    before = [images[row].clone() for row in range(20)]
    with monkeypatch.context() as patch:
        patch.setattr("datamodules.images.files.load_image", None)
        assert all(torch.equal(images[row], image) for row, image in enumerate(before))
    first, second = (photos / f"train/ant/{number}.png" for number in (0, 1))
    content = first.read_bytes()
    assert content != second.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    again = ImageFiles(find_images(_tar(photos, archive)).parts["train"][0], 20, cache)
    assert torch.equal(again[0], before[1])
    assert torch.equal(again[1], before[0])


def test_the_size_and_the_statistics_of_images_are_those_of_the_folder(photos: Path, tmp_path: Path):
    found, expected = (
        ImageFolderDataModule(data_dir=str(place)) for place in (_zip(photos, tmp_path / "x.zip"), photos)
    )
    for data in (found, expected):
        data.setup("fit")
    assert found.image_size == expected.image_size == 32
    assert found.pixel_statistics == expected.pixel_statistics != (IMAGENET_MEAN, IMAGENET_STD)


def test_a_folder_with_an_archive_for_each_part_is_read_as_one(photos: Path, tmp_path: Path):
    folder = tmp_path / "parts"
    folder.mkdir()
    _zip(photos / "train", folder / "train.zip")
    _tar(photos / "val", folder / "Valid.tar", "val/")
    found, expected = find_images(folder), scan_tree(photos)
    contents = [
        [[files.read(row) for row in range(len(files))] for files, _ in tree.parts.values()]
        for tree in (found, expected)
    ]
    assert contents[0] == contents[1]
    assert found.parts["val"][0][0] == f"{folder}/Valid.tar/val/ant/0.png"
    (folder / "train.tar").touch()
    with pytest.raises(UserError, match=r"holds both train\.tar and train\.zip; keep one"):
        find_images(folder)
    # Beside class folders archives are other files, as they were.
    shutil.copytree(photos / "train", folder, dirs_exist_ok=True)
    assert find_images(folder).left_out == {".tar": 2, ".zip": 1, ".txt": 1}


def test_a_folder_in_an_archive_is_named_like_one_on_disk(photos: Path, tmp_path: Path):
    shutil.copytree(photos, tmp_path / "two/photos")
    (tmp_path / "two/documents").mkdir()
    (tmp_path / "two/documents/readme.txt").touch()
    archive = _zip(tmp_path / "two", tmp_path / "two.zip")
    with pytest.raises(UserError, match=r"did you mean data_dir='.*/two\.zip/photos'\?"):
        find_images(archive)
    assert len(find_images(archive / "photos").parts["train"][0]) == 20
    with pytest.raises(UserError, match=r"two\.zip/nowhere' does not exist; pass a folder"):
        find_images(archive / "nowhere")


def test_later_files_replace_earlier_ones_and_links_are_followed_or_counted(tmp_path: Path):
    for number, name in enumerate(("ant", "bee")):
        _image(tmp_path / f"{name}.png", number)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "ant.png", "ant/1.png")
        archive.add(tmp_path / "bee.png", "bee/1.png")
        archive.add(tmp_path / "bee.png", "ant/1.png")
        link = tarfile.TarInfo("bee/2.png")
        link.type, link.linkname = tarfile.LNKTYPE, "ant/1.png"
        archive.addfile(link)
        link = tarfile.TarInfo("bee/3.png")
        link.type, link.linkname = tarfile.SYMTYPE, "1.png"
        archive.addfile(link)
    tree = find_images(tmp_path / "x.tar")
    files = tree.parts["train"][0]
    assert [Path(name).name for name in files] == ["1.png", "1.png", "2.png"]
    assert {files.read(row) for row in range(3)} == {(tmp_path / "bee.png").read_bytes()}
    assert tree.notes == [f"{tmp_path}/x.tar: left out 1 links, special files and paths with .., such as bee/3.png"]


def _zip_with_names(files: dict[str, bytes], target: Path, encoding: str, field: bool) -> None:
    """A zip archive whose names are in an encoding that nothing tells of; a field may have them in UTF-8."""
    raw = {name: name.encode(encoding, "replace") for name in files}
    ascii_names = {name: chr(ord("A") + number) * len(raw[name]) for number, name in enumerate(files)}
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(ascii_names[name])
            if field:
                data = b"\1" + zlib.crc32(raw[name]).to_bytes(4, "little") + name.encode()
                info.extra = b"up" + len(data).to_bytes(2, "little") + data
            archive.writestr(info, content)
    packed = target.read_bytes()
    for name in files:
        packed = packed.replace(ascii_names[name].encode(), raw[name])
    target.write_bytes(packed)


@pytest.mark.parametrize(
    ("encoding", "field"), [("utf-8", False), ("cp437", False), ("ascii", True), ("latin-1", True)]
)
def test_names_in_a_zip_are_those_of_the_folder_whichever_program_wrote_it(tmp_path: Path, encoding: str, field: bool):
    for number, name in enumerate(("Ämeise", "über")):
        _image(tmp_path / "photos" / name / "ö.png", number)
    files = {str(file.relative_to(tmp_path / "photos")): file.read_bytes() for file in tmp_path.rglob("*.png")}
    _zip_with_names(files, tmp_path / "x.zip", encoding, field)
    found, folder = (find_images(tmp_path / name) for name in ("x.zip", "photos"))
    assert found.classes == folder.classes == ("Ämeise", "über")
    assert [Path(name).name for name in found.parts["train"][0]] == ["ö.png", "ö.png"]


def test_paths_that_leave_an_archive_are_counted(tmp_path: Path):
    for number, name in enumerate(("ant", "bee")):
        _image(tmp_path / f"{name}.png", number)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in ("ant", "bee"):
            archive.add(tmp_path / f"{name}.png", f"{name}/1.png")
            archive.add(tmp_path / f"{name}.png", f"../{name}/2.png")
    tree = find_images(tmp_path / "x.tar")
    assert len(tree.parts["train"][0]) == 2
    assert tree.notes == [f"{tmp_path}/x.tar: left out 2 links, special files and paths with .., such as ../ant/2.png"]


# What is wrong with an archive


def _cut(archive: Path, size: int) -> None:
    os.truncate(archive, archive.stat().st_size + size if size < 0 else size)


def _damage(archive: Path, found: bytes, replaced: bytes) -> None:
    content = archive.read_bytes()
    assert found in content
    archive.write_bytes(content.replace(found, replaced))


def _cut_after_a_file(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        at = opened.getmembers()[1].offset
    _cut(archive, at)


def _encrypt(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 8] |= 1
    archive.write_bytes(content)


def _move(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 42 : at + 46] = b"\xf0\xff\xff\x7f"
    archive.write_bytes(content)


def _set_size(archive: Path, size: bytes) -> None:
    """Change the size of the first file, with the right check sum."""
    content = bytearray(archive.read_bytes())
    at = next(at for at in range(0, len(content), 512) if content[at + 156 : at + 157] == b"0")
    content[at + 124 : at + 136] = size.ljust(12, b"\0")
    content[at + 148 : at + 156] = b" " * 8
    content[at + 148 : at + 156] = f"{sum(content[at : at + 512]):06o}\0 ".encode()
    archive.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("x.tar", lambda path: _set_size(path, b"-0000001000"), r"x\.tar is no tar archive"),
        ("x.tar", lambda path: _set_size(path, b"\x80" + b"\xff" * 11), r"x\.tar is no tar archive"),
        (
            "x.zip",
            lambda path: _damage(path, b"bee/1.png", b"bee/1\0png"),
            r"a name in it has a zero byte, .*1\\x00png",
        ),
        ("x.zip", lambda path: _cut(path, -30), r"x\.zip is truncated: the list of files at its end is missing"),
        ("x.zip", lambda path: path.write_bytes(b"hello"), r"x\.zip is no zip archive \(it has 5 bytes\); copy"),
        (
            "x.zip",
            lambda path: path.write_bytes(path.read_bytes()[900:]),
            r"is truncated: its list of files should beg",
        ),
        ("x.zip", lambda path: _damage(path, b"PK\1\2", b"PK\1\3"), r"damaged: its list of files is no list at byte"),
        ("x.zip", _encrypt, r"x\.zip: val/bee/2\.png is encrypted; unpack it with its password"),
        ("x.zip", _move, r"x\.zip is damaged: val/bee/2\.png should take .* from byte 2,147,483,632 on"),
        ("x.tar", lambda path: _cut(path, 20_000), r"x\.tar is truncated: .*/.*\.png takes .* and it has 20,000; copy"),
        (
            "x.tar",
            _cut_after_a_file,
            r"x\.tar is truncated: it has .* bytes and no end mark, after val/bee/2\.png; copy",
        ),
        (
            "x.tar",
            lambda path: path.write_bytes(b"hello" * 200),
            r"x\.tar is no tar archive; copy or download it again",
        ),
        ("x.tar", lambda path: _damage(path, b"bee/1.png", b"bee/X.png"), r"damaged: no file begins at byte .*, after"),
    ],
)
def test_a_damaged_archive_is_named_with_what_was_found(
    photos: Path, tmp_path: Path, name: str, damage: Callable[[Path], Any], reason: str
):
    archive = tmp_path / name
    (_zip if name.endswith("zip") else _tar)(photos, archive)
    damage(archive)
    with pytest.raises(UserError, match=reason) as refusal:
        find_images(archive)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["x.zip", "x.tar"])
def test_archives_without_images_or_of_one_class_are_refused_as_folders_are(tmp_path: Path, name: str):
    pack = _zip if name.endswith("zip") else _tar
    (tmp_path / "folder").mkdir()
    for add, reason in (
        (lambda: None, r"holds no class with images; expected a folder of images for each class"),
        (
            lambda: _image(tmp_path / "folder/1.png", 1),
            r"holds an image that is in no folder of a class; expected a folder",
        ),
        (lambda: _image(tmp_path / "folder/ant/1.png", 1), r"holds images of one class only, ant; expected"),
    ):
        add()
        with pytest.raises(UserError, match=rf"x\.(zip|tar) {reason}"):
            find_images(pack(tmp_path / "folder", tmp_path / name))
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"is no zip archive \(it has 0 bytes\)|x\.tar is truncated: it has 0 bytes"):
        find_images(tmp_path / name)


def test_compressed_archives_and_unknown_methods_are_refused_with_what_to_type(photos: Path, tmp_path: Path):
    (tmp_path / "x.tar.gz").touch()
    with pytest.raises(UserError, match=r"x\.tar\.gz is compressed as a whole.*; run gunzip -k .*x\.tar\.gz, and pass"):
        find_images(tmp_path / "x.tar.gz")
    (tmp_path / "x.TXZ").touch()
    with pytest.raises(
        UserError, match=r"x\.TXZ is compressed as a whole, .* by itself; unpack it, and pass its folde"
    ):
        find_images(tmp_path / "x.TXZ")
    _zip(photos, tmp_path / "x.zip", compression=zipfile.ZIP_BZIP2)
    with pytest.raises(UserError, match=r"x\.zip: val/bee/2\.png is compressed by bzip2, expected deflate or nothing"):
        find_images(tmp_path / "x.zip")


def test_a_damaged_file_in_a_zip_is_named_and_can_be_skipped(photos: Path, tmp_path: Path, caplog: Any):
    archive = _zip(photos, tmp_path / "x.zip", compression=zipfile.ZIP_STORED)
    content = (photos / "train/ant/3.png").read_bytes()
    _damage(archive, content[100:], content[100:-30] + bytes(30))
    data = ImageFolderDataModule(data_dir=str(archive), image_size=24, num_workers=0)
    data.setup("fit")
    with pytest.raises(
        UserError, match=r"x\.zip/train/ant/3\.png cannot be read .* damaged there: the CRC-32 is .*pass"
    ):
        list(data.train_dataloader())
    data = ImageFolderDataModule(data_dir=str(archive), image_size=24, num_workers=0, on_corrupt="skip")
    data.setup("fit")
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        assert sum(len(labels) for _, labels in data.train_dataloader()) == 19
    assert "x.zip/train/ant/3.png cannot be read as an image" in caplog.text


def test_an_archive_that_is_cut_off_or_replaced_after_it_was_listed_is_an_error(photos: Path, tmp_path: Path):
    for archive in (_zip(photos, tmp_path / "x.zip"), _tar(photos, tmp_path / "x.tar")):
        kept, other = (find_images(archive).parts["train"][0] for _ in range(2))
        kept.read(0)
        _cut(archive, 3000)
        with pytest.raises(OSError, match=r"ends after|holds \d+ of|no file begins at"):
            [kept.read(row) for row in range(len(kept))]
        with pytest.raises(OSError, match=r"has changed since it was listed, from .* to 3,000 bytes; start"):
            other.read(0)
        with pytest.raises(UserError, match="is truncated"):
            ImageFolderDataModule(data_dir=str(archive)).setup("fit")
