import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torchvision.datasets

from datamodules import ImageFolderDataModule, UserError

SIZES = {"cifar10": {f"data_batch_{number}": 4 for number in range(1, 6)} | {"test_batch": 3}}
SIZES["cifar100"] = {"train": 20, "test": 3}
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
FILES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}
Images = npt.NDArray[np.uint8]


class _Python2Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Pickler that writes text and bytes as the strings of Python 2, and NumPy's names of 2009."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_string(self, text: str | bytes) -> None:
        content = text if isinstance(text, bytes) else text.encode()
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_string


def _pickled(value: Any) -> bytes:
    """Return the pickle of a value as Python 2 and an old NumPy would write it."""
    file = io.BytesIO()
    _Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def _as_batch(images: Images, labels: list[int], key: str = "labels") -> bytes:
    """Return the pickle of a batch: a row of 3,072 bytes for each image, all red values first."""
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    fine = {"coarse_labels": [0] * len(labels)} if key == "fine_labels" else {}
    return _pickled({"batch_label": "a batch", key: labels, "data": rows, "filenames": [], **fine})


def _write_archive(path: Path, members: Mapping[str, bytes]) -> str:
    """Write a .tar.gz of files, and return its MD5."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def _published(name: str) -> type:
    return {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]


def _write(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Images, torch.Tensor]:
    """Write a small archive, whose digest becomes that of the published one; return its images and labels in order."""
    generator = np.random.default_rng(1)
    members, images, labels = {}, [], []
    key = "fine_labels" if name == "cifar100" else "labels"
    for member, count in SIZES[name].items():
        images.append(generator.integers(256, size=(count, 32, 32, 3), dtype=np.uint8))
        labels.append([(number * 7 + len(images)) % (100 if name == "cifar100" else 10) for number in range(count)])
        members[f"{FOLDERS[name]}/{member}"] = _as_batch(images[-1], labels[-1], key)
    # The published archives do not have the batches in order.
    digest = _write_archive(folder / FILES[name], dict(reversed(members.items())))
    monkeypatch.setattr(_published(name), "tgz_md5", digest)
    return np.concatenate(images), torch.tensor(sum(labels, []))


def _data(place: Path, name: str, **options: Any) -> ImageFolderDataModule:
    return ImageFolderDataModule(name, str(place), val_fraction=0.0, augment="none", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILES)
def test_an_archive_is_downloaded_once_then_read_to_its_pixels(name, tmp_path, monkeypatch):
    served = tmp_path / "served"
    served.mkdir()
    images, labels = _write(served, name, monkeypatch)
    handler = partial(SimpleHTTPRequestHandler, directory=str(served))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setattr(_published(name), "url", f"http://127.0.0.1:{server.server_port}/{FILES[name]}")
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        data = _data(tmp_path / "data", name)
        data.prepare_data()
        server.shutdown()
    assert [file.name for file in (tmp_path / "data").iterdir()] == [FILES[name]]
    # From here on without a server: the archive is there.
    data = _data(tmp_path / "data", name, batch_size=20, eval_batch_size=3)
    data.prepare_data()
    for stage in ("fit", "test"):
        data.setup(stage)
    assert data.sizes == {"train": 20, "test": 3}
    assert (data.num_classes, data.image_size) == ({"cifar10": 10, "cifar100": 100}[name], 32)
    batches = [*data.train_dataloader(), *data.test_dataloader()]
    normalize = data.preprocessing()
    expected = normalize(torch.tensor(images).permute(0, 3, 1, 2))
    order = data.train_dataloader().order_of_epoch(0)
    for (found, targets), rows in zip(batches, (order, torch.arange(20, 23)), strict=True):
        assert torch.equal(found, expected[rows])
        assert torch.equal(targets, labels[rows])


def test_an_archive_is_known_by_its_published_name(tmp_path, monkeypatch):
    _write(tmp_path, "cifar100", monkeypatch)
    data = _data(tmp_path / FILES["cifar100"], "auto")
    assert data.resolve()["dataset"] == "cifar100"
    data.setup("fit")
    assert data.class_names[:2] == ("apple", "aquarium_fish")
    assert sorted(data.class_names) == list(data.class_names)


def test_an_unpublished_file_is_rejected_before_it_is_read(tmp_path, monkeypatch):
    _write(tmp_path, "cifar10", monkeypatch)
    monkeypatch.undo()
    with pytest.raises(
        UserError, match=r"is not the published archive of CIFAR-10: its MD5 is .*c58f30108f718f92721af3"
    ):
        _data(tmp_path / FILES["cifar10"], "cifar10").setup("fit")


def test_a_pickle_calls_no_function_of_its_choice(tmp_path, monkeypatch):
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "harm"),)

    content = _pickled({"labels": [1], "data": Harmful()})
    digest = _write_archive(tmp_path / FILES["cifar10"], {f"{FOLDERS['cifar10']}/data_batch_1": content})
    monkeypatch.setattr(_published("cifar10"), "tgz_md5", digest)
    with pytest.raises(pickle.UnpicklingError, match="expected arrays only"):
        _data(tmp_path, "cifar10").setup("fit")
    assert not (tmp_path / "harm").exists()


def test_a_failed_download_names_the_file_to_fetch_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(_published("cifar100"), "url", "http://127.0.0.1:9/cifar-100-python.tar.gz")
    data = _data(tmp_path, "cifar100")
    data.prepare_data()
    reason = (
        r"has no cifar-100-python\.tar\.gz of CIFAR-100; could not download .*127\.0\.0\.1:9.*pass data_dir='FOLDER'"
    )
    with pytest.raises(UserError, match=reason):
        data.setup("fit")


def test_augmentation_pads_by_four_pixels_then_mirrors(tmp_path, monkeypatch):
    images, _ = _write(tmp_path, "cifar10", monkeypatch)
    data = ImageFolderDataModule("cifar10", str(tmp_path), val_fraction=0.0, batch_size=20)
    data.setup("fit")
    loader = data.train_dataloader()
    rows = loader.order_of_epoch(0).tolist()
    ((found, _),) = loader
    normalize = data.preprocessing()
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    for image, row in zip(found, rows, strict=True):
        crops = [padded[row, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
        candidates = torch.tensor(np.stack([*crops, *(crop[:, ::-1] for crop in crops)])).permute(0, 3, 1, 2)
        assert any(torch.equal(image, candidate) for candidate in normalize(candidates))
