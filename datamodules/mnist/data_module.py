"""MNIST and its relatives as one uint8 tensor, on the training device where it fits.

Decoding, collating and normalising image by image costs a stock loader seconds per epoch; indexing one tensor and
augmenting batch-wise costs hundredths of a second (``python -m benchmarks input_pipeline``).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from datamodules.base import BaseDataModule
from datamodules.contract import DataContract
from datamodules.errors import UserError
from datamodules.loading.download import DownloadError, digest_of, download
from datamodules.loading.loaders import EvaluationLoader, TrainLoader, Transform
from datamodules.loading.normalise import Normalise
from datamodules.loading.sampling import split_indices
from datamodules.mnist.affine import RandomAffine
from datamodules.mnist.idx import check_images_and_labels, read_idx
from datamodules.ranges import COUNT, Range, check_ranges

__all__ = ["DATASETS", "DatasetInfo", "MNISTDataModule", "find_files", "load_digits"]

log = logging.getLogger("lightning_recipes")
_warn = rank_zero_only(log.warning)


@dataclass(frozen=True)
class DatasetInfo:
    """The names of a data set, the statistics of its training pixels (0..1), and its class in torchvision."""

    title: str
    classes: tuple[str, ...]
    mean: float
    std: float
    torchvision_name: str | None = None


_DIGITS = tuple("0123456789")
DATASETS = {
    "mnist": DatasetInfo("MNIST", _DIGITS, 0.1307, 0.3081, "MNIST"),
    "fashion-mnist": DatasetInfo(
        "Fashion-MNIST",
        (
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        0.2860,
        0.3530,
        "FashionMNIST",
    ),
    "kmnist": DatasetInfo(
        "KMNIST", ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"), 0.1918, 0.3483, "KMNIST"
    ),
    "digits": DatasetInfo("scikit-learn digits", _DIGITS, 0.1558, 0.2774),
}

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def _torchvision_source(name: str) -> Any:
    """The torchvision class of a data set, which holds its addresses and checksums."""
    import torchvision.datasets

    class_name = DATASETS[name].torchvision_name
    assert class_name is not None, f"{name} has no files"
    return getattr(torchvision.datasets, class_name)


def _candidate_folders(name: str, data_dir: Path) -> list[Path]:
    """Folders that may hold the files, torchvision's last: downloads go there."""
    return [data_dir, data_dir / name, data_dir / str(DATASETS[name].torchvision_name) / "raw"]


def _files_in(folder: Path) -> dict[str, Path]:
    """Those of the four files that a folder holds, by name without suffix."""
    stems = [stem for pair in _FILES.values() for stem in pair]
    return {stem: p for stem in stems for p in (folder / f"{stem}.gz", folder / stem) if p.is_file()}


def find_files(name: str, data_dir: str | Path) -> dict[str, tuple[Path, Path]] | None:
    """The image and the label file of each part ("train", "test"), or None where one of the four is missing."""
    for folder in _candidate_folders(name, Path(data_dir)):
        found = _files_in(folder)
        if len(found) == 4:
            return {part: (found[images], found[labels]) for part, (images, labels) in _FILES.items()}
    return None


def _describe_missing(name: str, data_dir: Path) -> str:
    """Why `find_files` found nothing."""
    title = DATASETS[name].title
    if not data_dir.exists():
        return f"the folder {data_dir} does not exist, so there are no {title} files"
    if not data_dir.is_dir():
        return f"{data_dir} is a file, expected the folder of the {title} files"
    folder = max(_candidate_folders(name, data_dir), key=lambda candidate: len(_files_in(candidate)))
    if found := _files_in(folder):
        missing = [stem for pair in _FILES.values() for stem in pair if stem not in found]
        return f"{folder} lacks {' and '.join(missing)} of the four {title} files"
    return f"{data_dir} has no {title} files"


def _refuse_another_sets_files(name: str, files: dict[str, tuple[Path, Path]]) -> None:
    """Fashion-MNIST and KMNIST share MNIST's file names; the checksum of the smallest file tells them apart."""
    labels = files["test"][1].with_suffix(".gz")
    if not labels.is_file():
        # The known checksums are those of the compressed files.
        return
    checksum = digest_of(labels)
    for other in DATASETS:
        if other in (name, "digits"):
            continue
        if checksum in (md5 for _, md5 in _torchvision_source(other).resources):
            raise UserError(
                f"{labels} belongs to {DATASETS[other].title}, expected {DATASETS[name].title}; "
                f"pass dataset={other!r} or another `data_dir`"
            )


def load_digits() -> dict[str, tuple[Tensor, Tensor]]:
    """scikit-learn's 1,797 bundled digits in MNIST's form: 20 x 20 pixels in the middle of 28 x 28, bytes.

    A fifth of each class is the test set, the same for every seed.
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    bunch = load()
    small = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    large = F.interpolate(small, size=(20, 20), mode="bilinear", align_corners=False)
    images = F.pad(large, (4, 4, 4, 4)).mul(255).round().to(torch.uint8).squeeze(1)
    labels = torch.from_numpy(bunch.target).to(torch.uint8)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=bunch.target)
    return {part: (images[rows], labels[rows]) for part, rows in (("train", train), ("test", test))}


class MNISTDataModule(BaseDataModule):
    """MNIST, Fashion-MNIST, KMNIST or scikit-learn's bundled digits, exact on any number of devices.

    Batches are ``(images, labels)``: float32 of shape (batch, 1, 28, 28), normalised, and int64 of shape (batch,), on
    the training device. A part of the training set is held out for validation; the test set is read by ``test`` only.

    Args:
        dataset: name of the data set; "auto" is MNIST where its files are found or can be downloaded, else the digits.
        data_dir: folder with the idx or idx.gz files, flat or in torchvision's layout; downloads go there.
        batch_size: samples on one device in one forward pass.
        eval_batch_size: samples in one forward pass of validation, test and prediction.
        val_fraction: share of the training set held out for validation.
        num_classes: number of classes; labels are 0 to num_classes - 1.
        shift: augmentation: largest translation, in pixels.
        rotation: augmentation: largest rotation, in degrees.
        scale: augmentation: largest change of scale, as in 0.1 for 0.9 to 1.1.
        drop_last: drop the incomplete last batch of an epoch.
        seed: seed of the split, the shuffling and the augmentation.
        download: download missing files.
        predict_inputs: images that `predict` reads.

    Raises:
        UserError: at set-up, for a missing folder and for damaged, empty or contradicting files.
    """

    free_parameters = DataContract.free_parameters | {"download"}
    photographs = False

    def __init__(
        self,
        dataset: Literal["auto", "mnist", "fashion-mnist", "kmnist", "digits"] = "auto",
        data_dir: str = "data",
        batch_size: int = 256,
        eval_batch_size: int = 500,
        val_fraction: float = 0.08,
        num_classes: int = 10,
        shift: float = 2.0,
        rotation: float = 10.0,
        scale: float = 0.1,
        drop_last: bool = False,
        seed: int = 1,
        download: bool = True,
        predict_inputs: list[str] | None = None,
    ) -> None:
        super().__init__()
        if dataset not in ("auto", *DATASETS):
            raise UserError(f"no data set {dataset!r}; expected one of auto, {', '.join(DATASETS)}")
        if not 0 <= val_fraction < 1:
            raise UserError(f"val_fraction={val_fraction} is outside 0 to 1; pass val_fraction=0.08")
        check_ranges(
            batch_size=(batch_size, COUNT),
            eval_batch_size=(eval_batch_size, COUNT),
            num_classes=(num_classes, COUNT),
            shift=(shift, Range(0, 28)),
            rotation=(rotation, Range(0, 180)),
            scale=(scale, Range(0, 1, below=True)),
        )
        # A Path among the hyper-parameters makes a checkpoint unloadable with weights_only=True.
        data_dir = str(Path(data_dir).expanduser())
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.dataset: str = dataset
        self._no_download = ""
        self._parts: dict[str, tuple[Tensor, Tensor]] = {}
        self._rows: dict[str, Tensor] = {}

    @property
    def info(self) -> DatasetInfo:
        """Names and statistics of the data set; "auto" is MNIST until `setup`, `resolve` or a checkpoint decides."""
        return DATASETS["mnist" if self.dataset == "auto" else self.dataset]

    @property
    @override
    def title(self) -> str:
        return self.info.title

    @property
    @override
    def num_classes(self) -> int:
        return int(self.hparams.num_classes)

    @property
    @override
    def class_names(self) -> Sequence[str]:
        """The data set's names; empty where ``num_classes`` is not its number of classes."""
        return self.info.classes if len(self.info.classes) == self.num_classes else ()

    @property
    @override
    def image_size(self) -> int:
        return 28

    @property
    @override
    def sizes(self) -> dict[str, int]:
        return {part: len(rows) for part, rows in self._rows.items()}

    @override
    def prepare_data(self) -> None:
        """Download what is missing. Lightning calls this in one process per node.

        A failure is raised in `setup`, which every process reaches: raised here, the other processes would wait.
        """
        name = "mnist" if self.dataset == "auto" else self.dataset
        data_dir = Path(self.hparams.data_dir)
        predicting = self.trainer is not None and self.trainer.state.fn == "predict"
        if name == "digits" or predicting or not self.hparams.download or find_files(name, data_dir):
            return
        source, folder = _torchvision_source(name), _candidate_folders(name, data_dir)[-1]
        try:
            for file_name, md5 in source.resources:
                download([mirror + file_name for mirror in source.mirrors], folder / file_name, md5)
        except (DownloadError, OSError) as error:
            self._no_download = f"; {error}"

    def _missing(self, name: str) -> str:
        return _describe_missing(name, Path(self.hparams.data_dir)) + self._no_download

    @override
    def resolve(self) -> dict[str, Any]:
        """What ``dataset="auto"`` stands for, after downloading what is missing.

        Raises:
            UserError: ``data_dir`` was given and does not exist.
        """
        if self.hparams.dataset != "auto":
            return {}
        if self.dataset == "auto":
            self.prepare_data()
            self._resolve_dataset()
        return {"dataset": self.dataset}

    def _resolve_dataset(self) -> None:
        """Replace "auto", the same on every rank; rank 0 decides, since nodes may see different folders."""
        if self.dataset != "auto":
            return
        found = find_files("mnist", self.hparams.data_dir) is not None
        if self.trainer is not None:
            mine = torch.tensor(int(found and self.trainer.is_global_zero), device=self.trainer.strategy.root_device)
            found = bool(self.trainer.strategy.reduce(mine, reduce_op="sum"))
        chosen = "mnist" if found else "digits"
        if chosen == "digits" and self.hparams.data_dir != "data" and not Path(self.hparams.data_dir).is_dir():
            # Only the default folder may be missing.
            raise UserError(f"{self._missing('mnist')}; pass a folder that exists, or dataset='digits'")
        if chosen == "digits":
            _warn(
                "warning: %s: using the 1,797 digits bundled with scikit-learn; pass data_dir='FOLDER' for MNIST",
                self._missing("mnist"),
            )
        self.dataset = chosen

    def _load(self, part: str) -> tuple[Tensor, Tensor]:
        if self.dataset == "digits":
            images, labels = load_digits()[part]
            source = ("the bundled digits", "the bundled digits")
        else:
            files = find_files(self.dataset, self.hparams.data_dir)
            if files is None:
                raise UserError(
                    f"{self._missing(self.dataset)}; pass data_dir='FOLDER' with {_FILES['train'][0]}[.gz] "
                    f"and the other three files, or dataset='digits'"
                )
            _refuse_another_sets_files(self.dataset, files)
            source = (str(files[part][0]), str(files[part][1]))
            images, labels = read_idx(files[part][0], 3), read_idx(files[part][1], 1)
        check_images_and_labels(images, labels, self.hparams.num_classes, *source)
        images, labels = images.unsqueeze(1), labels.long()
        if self._device.type == "cuda" and images.nbytes > torch.cuda.mem_get_info(self._device)[0] // 4:
            return images, labels
        return images.to(self._device), labels.to(self._device)

    @override
    def setup(self, stage: str) -> None:
        """Read and check the parts that `stage` needs: "fit", "validate", "test" or "predict" (which needs none)."""
        if stage != "predict":
            self._resolve_dataset()
        if stage in ("fit", "validate") and "train" not in self._parts:
            self._parts["train"] = self._load("train")
            count = len(self._parts["train"][1])
            fraction = self.hparams.val_fraction
            held_out = max(round(count * fraction), 1 if fraction else 0)
            train, val = split_indices(count, held_out, self.hparams.seed)
            self._rows |= {"train": train, "val": val}
        if stage == "test" and "test" not in self._parts:
            self._parts["test"] = self._load("test")
            self._rows["test"] = torch.arange(len(self._parts["test"][1]))

    @override
    def preprocessing(self) -> Normalise:
        """Maps uint8 of shape (batch, 1, 28, 28) to floats of about mean 0 and standard deviation 1."""
        return Normalise([self.info.mean], [self.info.std])

    def normalise(self, images: Tensor) -> Tensor:
        """Bytes of shape (batch, 1, height, width) to floats of mean 0 and standard deviation 1."""
        normalised: Tensor = self.preprocessing()(images)
        return normalised

    def _training_transform(self) -> Transform:
        options, count = self.hparams, len(self._parts["train"][1])
        augment = RandomAffine(options.seed, options.shift, options.rotation, options.scale, count)
        normalise = self.preprocessing()

        def transform(images: Tensor, rows: Tensor, epoch: int) -> Tensor:
            # The map fills with zeros, which is the background before normalisation, so it comes first.
            if augment and len(images):
                images = augment(images.float(), rows, epoch)
            normalised: Tensor = normalise(images)
            return normalised

        return transform

    def _evaluation_transform(self) -> Transform:
        normalise = self.preprocessing()
        return lambda images, *_: normalise(images)

    @override
    def train_dataloader(self) -> TrainLoader:
        images, labels = self._parts["train"]
        return TrainLoader(
            images,
            labels,
            self._rows["train"],
            self.batch_size,
            self.hparams.seed,
            self._rank,
            self._world_size,
            self._training_transform(),
            self._device,
            self.hparams.drop_last,
            shuffle=self._shuffles,
        )

    def _evaluation_loader(self, part: str, rows: Tensor) -> EvaluationLoader:
        images, labels = self._parts[part]
        return EvaluationLoader(
            images,
            labels,
            rows,
            self.hparams.eval_batch_size,
            self._rank,
            self._world_size,
            self._evaluation_transform(),
            self._device,
        )

    @override
    def val_dataloader(self) -> EvaluationLoader | list[EvaluationLoader]:
        """The held-out part of the training set; nothing when ``val_fraction`` is 0."""
        rows = self._rows["val"]
        return self._evaluation_loader("train", rows) if len(rows) else []

    @override
    def test_dataloader(self) -> EvaluationLoader:
        return self._evaluation_loader("test", self._rows["test"])

    @override
    def predict_dataloader(self) -> EvaluationLoader:
        """The images named by ``predict_inputs``, in their order."""
        from datamodules.mnist.user_images import load_images

        files = self.prediction_names
        images = load_images(files).to(self._device)
        return EvaluationLoader(
            images,
            torch.arange(len(files), device=images.device),
            torch.arange(len(files)),
            self.hparams.eval_batch_size,
            self._rank,
            self._world_size,
            self._evaluation_transform(),
        )

    @property
    @override
    def prediction_names(self) -> list[str]:
        """The files that `predict_dataloader` reads."""
        return list(self.hparams.predict_inputs or [])

    @property
    @override
    def validates(self) -> bool:
        return float(self.hparams.val_fraction) > 0

    @override
    def state_dict(self) -> dict[str, Any]:
        """The data set that "auto" stood for, so that a checkpoint is used with the right classes and statistics."""
        return {"dataset": self.dataset}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["dataset"]
        if self.hparams.dataset not in ("auto", saved):
            raise UserError(
                f"the checkpoint was trained on {saved}, found dataset={self.dataset!r}; pass dataset={saved!r}"
            )
        if self.dataset not in ("auto", saved):
            # Lightning sets up before it reads the checkpoint, so "auto" was resolved by the files found here.
            self.dataset, self._parts, self._rows = saved, {}, {}
            if self.trainer is not None and self.trainer.state.fn is not None:
                self.setup(self.trainer.state.fn)
        self.dataset = saved
