import gzip
import hashlib
import logging
import struct
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from PIL import Image
from torch import Tensor

from datamodules import MNISTDataModule, UserError
from datamodules.base import Process
from datamodules.images.builtin_datasets import DATASETS, find_files, load_digits
from datamodules.images.image_data import Order, Part
from datamodules.loading.sampling import epoch_order, split_indices
from tests.support.tables import quiet_trainer

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(rows: Tensor) -> bytes:
    return struct.pack(f">HBB{rows.dim()}I", 0, 8, rows.dim(), *rows.shape) + bytes(rows.flatten().tolist())


def write_set(folder: Path, train: int = 50, test: int = 20, compress: bool = True) -> None:
    """A tiny set in MNIST's files: every image is filled with its own row number, so batches tell what they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, n in (("train", train), ("t10k", test)):
        numbers = torch.arange(n, dtype=torch.uint8)
        for stem, rows in (
            (f"{part}-images-idx3-ubyte", numbers.view(n, 1, 1).expand(n, 28, 28)),
            (f"{part}-labels-idx1-ubyte", numbers % 10),
        ):
            data = idx(rows)
            (folder / (stem + ".gz" * compress)).write_bytes(gzip.compress(data, 1) if compress else data)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_set(tmp_path)
    return tmp_path


def _data(folder: Path, **options: Any) -> MNISTDataModule:
    sizes = {"batch_size": 8, "eval_batch_size": 7, "val_fraction": 0.2}
    return MNISTDataModule(data_dir=str(folder), **({"dataset": "mnist", "download": False} | sizes | options))


def _numbers(data: MNISTDataModule, images: Tensor) -> list[int]:
    """The row numbers that un-augmented images of `write_set` were filled with."""
    return (images[:, 0, 14, 14] * 255 * data.info.std[0] + 255 * data.info.mean[0]).round().long().tolist()


class Watcher(pl.LightningModule):
    """Sees every batch; one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": [], "predict": []}

    def _look(self, stage: str, batch: Any) -> Tensor:
        images, targets = batch
        assert images.dtype == torch.float32
        assert images.shape[1:] == (1, 28, 28)
        assert targets.dtype == torch.int64
        self.seen[stage].append(_numbers(self.trainer.datamodule, images))
        return (self.weight * images).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._look("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._look("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._look("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self._look("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


PLAIN = {"shift": 0, "rotation": 0, "scale": 0}


@pytest.mark.parametrize("layout", [".", "MNIST/raw"])
@pytest.mark.parametrize("compress", [True, False])
def test_files_are_found_in_both_layouts(tmp_path: Path, layout: str, compress: bool):
    write_set(tmp_path / layout, compress=compress)
    data = _data(tmp_path)
    data.setup("fit")
    data.setup("test")
    assert data.sizes == {"train": 40, "val": 10, "test": 20}
    assert _numbers(data, next(iter(data.test_dataloader()))[0]) == list(range(7))


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("name", ["{}.gz", "{}", "{}/{}"])
def test_files_of_other_names_are_read_as_the_error_says(tmp_path: Path, name: str):
    write_set(tmp_path, compress=name == "{}.gz")
    for stem in FILES:
        other = stem if name == "{}/{}" else stem.replace("-idx", ".idx")
        path = tmp_path / (f"{stem}.gz" if name == "{}.gz" else stem)
        content = path.read_bytes()
        path.unlink()
        (tmp_path / name.format(other, other)).parent.mkdir(exist_ok=True)
        (tmp_path / name.format(other, other)).write_bytes(content)
    data = _data(tmp_path, dataset="auto", download=True)
    with pytest.raises(
        UserError, match="^(?!.*could not download).*has no MNIST files.*; pass columns='images=tra"
    ) as error:
        data.resolve()
    columns = str(error.value).partition("columns='")[2].partition("'")[0]
    data = _data(tmp_path, dataset="auto", columns=columns)
    data.setup("fit")
    assert (data.dataset, data.sizes) == ("mnist", {"train": 40, "val": 10})


def test_the_other_sets_have_their_own_folders(tmp_path: Path):
    write_set(tmp_path / "FashionMNIST" / "raw")
    assert find_files("mnist", tmp_path) is None
    assert find_files("fashion-mnist", tmp_path) is not None
    with pytest.raises(UserError, match="has no MNIST files"):
        _data(tmp_path).setup("fit")
    data = _data(tmp_path, dataset="fashion-mnist")
    data.setup("fit")
    assert data.info.classes[9] == "Ankle boot"


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("nowhere", r"the folder .*nowhere does not exist.* pass data_dir=.*dataset='digits'"),
        ("empty", "has no MNIST files; pass data_dir="),
        (".", "lacks t10k-labels-idx1-ubyte of the four MNIST files"),
    ],
)
def test_an_incomplete_folder_is_rejected_with_what_to_pass(tiny: Path, folder: str, reason: str):
    (tiny / f"{FILES[3]}.gz").unlink()
    (tiny / "empty").mkdir()
    with pytest.raises(UserError, match=reason):
        _data(tiny / folder).setup("fit")


def test_a_label_that_is_no_class_is_rejected_with_its_row(tiny: Path):
    labels = torch.arange(50, dtype=torch.uint8) % 10
    labels[17] = 11
    (tiny / f"{FILES[1]}.gz").write_bytes(gzip.compress(idx(labels)))
    reason = rf"label 11 at row 17 of .*{FILES[1]}\.gz is outside 0\.\.9 .*pass num_classes=12 or correct"
    with pytest.raises(UserError, match=reason):
        _data(tiny).setup("fit")
    _data(tiny, num_classes=12).setup("fit")


def test_only_what_the_stage_needs_is_read(tiny: Path):
    for file in FILES[2:]:
        (tiny / f"{file}.gz").write_text("<html>")
    for stage, sizes in (("fit", {"train": 40, "val": 10}), ("validate", {"val": 10})):
        data = _data(tiny)
        data.setup(stage)
        assert data.sizes == sizes
    with pytest.raises(UserError, match="t10k-images"):
        _data(tiny).setup("test")
    write_set(tiny)
    for file in FILES[:2]:
        (tiny / f"{file}.gz").write_text("<html>")
    data = _data(tiny)
    data.setup("test")
    assert data.sizes == {"test": 20}


# Settings


def test_a_path_as_folder_leaves_the_checkpoint_loadable(tiny: Path):
    data = MNISTDataModule("mnist", tiny, batch_size=8, download=False)  # type: ignore[arg-type]
    trainer = quiet_trainer(fast_dev_run=1)
    trainer.fit(Watcher(), datamodule=data)
    trainer.save_checkpoint(tiny / "a.ckpt")
    checkpoint = torch.load(tiny / "a.ckpt", weights_only=True)
    assert checkpoint["datamodule_hyper_parameters"]["data_dir"] == str(tiny)
    assert checkpoint["MNISTDataModule"] == {"dataset": "mnist", "invert": False, "borders": [0.0, 49.0]}


def test_a_validation_share_above_0_holds_at_least_one_sample(tiny: Path):
    for fraction, expected in ((0.001, 1), (0.2, 10), (0.0, 0)):
        data = _data(tiny, val_fraction=fraction)
        data.setup("fit")
        assert data.sizes == {"train": 50 - expected, **({"val": expected} if expected else {})}


# Batches


def test_training_shares_no_sample_with_validation(tiny: Path):
    module, data = Watcher(), _data(tiny, seed=3, **PLAIN)
    quiet_trainer().fit(module, datamodule=data)
    train, val = split_indices(50, 10, seed=3)
    assert sum(module.seen["train"], []) == train[epoch_order(40, 3, 0)].tolist()
    assert sum(module.seen["val"], []) == val.tolist()


def test_only_training_batches_are_augmented(tiny: Path):
    data = _data(tiny)
    data.setup("fit")
    plain = _data(tiny, **PLAIN)
    plain.setup("fit")
    loader, plain_loader = data.train_dataloader(), plain.train_dataloader()
    views = []
    for _ in range(2):
        pairs = list(zip(loader, plain_loader, strict=True))
        assert all(torch.equal(a[1], b[1]) for a, b in pairs)
        assert not any(torch.equal(a[0], b[0]) for a, b in pairs)
        views.append(torch.cat([a[0] for a, _ in pairs])[torch.cat([a[1] for a, _ in pairs]).argsort(stable=True)])
    assert not torch.equal(*views)
    for a, b in zip(data.val_dataloader(), plain.val_dataloader(), strict=True):
        assert torch.equal(a[0], b[0])


def test_clothing_is_mirrored(tiny: Path, caplog):
    caplog.set_level("INFO", "lightning_recipes")
    images = torch.randint(256, (20, 1, 28, 28), dtype=torch.uint8)
    clothing = _data(tiny, dataset="fashion-mnist", shift=0)
    assert clothing.resolve() == {"rotation": 0.0, "scale": 0.0, "flip": True, "num_classes": 10}
    clothing.setup("fit")
    clothing.train_dataloader()
    assert "Fashion-MNIST: training on 10 classes: T-shirt/top (3), Trouser (4), " in caplog.text
    assert "Fashion-MNIST: augmented by shift=0, rotation=0.0, scale=0.0, flip=True" in caplog.text
    part = Part(images, torch.zeros(20, dtype=torch.int64), torch.arange(20))
    (seen, _), *_ = clothing.pipeline.train(part, Order(20, 1, shuffle=False), Process())
    plain = clothing.preprocessing()(images)
    flips = torch.tensor([not torch.allclose(a, b, atol=1e-3) for a, b in zip(seen, plain)]).view(-1, 1, 1, 1)
    assert flips.any()
    assert torch.allclose(seen, torch.where(flips, plain.flip(3), plain), atol=1e-3)


def test_digits_are_rotated(tiny: Path, caplog):
    caplog.set_level("INFO", "lightning_recipes")
    digits = _data(tiny, shift=1)
    assert digits.resolve() == {"rotation": 10.0, "scale": 0.1, "flip": False, "num_classes": 10}
    digits.setup("fit")
    digits.train_dataloader()
    assert "MNIST: augmented by shift=1, rotation=10.0, scale=0.1, flip=False" in caplog.text
    assert _data(tiny, flip=True, rotation=3, scale=0).resolve() == {"num_classes": 10}


def test_augmentation_fills_with_background(tiny: Path):
    data = _data(tiny, shift=6)
    data.setup("fit")
    black = (0 - data.info.mean[0]) / data.info.std[0]
    images = torch.cat([images for images, _ in data.train_dataloader()])
    assert abs(float(images.min()) - black) < 1e-5


# In Trainers


def test_each_entry_point_works_after_any_other(tiny: Path):
    data = _data(tiny, **PLAIN)
    stages = ("validate", "val", 10), ("test", "test", 20), ("fit", "train", 40), ("test", "test", 20)
    for entry, part, count in stages:
        module = Watcher()
        getattr(quiet_trainer(), entry)(module, datamodule=data)
        assert len(set(sum(module.seen[part], []))) == count
        # Only `test` sees the test set.
        assert (part == "test") == bool(module.seen["test"])


def test_over_fitting_repeats_the_same_batches_in_every_epoch(tiny: Path):
    module = Watcher()
    quiet_trainer(overfit_batches=2, max_epochs=3).fit(module, datamodule=_data(tiny, **PLAIN))
    assert len(module.seen["train"]) == 6
    assert module.seen["train"] == module.seen["train"][:2] * 3


def test_images_are_predicted_in_order_without_a_data_set(tmp_path: Path):
    files = []
    for number in range(9):
        files.append(str(tmp_path / f"{number}.png"))
        image = Image.new("L", (28, 28), number)
        image.putpixel((5, 5), 255)
        image.save(files[-1])
    for dataset in ("mnist", "auto"):
        module = Watcher()
        data = _data(tmp_path / "nowhere", dataset=dataset, predict_inputs=files, eval_batch_size=4)
        quiet_trainer().predict(module, datamodule=data)
        assert module.seen["predict"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
        assert data.sizes == {}


# "auto", the bundled digits, checkpoints


def test_the_bundled_digits_are_in_mnists_form():
    parts = load_digits()
    assert {name: len(labels) for name, (_, labels) in parts.items()} == {"train": 1437, "test": 360}
    images, labels = parts["train"]
    assert images.shape == (1437, 28, 28)
    assert images.dtype == labels.dtype == torch.uint8
    assert images[:, :4].sum() == images[:, :, :4].sum() == images[:, 24:].sum() == images[:, :, 24:].sum() == 0
    for _, labels in parts.values():
        shares = labels.bincount(minlength=10).double() / len(labels)
        assert float((shares - 0.1).abs().max()) < 0.01
    together = torch.cat([images.flatten(1) for images, _ in parts.values()])
    assert len(together.unique(dim=0)) == 1797, "no digit is in both parts"


def test_the_bundled_digits_have_the_declared_statistics():
    pixels = load_digits()["train"][0].double() / 255
    assert abs(float(pixels.mean()) - DATASETS["digits"].mean[0]) < 5e-5
    assert abs(float(pixels.std()) - DATASETS["digits"].std[0]) < 5e-5


def _default(**options: Any) -> MNISTDataModule:
    """Without a folder; tests run in one of their own."""
    return MNISTDataModule(batch_size=8, eval_batch_size=7, val_fraction=0.2, **({"download": False} | options))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_auto_falls_back_to_the_digits_with_one_line(here: Path, caplog: pytest.LogCaptureFixture):
    (here / "data").mkdir()
    data = _default()
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        quiet_trainer(fast_dev_run=1).fit(Watcher(), datamodule=data)
        quiet_trainer(fast_dev_run=1).test(Watcher(), datamodule=data)
    assert [record.getMessage() for record in caplog.records if record.name == "lightning_recipes"] == [
        "warning: data has no MNIST files: using the 1,797 bundled digits; "
        "pass data_dir='FOLDER' for MNIST or your own images"
    ]
    assert data.info.title == "scikit-learn digits"
    assert data.sizes == {"train": 1437 - 287, "val": 287, "test": 360}


@pytest.mark.usefixtures("unreachable")
def test_auto_rejects_a_given_folder_without_usable_files(tmp_path: Path):
    with pytest.raises(UserError, match="nowhere does not exist.*pass a folder with them, .*dataset='digits'"):
        _data(tmp_path / "nowhere", dataset="auto").setup("fit")
    (tmp_path / "a.pdf").touch()
    data = _data(tmp_path, dataset="auto", download=True)
    with pytest.raises(UserError, match="^(?!.*could not download).*holds a.pdf; expected CLASS/IMAGE"):
        data.resolve()
    # A set that is named is downloaded into a folder with other files.
    with pytest.raises(UserError, match="could not download"):
        named = _data(tmp_path, download=True)
        named.prepare_data()
        named.setup("fit")


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])


@pytest.mark.usefixtures("unreachable")
def test_a_failed_download_is_the_reason_why_auto_falls_back(here: Path, caplog: pytest.LogCaptureFixture):
    data = _default(download=True)
    quiet_trainer(fast_dev_run=1).fit(Watcher(), datamodule=data)
    ours = [record for record in caplog.records if record.name == "lightning_recipes"]
    (line,) = [record.getMessage() for record in ours if record.levelname == "WARNING"]
    assert "\n" not in line
    assert "could not download train-images-idx3-ubyte.gz (127.0.0.1:9: [Errno 111] Connection refused)" in line
    assert data.dataset == "digits"
    with pytest.raises(UserError, match=r"could not download .*Connection refused.*pass data_dir='FOLDER'"):
        quiet_trainer(fast_dev_run=1).fit(Watcher(), datamodule=_data(here, download=True))


@pytest.mark.usefixtures("unreachable")
def test_nothing_is_downloaded_for_a_prediction(tmp_path: Path):
    Image.new("L", (28, 28), 3).save(tmp_path / "3.png")
    data = _data(tmp_path / "new", dataset="auto", download=True, predict_inputs=[str(tmp_path / "3.png")])
    quiet_trainer().predict(Watcher(), datamodule=data)
    assert not (tmp_path / "new").exists()


def test_resolving_auto_is_idempotent(here: Path, caplog: pytest.LogCaptureFixture):
    write_set(here / "other")
    for data, found in ((_default(), "digits"), (_data(here / "other", dataset="auto"), "mnist")):
        resolved = {"dataset": found, "rotation": 10.0, "scale": 0.1, "flip": False, "num_classes": 10}
        assert data.resolve() == data.resolve() == resolved
        write_set(here / "data")
        data.setup("fit")
        assert data.resolve() == resolved
        assert data.dataset == found
        assert _default(**resolved).resolve() == {}
    assert len(caplog.records) == 1


def test_resolving_downloads_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import torchvision

    write_set(tmp_path / "mirror")
    files = sorted((tmp_path / "mirror").iterdir())
    resources = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in files]
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "mirror"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
        (tmp_path / "new" / "FashionMNIST").mkdir(parents=True)  # Downloaded before.
        assert _data(tmp_path / "new", dataset="auto", download=True).resolve()["dataset"] == "mnist"
        server.shutdown()
    assert find_files("mnist", tmp_path / "new")


def _checkpoint(data: MNISTDataModule, path: Path) -> Path:
    trainer = quiet_trainer(fast_dev_run=1)
    trainer.fit(Watcher(), datamodule=data)
    trainer.save_checkpoint(path)
    return path


def test_auto_follows_the_checkpoint_wherever_the_files_are(tiny: Path, here: Path, tmp_path: Path):
    digits = _checkpoint(_default(), tmp_path / "digits.ckpt")
    data = _data(tiny, dataset="auto")
    quiet_trainer().test(Watcher(), datamodule=data, ckpt_path=str(digits), weights_only=True)
    assert data.dataset == "digits"
    assert data.sizes == {"test": 360}
    mnist = _checkpoint(_data(tiny), tmp_path / "mnist.ckpt")
    Image.new("L", (28, 28), 3).save(tmp_path / "3.png")
    data = _data(tmp_path / "nowhere", dataset="auto", predict_inputs=[str(tmp_path / "3.png")])
    quiet_trainer().predict(Watcher(), datamodule=data, ckpt_path=str(mnist), weights_only=True)
    assert data.dataset == "mnist"
    with pytest.raises(UserError, match="nowhere does not exist"):
        data = _data(tmp_path / "nowhere", dataset="auto")
        quiet_trainer().test(Watcher(), datamodule=data, ckpt_path=str(mnist), weights_only=True)


def test_a_checkpoint_of_another_data_set_is_rejected(tiny: Path, tmp_path: Path):
    mnist = _checkpoint(_data(tiny), tmp_path / "mnist.ckpt")
    with pytest.raises(UserError, match="dataset='kmnist': expected one of mnist, fashion-mnist"):
        MNISTDataModule().load_state_dict({"dataset": "kmnist"})
    with pytest.raises(UserError, match="trained on mnist, found digits; pass dataset='mnist'"):
        data = MNISTDataModule(dataset="digits")
        quiet_trainer().test(Watcher(), datamodule=data, ckpt_path=str(mnist), weights_only=True)


# Real data


def test_the_real_files_are_what_torchvision_reads(shared_data: Path):
    data = MNISTDataModule("mnist", str(shared_data / "mnist"), val_fraction=0, download=False)
    data.setup("fit")
    data.setup("test")
    assert data.sizes == {"train": 60_000, "test": 10_000}
    part = data._parts["train"]
    images, labels = part.images, part.labels
    pixels = images.double() / 255
    assert abs(float(pixels.mean()) - data.info.mean[0]) < 5e-5
    assert abs(float(pixels.std()) - data.info.std[0]) < 5e-5
    assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def test_files_of_mnists_names_are_mnist_until_they_are_declared(
    tiny: Path, here: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, "lightning_recipes"):
        _data(tiny, dataset="auto").setup("fit")
    assert "holds files of MNIST's names, which Fashion-MNIST has too; pass dataset='fashion-mnist'" in caplog.text
    data = _data(tiny, dataset="fashion-mnist")
    data.setup("fit")
    assert data.class_names[0] == "T-shirt/top"
