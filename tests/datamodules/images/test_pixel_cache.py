import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from datamodules.images.decoding import load_image
from datamodules.images.file_pipeline import ImageFiles
from datamodules.images.pixel_cache import PixelCache, delete_unused
from datamodules.loading.file_table import FileTable
from tests.datamodules.images.test_image_folder import write_class

COUNT = 7


@pytest.fixture
def files(tmp_path: Path) -> FileTable:
    write_class(tmp_path / "files", COUNT)
    return FileTable(sorted(str(file) for file in (tmp_path / "files").iterdir()))


def _image(number: int, height: int = 5, width: int = 4) -> Tensor:
    return torch.randint(256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def _cache(tmp_path: Path, limit: int = 1 << 20) -> PixelCache:
    return PixelCache(tmp_path / "cache" / "one", COUNT, limit)


def _count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    decoded: list[str] = []

    def spy(*arguments, name: str = "", **options):
        decoded.append(name)
        return load_image(*arguments, name=name, **options)

    monkeypatch.setattr("datamodules.images.file_pipeline.load_image", spy)
    return decoded


def test_a_pickled_part_reads_the_cached_images(files, tmp_path, monkeypatch):
    decoded = _count_decoded(monkeypatch)
    plain = ImageFiles(files, 20)
    cached = ImageFiles(files, 20, _cache(tmp_path))
    part = ImageFiles(files.select(torch.tensor([5, 2])), 20, _cache(tmp_path))
    for _ in range(2):
        assert all(torch.equal(cached[row], plain[row]) for row in range(COUNT))
    assert len(decoded) == 3 * COUNT
    for again in (pickle.loads(pickle.dumps(part)), part):
        assert torch.equal(again[0], plain[5])
        assert torch.equal(again[1], plain[2])
    # Only the ones without a cache were decoded again.
    assert len(decoded) == 3 * COUNT + 4


def test_a_file_that_has_changed_is_decoded_again(files, tmp_path):
    cached = ImageFiles(files, 20, _cache(tmp_path))
    before = cached[3].clone()
    other = Path(files[4]).read_bytes()
    Path(files[3]).write_bytes(other)
    os.utime(files[3], ns=(1, 1))
    for images in (cached, ImageFiles(files, 20, _cache(tmp_path))):
        assert torch.equal(images[3], load_image(other, 20))
        assert not torch.equal(images[3], before)


def test_a_replaced_file_of_equal_size_is_decoded_again(tmp_path):
    path = tmp_path / "x.bmp"
    images = []
    for shade in (10, 200):
        Image.new("RGB", (30, 30), (shade, shade, shade)).save(path)
        os.utime(path, ns=(1, 1))
        images.append(ImageFiles(FileTable([str(path)]), 20, _cache(tmp_path))[0].clone())
    assert [int(image.max()) for image in images] == [10, 200]


@pytest.mark.parametrize("name", ["pixels", "index"])
def test_a_damaged_cache_is_noticed(files, tmp_path, name):
    first = ImageFiles(files, 20, _cache(tmp_path))
    expected = [first[row].clone() for row in range(COUNT)]
    for damage in ("flip", "cut"):
        file = tmp_path / "cache" / "one" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2 - 3] ^= 4
        file.write_bytes(content if damage == "flip" else content[: len(content) // 2])
        again = ImageFiles(files, 20, _cache(tmp_path))
        assert all(torch.equal(again[row], image) for row, image in enumerate(expected))


def _fill(folder: Path, start: "multiprocessing.synchronize.Barrier", failed: "multiprocessing.Queue[int]") -> None:
    cache = PixelCache(folder, 200, 1 << 20)
    start.wait()
    for row in range(200):
        found = cache.get(row, 7)
        if found is None:
            cache.put(row, 7, _image(row))
        elif not torch.equal(found, _image(row)):
            failed.put(row)


def test_processes_that_fill_a_cache_at_once_leave_it_right(tmp_path):
    context = multiprocessing.get_context("fork")
    start, failed = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_fill, args=(tmp_path / "c", start, failed)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert failed.empty()
    cache = PixelCache(tmp_path / "c", 200, 1 << 20)
    assert all(torch.equal(cache.get(row, 7), _image(row)) for row in range(200))


def test_a_folder_that_cannot_be_written_is_no_cache(tmp_path):
    (tmp_path / "cache").write_text("a file")
    cache = _cache(tmp_path)
    cache.put(0, 1, _image(0))
    assert cache.get(0, 1) is None


def test_the_index_has_room_on_disk_before_it_is_mapped(tmp_path):
    cache = PixelCache(tmp_path / "one", 10_000, 1 << 20)
    assert cache.get(0, 1) is None
    status = (tmp_path / "one" / "index").stat()
    assert status.st_blocks * 512 >= status.st_size >= 10_000 * 30


def test_a_full_disk_ends_only_the_caching(tmp_path, monkeypatch):
    cache = _cache(tmp_path)
    cache.put(0, 1, _image(0))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        cache.put(1, 1, _image(1))
    cache.put(2, 1, _image(2))
    assert torch.equal(cache.get(0, 1), _image(0))
    assert cache.get(1, 1) is None
    assert cache.get(2, 1) is None


def test_only_caches_unopened_for_long_are_deleted(tmp_path):
    old, new, link = (f"{number:024x}-64" for number in range(3))
    for name in (old, new):
        PixelCache(tmp_path / name, 1, 1000).put(0, 1, _image(0))
    (tmp_path / "photographs").mkdir()
    (tmp_path / "photographs" / "1.jpg").write_bytes(b"mine")
    (tmp_path / link).symlink_to(tmp_path / "photographs", target_is_directory=True)
    for name in (old, "photographs"):
        os.utime(tmp_path / name, (0, 0))
    delete_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((new, link, "photographs"))
    assert (tmp_path / "photographs" / "1.jpg").exists()
    delete_unused(tmp_path / "none")
