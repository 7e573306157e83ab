"""Listings that are kept are those of the tree as it is."""

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from datamodules import ImageFolderDataModule
from datamodules.images.pixel_cache import cache_folder
from datamodules.loading import listing_cache
from datamodules.loading.image_lists import find_images
from datamodules.loading.image_tree import ImageTree
from datamodules.loading.listing_cache import cached_tree


def _age(folder: Path) -> None:
    """As if all had been written a while ago."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 60))


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """photos/train/CLASS/, photos/val/CLASS/, of a minute ago."""
    monkeypatch.setattr(listing_cache, "_LEAST", 5)
    folder = tmp_path / "photos"
    for part in ("train", "val"):
        for name in ("ant", "bee"):
            (folder / part / name / "sub").mkdir(parents=True)
            for file in ("1.png", "ä.jpg", "3.png", "sub/2.png", "notes.txt"):
                (folder / part / name / file).write_text(f"{part} {name} {file[0]}")
    (folder / "train/empty").mkdir()
    _age(folder)
    return folder


class _Lister:
    """Lists, and counts how often."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.count = tmp_path / "cache", 0

    def __call__(self, place: Path | str) -> ImageTree:
        def make() -> ImageTree:
            self.count += 1
            return find_images(place)

        return cached_tree(self.folder, str(place), make)

    def anew(self, place: Path | str) -> bool:
        """Whether a call lists; what it returns is what there is in any case."""
        before = self.count
        assert _plain(self(place)) == _plain(find_images(place))
        return self.count > before


def _plain(tree: ImageTree) -> object:
    parts = {
        part: (list(files), [files.read(row) for row in range(len(files))], targets.tolist())
        for part, (files, targets) in tree.parts.items()
    }
    return {**vars(tree), "parts": parts}


@pytest.fixture
def lister(tmp_path: Path) -> _Lister:
    return _Lister(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_what_is_kept_equals_what_is_listed_with_notes_and_whole_tables(photos: Path, lister: _Lister, kind: str):
    place = photos
    if kind == "folder":
        (photos / "train/odd \udcff").mkdir()
        (photos / "val/ant/odd \udcff.png").touch()
        _age(photos)
    else:
        place = Path(shutil.make_archive(str(photos), kind, photos))
        os.utime(place, (1, 1))
    assert [lister.anew(place) for _ in range(3)] == [True, False, False]
    listed, kept = find_images(place), lister(place)
    assert len(kept.notes) == 2 + (kind == "folder")
    for part in ("train", "val"):
        assert kept.parts[part][0].whole().digest() == listed.parts[part][0].whole().digest()
    names = [kept.parts[part][0]._bytes.untyped_storage().data_ptr() for part in ("train", "val")]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda photos: (photos / "train/ant/new.png").touch(),
        lambda photos: (photos / "train/ant/sub/2.png").unlink(),
        lambda photos: (photos / "val/bee/1.png").rename(photos / "val/bee/9.png"),
        lambda photos: (photos / "train/empty/1.png").touch(),
        lambda photos: shutil.rmtree(photos / "val"),
        lambda photos: shutil.copytree(photos / "val", photos / "test"),
    ],
)
def test_a_tree_that_has_changed_is_listed_again(photos: Path, lister: _Lister, change: Callable[[Path], object]):
    lister(photos)
    change(photos)
    _age(photos)
    assert [lister.anew(photos) for _ in range(2)] == [True, False]


def test_one_file_in_place_of_another_with_the_times_set_back_is_noticed(photos: Path, lister: _Lister):
    lister(photos)
    folder = photos / "train/ant"
    before = folder.stat()
    (folder / "1.png").rename(folder / "9.png")
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert lister.anew(photos)


def test_an_archive_that_was_made_anew_and_a_part_of_another_folder_are_listed_again(photos: Path, lister: _Lister):
    parts = photos.with_name("parts")
    for part in ("train", "val"):
        shutil.make_archive(str(parts / part), "zip", photos / part)
    _age(parts)
    assert [lister.anew(parts) for _ in range(2)] == [True, False]
    (photos / "val/ant/1.png").unlink()
    shutil.make_archive(str(parts / "val"), "zip", photos / "val")
    _age(parts)
    assert lister.anew(parts)


def test_what_has_just_changed_and_what_is_small_is_not_kept(
    photos: Path, lister: _Lister, monkeypatch: pytest.MonkeyPatch
):
    (photos / "train/ant").touch()
    assert [lister.anew(photos) for _ in range(2)] == [True, True]
    _age(photos)
    monkeypatch.setattr(listing_cache, "_LEAST", 17)
    assert [lister.anew(photos) for _ in range(2)] == [True, True]
    assert not lister.folder.exists()


def test_another_folder_of_the_same_name_and_another_version_have_their_own(
    photos: Path, lister: _Lister, monkeypatch: pytest.MonkeyPatch
):
    other = photos.parent / "other/photos"
    shutil.copytree(photos, other)
    (other / "train/ant/1.png").unlink()
    _age(other)
    for parent in (photos.parent, other.parent):
        monkeypatch.chdir(parent)
        assert [lister.anew("photos") for _ in range(2)] == [True, False]
    monkeypatch.chdir(photos.parent)
    assert not lister.anew("photos")
    monkeypatch.setattr(listing_cache, "_FORMAT", 0)
    assert lister.anew("photos")
    monkeypatch.setattr(listing_cache, "reads_heic", lambda: "unlike before")
    assert lister.anew("photos")


def test_a_damaged_file_is_made_anew(photos: Path, lister: _Lister):
    lister(photos)
    (kept,) = lister.folder.iterdir()
    content = kept.read_bytes()
    for at in range(0, len(content), len(content) // 40):
        kept.write_bytes(content[:at])
        assert lister.anew(photos)
        kept.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        lister.anew(photos)
    kept.write_bytes(b"")
    assert [lister.anew(photos) for _ in range(2)] == [True, False]
    torch.save({"other": 1}, kept)
    assert lister.anew(photos)


def test_a_disk_that_is_full_or_cannot_be_written_costs_the_time_only(
    photos: Path, lister: _Lister, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    lister.folder = tmp_path / "file"
    assert lister.anew(photos)
    lister.folder = tmp_path / "cache"
    for error in (OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")):

        def full(*_: object, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", full)
            assert lister.anew(photos)
    assert list(lister.folder.iterdir()) == []
    assert [lister.anew(photos) for _ in range(2)] == [True, False]


def test_the_oldest_are_deleted(photos: Path, lister: _Lister, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listing_cache, "_MOST_KEPT", 2)
    for name in ("first", "second", "third"):
        lister(shutil.copytree(photos, photos.parent / name))
        _age(photos.parent / name)
        lister(photos.parent / name)
        for kept in lister.folder.iterdir():
            os.utime(kept, (1, kept.stat().st_mtime - 10))
        if name == "second":
            assert not lister.anew(photos.parent / "first")
    assert [lister.anew(photos.parent / name) for name in ("third", "first", "second")] == [False, False, True]


def _list_often(folder: Path, photos: Path, failed: "multiprocessing.Queue[str]") -> None:
    lister = _Lister(folder)
    try:
        for _ in range(20):
            assert len(lister(photos).parts["train"][0]) == 8
            for kept in lister.folder.iterdir():
                kept.unlink(missing_ok=True)
    except BaseException as error:
        failed.put(repr(error))


def test_runs_at_the_same_time_do_not_disturb_each_other(photos: Path, tmp_path: Path):
    context = multiprocessing.get_context("fork")
    failed: multiprocessing.Queue[str] = context.Queue()
    processes = [context.Process(target=_list_often, args=(tmp_path, photos, failed)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert failed.empty(), failed.get()


def test_the_data_module_keeps_listings_in_the_users_folder_for_caches(photos: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(photos.parent / "home"))
    for _ in range(2):
        data = ImageFolderDataModule(data_dir=str(photos), image_size=64)
        data.setup("fit")
        assert data.sizes == {"train": 8, "val": 8}
        assert len(list(cache_folder("listings").iterdir())) == 1
        monkeypatch.setattr("datamodules.images.data_module.find_images", None)
