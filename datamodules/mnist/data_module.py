"""MNIST and its relatives as one uint8 tensor, on the training device where it fits.

Decoding, collating and normalising image by image costs a stock loader seconds per epoch; indexing one tensor and
augmenting batch-wise costs hundredths of a second (``python -m benchmarks input_pipeline``).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from datamodules.base import ClassificationDataModule
from datamodules.contract import DataContract
from datamodules.errors import UserError
from datamodules.loading.download import DownloadError, download
from datamodules.loading.given_images import GivenImages, given_images
from datamodules.loading.image_tree import split_by_class
from datamodules.loading.labels import BALANCE, describe_classes
from datamodules.loading.loaders import EvaluationLoader, TrainLoader, Transform
from datamodules.loading.normalise import Normalise
from datamodules.loading.sampling import split_indices
from datamodules.mnist.affine import RandomAffine
from datamodules.mnist.idx import EMNIST, check_images_and_labels, file_names, files_in, read_part
from datamodules.mnist.own_images import (
    OwnImages,
    holds_own_images,
    images_from_arrays,
    read_own_images,
)
from datamodules.mnist.user_images import read_digits
from datamodules.ranges import COUNT, Range, check_choice, check_ranges

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
    flip: bool = False
    """Whether its images may be mirrored."""
    rotation: float = 10.0
    """The usual augmentation, in degrees; `scale` as in 0.1 for 0.9 to 1.1."""
    scale: float = 0.1


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
        # Clothing lies upright and fills the image.
        flip=True,
        rotation=0.0,
        scale=0.0,
    ),
    "kmnist": DatasetInfo(
        "KMNIST", ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"), 0.1918, 0.3483, "KMNIST"
    ),
    "qmnist": DatasetInfo("QMNIST", _DIGITS, 0.1307, 0.3081),
    **{
        name: DatasetInfo(name.replace("emnist-", "EMNIST "), tuple(classes), 0.1722, 0.3309)
        for name, classes in EMNIST.items()
    },
    "digits": DatasetInfo("scikit-learn digits", _DIGITS, 0.1558, 0.2774),
    # Your own take MNIST's form, so its statistics fit, and a checkpoint needs no others.
    "custom": DatasetInfo("your images", (), 0.1307, 0.3081),
}


def _torchvision_source(name: str) -> Any:
    """The torchvision class of a data set, which holds its addresses and checksums."""
    import torchvision.datasets

    class_name = DATASETS[name].torchvision_name
    assert class_name is not None, f"{name} has no files"
    return getattr(torchvision.datasets, class_name)


def _candidate_folders(name: str, data_dir: Path) -> list[Path]:
    """Folders that may hold the files, torchvision's last: downloads go there."""
    own = DATASETS[name].torchvision_name or name.split("-")[0].upper()
    return [data_dir, data_dir / name, data_dir / "gzip", data_dir / own / "raw"]


def find_files(name: str, data_dir: str | Path) -> dict[str, tuple[Path, Path]] | None:
    """The image and the label file of each part ("train", "test"), or None where one of the four is missing."""
    for folder in _candidate_folders(name, Path(data_dir)):
        found = files_in(folder, name)
        if len(found) == 4:
            return {part: (found[images], found[labels]) for part, (images, labels) in file_names(name).items()}
    return None


def _describe_missing(name: str, data_dir: Path) -> str:
    """Why `find_files` found nothing."""
    title = DATASETS[name].title
    if not data_dir.exists():
        return f"the folder {data_dir} does not exist, so there are no {title} files"
    found = max((files_in(folder, name) for folder in _candidate_folders(name, data_dir)), key=len)
    missing = [stem for pair in file_names(name).values() for stem in pair if stem not in found]
    if found:
        return f"{data_dir} lacks {' and '.join(missing)} of the four {title} files"
    return f"{data_dir} has no {title} files"


def _refuse_another_sets_images(name: str, images: Tensor, source: str) -> None:
    """Fashion-MNIST and KMNIST share MNIST's file names; the statistics of the pixels tell them apart, however packed.

    Args:
        images: uint8 of shape (n, height, width).
    """
    some = images[:10_000].double() / 255
    mean, std = float(some.mean()), float(some.std())

    def matches(info: DatasetInfo) -> bool:
        return abs(mean - info.mean) < 0.01 and abs(std - info.std) < 0.015

    for other, info in DATASETS.items():
        if info.torchvision_name and matches(info) and not matches(DATASETS[name]):
            raise UserError(
                f"{source} belongs to {info.title} by its pixels (mean {mean:.3f}, standard deviation {std:.3f}), "
                f"expected {DATASETS[name].title}; pass dataset={other!r} or another `data_dir`"
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


class MNISTDataModule(ClassificationDataModule):
    """MNIST and its relatives, scikit-learn's bundled digits or your own, exact on any number of devices.

    Batches are ``(images, labels)``: float32 of shape (batch, 1, 28, 28), normalised, and int64 of shape (batch,), on
    the training device. A part of the training set is held out for validation; the test set is read by ``test`` only.

    Args:
        dataset: name of the data set; "custom" is your own in `data_dir`. "auto" is what `data_dir` holds; where it is
            empty or not given, MNIST is downloaded, and where that fails without a `data_dir`, the bundled digits.
            QMNIST and the sets of EMNIST are read by their published file names, and are not downloaded.
        data_dir: folder of the images: your own in class folders, lists (train.csv, train.txt), a NumPy file (.npz) or
            CSV with a pixel in each column, which may be given itself; or the idx or idx.gz files, flat or in
            torchvision's layout, and downloads, by default "data".
        batch_size: samples on one device in one forward pass.
        eval_batch_size: samples in one forward pass of validation, test and prediction.
        val_fraction: share of the training set held out for validation; of each class, of your own.
        test_fraction: share of each class held out for the test, where your own have no test part.
        balance: what makes up for classes of unequal size: drawing each class equally often (sampling), weights in the
            training loss (loss), or nothing. An epoch stays as long as it is, and other losses and scores as they are.
        num_classes: number of classes, by default the data's; labels are 0 to num_classes - 1.
        shift: augmentation: largest translation, in pixels.
        rotation: augmentation: largest rotation, in degrees; by default 10, and 0 for Fashion-MNIST.
        scale: augmentation: largest change of scale, as in 0.1 for 0.9 to 1.1; by default 0.1, and 0 for Fashion-MNIST.
        flip: augmentation: mirror half of the images, and the others in the next epoch; by default for Fashion-MNIST.
        seed: seed of the split, the shuffling and the augmentation.
        download: download missing files.
        predict_inputs: images, and folders of images, that `predict` reads.

    Raises:
        UserError: at set-up, for a missing folder and for damaged, empty or contradicting files.
    """

    free_parameters = DataContract.free_parameters | {"download"}
    rare_parameters = frozenset({"download", "flip"})
    photographs = False

    def __init__(
        self,
        dataset: Literal[
            "auto",
            "mnist",
            "fashion-mnist",
            "kmnist",
            "qmnist",
            "emnist-balanced",
            "emnist-bymerge",
            "emnist-byclass",
            "emnist-letters",
            "emnist-digits",
            "emnist-mnist",
            "digits",
            "custom",
        ] = "auto",
        data_dir: str | None = None,
        batch_size: int = 256,
        eval_batch_size: int = 500,
        val_fraction: float = 0.08,
        test_fraction: float = 0.1,
        balance: Literal["none", "sampling", "loss"] = "none",
        num_classes: int | None = None,
        shift: float = 2.0,
        rotation: float | None = None,
        scale: float | None = None,
        flip: bool | None = None,
        seed: int = 1,
        download: bool = True,
        predict_inputs: list[str] | None = None,
    ) -> None:
        super().__init__()
        check_choice("dataset", dataset, ("auto", *DATASETS))
        check_choice("balance", balance, BALANCE)
        check_ranges(
            batch_size=(batch_size, COUNT),
            eval_batch_size=(eval_batch_size, COUNT),
            val_fraction=(val_fraction, Range(0, 1, below=True)),
            test_fraction=(test_fraction, Range(0, 1, below=True)),
            num_classes=(num_classes, COUNT),
            shift=(shift, Range(0, 28)),
            rotation=(rotation, Range(0, 180)),
            scale=(scale, Range(0, 1, below=True)),
        )
        if dataset == "digits" and data_dir is not None:
            raise UserError(f"dataset='digits' comes with scikit-learn, so data_dir={data_dir!s} would not be read")
        # A Path among the hyper-parameters makes a checkpoint unloadable with weights_only=True.
        data_dir = str(Path(data_dir).expanduser()) if data_dir is not None else None
        # An open number is no hyper-parameter: Lightning refuses one that differs from the network's.
        self.save_hyperparameters(ignore=["num_classes"] if num_classes is None else [])
        self._num_classes = num_classes
        self.batch_size = batch_size
        self.dataset: str = dataset
        self._no_download = ""
        self._own: OwnImages | None = None
        self._classes: tuple[str, ...] = ()
        self._unreadable: dict[int, str] = {}
        self._unclear: dict[int, str] = {}
        self._parts: dict[str, tuple[Tensor, Tensor]] = {}
        self._rows: dict[str, Tensor] = {}

    @classmethod
    def from_arrays(
        cls,
        images: Any,
        labels: Any,
        val: tuple[Any, Any] | None = None,
        test: tuple[Any, Any] | None = None,
        **options: Any,
    ) -> Self:
        """A data module of images and labels in memory.

        Args:
            images: array, tensor or list of shape (n, height, width), (n, height, width, channels), (n, channels,
                height, width) or (n, pixels): whole numbers from 0 to 255, or floats from 0 to 1.
            labels: class numbers from 0, or names, of shape (n,).
            val: images and labels to validate on; by default ``val_fraction`` of each class is held out.
            test: images and labels to test on; by default ``test_fraction`` of each class is held out.
            options: parameters of the constructor.

        Raises:
            UserError: for other types, shapes and values.

        Example:
            >>> from sklearn.datasets import load_digits
            >>> digits = load_digits()
            >>> data = MNISTDataModule.from_arrays(digits.images / 16, digits.target, batch_size=64)
            >>> data.setup("fit")
            >>> data.num_classes, data.sizes
            (10, {'train': 1475, 'val': 143})
        """
        data = cls(**options)
        data.take_samples({"train": (images, labels), "val": val, "test": test})
        return data

    @override
    def take_samples(self, samples: Any) -> None:
        """Take images and labels in memory.

        Args:
            samples: images and labels, as `from_arrays` takes them; or a dict of such pairs, for "train" and, where
                they are given, "val" and "test".
        """
        parts = samples if isinstance(samples, Mapping) else {"train": samples}
        given = {part: pair for part, pair in parts.items() if pair is not None}
        pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given.values())
        if not pairs or "train" not in given or given.keys() - {"train", "val", "test"}:
            raise UserError("expected (images, labels), or a dict of such pairs with the keys train, val and test")
        self._own = images_from_arrays(given, "arrays")
        self.dataset = "custom"
        self.hparams.update({"dataset": "custom"})

    @property
    def _folder(self) -> Path:
        return Path(self.hparams.data_dir or "data")

    def _own_images(self) -> OwnImages:
        """Your own images, listed once."""
        if self._own is None:
            if self.hparams.data_dir is None:
                raise UserError(
                    "dataset='custom' needs `data_dir`, a folder with a folder of images for each class or a NumPy file"
                )
            self._own = read_own_images(self._folder)
        return self._own

    def _is_own(self) -> bool:
        """Whether the images are your own: as "auto" decides where ``data_dir`` is given and holds no MNIST files."""
        if self.dataset != "auto":
            return self.dataset == "custom"
        given = self.hparams.data_dir is not None
        return given and self._known_set() is None and holds_own_images(self._folder)

    def _known_set(self) -> str | None:
        """The set whose files the folder holds by their names: MNIST, or where it is given, QMNIST or one of EMNIST's.

        Raises:
            UserError: there are several of them.
        """
        if find_files("mnist", self._folder) or self.hparams.data_dir is None:
            return "mnist" if find_files("mnist", self._folder) else None
        found = [name for name in ("qmnist", *EMNIST) if find_files(name, self._folder)]
        if len(found) > 1:
            raise UserError(f"{self._folder} holds {', '.join(found)}; pass dataset={found[0]!r} or another of them")
        return found[0] if found else None

    @property
    def info(self) -> DatasetInfo:
        """Names and statistics of the data set; "auto" is MNIST until `setup`, `resolve` or a checkpoint decides."""
        info = DATASETS["mnist" if self.dataset == "auto" else self.dataset]
        if self.dataset != "custom":
            return info
        title, classes = (self._own.title, self._own.classes) if self._own else (info.title, self._classes)
        return replace(info, title=title, classes=classes)

    @property
    @override
    def title(self) -> str:
        return self.info.title

    @property
    @override
    def num_classes(self) -> int:
        """``num_classes``, or the number of the data set's; your own are listed for it."""
        if self._num_classes is None and self._is_own() and not self._classes:
            return len(self._own_images().classes)
        return self._num_classes or len(self.info.classes)

    @property
    @override
    def class_names(self) -> Sequence[str]:
        """The data set's names; empty where ``num_classes`` is not its number of classes."""
        return self.info.classes if len(self.info.classes) == self.num_classes else ()

    @property
    @override
    def left_out(self) -> Mapping[str, int]:
        """Files and rows of your own that are not used, by reason."""
        return self._own.left_out if self._own else {}

    @property
    @override
    def image_size(self) -> int:
        return 28

    @property
    @override
    def may_flip(self) -> bool:
        return self.info.flip

    @override
    def sample_names(self, part: str) -> Sequence[str]:
        """The files of your own images; empty for sets in larger files."""
        return self._own.names(part if part in self._own.images else "train") if self._own else ()

    @override
    def _training_labels(self) -> Tensor | None:
        if "train" not in self._parts:
            return None
        return self._parts["train"][1].cpu()[self._rows["train"]]

    @property
    @override
    def sizes(self) -> dict[str, int]:
        return {part: len(rows) for part, rows in self._rows.items()}

    @override
    def prepare_data(self) -> None:
        """Download what is missing. Lightning calls this in one process per node.

        A failure is raised in `setup`, which every process reaches: raised here, the other processes would wait.
        """
        name, data_dir = "mnist" if self.dataset == "auto" else self.dataset, self._folder
        predicting = self.trainer is not None and self.trainer.state.fn == "predict"
        if DATASETS[name].torchvision_name is None or predicting or not self.hparams.download:
            return
        if find_files(name, data_dir):
            return
        if self.dataset == "auto" and self.hparams.data_dir is not None and self._holds_other_files():
            # Only an empty folder is one to download into without being asked by dataset="mnist".
            return
        source, folder = _torchvision_source(name), _candidate_folders(name, data_dir)[-1]
        try:
            for file_name, md5 in source.resources:
                download([mirror + file_name for mirror in source.mirrors], folder / file_name, md5)
        except (DownloadError, OSError) as error:
            self._no_download = f"; {error}"

    def _holds_other_files(self) -> bool:
        """Whether the folder holds more than what downloads make, and hidden files."""
        folder = self._folder
        names = {entry.name for entry in folder.iterdir() if entry.name[0] != "."} if folder.is_dir() else set()
        return folder.is_file() or bool(names - {info.torchvision_name for info in DATASETS.values()})

    def _missing(self, name: str) -> str:
        return _describe_missing(name, self._folder) + self._no_download

    @override
    def resolve(self) -> dict[str, Any]:
        """What ``dataset="auto"`` stands for, after downloading what is missing, the number of classes, augmentation.

        Raises:
            UserError: ``data_dir`` was given and holds nothing to train on.
        """
        if self.dataset == "auto":
            self.prepare_data()
            self._resolve_dataset()
        found = {"dataset": self.dataset} if self.hparams.dataset == "auto" else {}
        found |= {name: value for name, value in self._augmentation.items() if self.hparams[name] is None}
        return found | ({"num_classes": self.num_classes} if self._num_classes is None else {})

    @property
    def _augmentation(self) -> dict[str, Any]:
        """Rotation, scale and flip, which are the data set's where they are not given."""
        names = ("rotation", "scale", "flip")
        return {name: getattr(self.info, name) if self.hparams[name] is None else self.hparams[name] for name in names}

    def _resolve_dataset(self) -> None:
        """Replace "auto", the same on every rank; rank 0 decides, since nodes may see different folders."""
        if self.dataset != "auto":
            return
        choices = (*DATASETS, "none")
        chosen = self._known_set() or ("custom" if self._is_own() else "digits")
        if chosen == "digits" and self.hparams.data_dir is not None:
            # Only the default folder is replaced by other data than it holds.
            chosen = "none"
        if self.trainer is not None:
            number = choices.index(chosen) if self.trainer.is_global_zero else 0
            mine = torch.tensor(number, device=self.trainer.strategy.root_device)
            chosen = choices[int(self.trainer.strategy.reduce(mine, reduce_op="sum"))]
        if chosen == "none":
            raise UserError(
                f"{self._missing('mnist')} and no images of your own; pass a folder with them, with a folder of images "
                "for each class or with an .npz file, dataset='mnist' to download MNIST into it, or dataset='digits'"
            )
        if chosen == "digits":
            _warn(
                "warning: %s: using the 1,797 digits bundled with scikit-learn; pass data_dir='FOLDER' for MNIST or "
                "your own images",
                self._missing("mnist"),
            )
        self.dataset = chosen

    def _load(self, part: str) -> tuple[Tensor, Tensor]:
        if self.dataset == "custom":
            images, labels = self._own_images().read(part)
            source = (f"the {part} images", f"the {part} labels")
        elif self.dataset == "digits":
            images, labels = load_digits()[part]
            source = ("the bundled digits", "the bundled digits")
        else:
            files = find_files(self.dataset, self._folder)
            if files is None:
                first = file_names(self.dataset)["train"][0]
                raise UserError(
                    f"{self._missing(self.dataset)}; pass data_dir='FOLDER' with {first}[.gz] and the other three"
                    " files, or dataset='digits'"
                )
            source = (str(files[part][0]), str(files[part][1]))
            images, labels = read_part(self.dataset, *files[part])
            _refuse_another_sets_images(self.dataset, images, source[0])
        check_images_and_labels(images, labels, self.num_classes, *source)
        images, labels = images.unsqueeze(1), labels.long()
        if self._device.type == "cuda" and images.nbytes > torch.cuda.mem_get_info(self._device)[0] // 4:
            return images, labels
        return images.to(self._device), labels.to(self._device)

    @override
    def setup(self, stage: str) -> None:
        """Read and check the parts that `stage` needs: "fit", "validate", "test" or "predict" (which needs none)."""
        if stage != "predict":
            self._resolve_dataset()
        wanted = {"fit": ("train", "val"), "validate": ("train", "val"), "test": ("test",)}.get(stage, ())
        if self.dataset == "custom" and wanted:
            self._set_up_own(wanted)
            return
        if "train" in wanted and "train" not in self._parts:
            self._parts["train"] = self._load("train")
            count = len(self._parts["train"][1])
            fraction = self.hparams.val_fraction
            held_out = max(round(count * fraction), 1 if fraction else 0)
            train, val = split_indices(count, held_out, self.hparams.seed)
            self._rows |= {"train": train, "val": val}
        if "test" in wanted and "test" not in self._parts:
            self._parts["test"] = self._load("test")
            self._rows["test"] = torch.arange(len(self._parts["test"][1]))

    def _set_up_own(self, wanted: Sequence[str]) -> None:
        """Read the parts that there are; the others are held out of the training part, the same for the same seed."""
        own = self._own_images()
        fractions = {"test": self.hparams.test_fraction, "val": self.hparams.val_fraction}
        fractions = {part: share for part, share in fractions.items() if part not in own.labels and share}
        split = split_by_class(own.labels["train"], own.classes, fractions, self.hparams.seed)
        for part in wanted:
            source = part if part in own.labels else "train"
            if source not in self._parts:
                self._parts[source] = self._load(source)
            if part == source != "train":
                self._rows[part] = torch.arange(len(own.labels[part]))
            else:
                self._rows[part] = split.get(part, torch.empty(0, dtype=torch.int64))

    @override
    def preprocessing(self) -> Normalise:
        """Maps uint8 of shape (batch, 1, 28, 28) to floats of about mean 0 and standard deviation 1."""
        return Normalise([self.info.mean], [self.info.std])

    def _training_transform(self) -> Transform:
        options, count = self.hparams, len(self._parts["train"][1])
        # Repeated samples have larger numbers, whose maps are made for each batch.
        count = 0 if options.balance == "sampling" else count
        augment = RandomAffine(options.seed, options.shift, **self._augmentation, count=count)
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
        if int(images.min()) == int(images.max()):
            shade = f"all pixels of the train images of {self.title} are {int(images.min())} of 255"
            raise UserError(f"{shade}; expected light digits on dark, or dark ones on light")
        loader = TrainLoader(
            images,
            labels,
            self._rows["train"],
            self.batch_size,
            self.hparams.seed,
            self._rank,
            self._world_size,
            self._training_transform(),
            self._device,
            shuffle=self._shuffles,
            weights=self._sampling_weights(labels),
        )
        # A loader that is refused is not described.
        names = self.class_names or [str(number) for number in range(self.num_classes)]
        counts = labels.cpu()[self._rows["train"]].bincount(minlength=len(names)).tolist()
        self._note(f"{self.title}: training on {describe_classes(names, counts)}")
        augmentation = {"shift": self.hparams.shift, **self._augmentation}
        settings = ", ".join(f"{name}={value}" for name, value in augmentation.items())
        self._note(f"{self.title}: augmented by {settings}")
        self._note_balance()
        return loader

    def _evaluation_loader(self, part: str) -> EvaluationLoader | list[EvaluationLoader]:
        rows = self._rows[part]
        if not len(rows):
            return []
        # What was held out of the training part lies in it.
        images, labels = self._parts.get(part) or self._parts["train"]
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
        return self._evaluation_loader("val")

    @override
    def test_dataloader(self) -> EvaluationLoader | list[EvaluationLoader]:
        """The test set; nothing where your own have none and ``test_fraction`` is 0."""
        return self._evaluation_loader("test")

    @override
    def take_inputs(self, inputs: Any) -> None:
        """Images to predict, as `given_images` takes them."""
        self._given = given_images(inputs, colour=False)

    @cached_property
    def _given(self) -> GivenImages:
        return given_images(self.hparams.predict_inputs or [], colour=False)

    @override
    def predict_dataloader(self) -> EvaluationLoader:
        """The images of ``predict_inputs`` and their places in `prediction_names`, without blank ones."""
        given = self._given
        images = read_digits(given.contents)
        self._unreadable, self._unclear = images.unreadable, images.unclear
        if len(images.unreadable) == len(given):
            raise UserError(next(iter(images.unreadable.values())))
        pixels, numbers = images.pixels.to(self._device), images.numbers.to(self._device)
        return EvaluationLoader(
            pixels,
            numbers,
            torch.arange(len(numbers)),
            self.hparams.eval_batch_size,
            self._rank,
            self._world_size,
            self._evaluation_transform(),
        )

    @property
    @override
    def prediction_names(self) -> list[str]:
        """The files, and the places of images from Python, that `predict_dataloader` reads."""
        return self._given.names

    @property
    @override
    def unreadable_inputs(self) -> Mapping[int, str]:
        return self._unreadable

    @property
    @override
    def unclear_inputs(self) -> Mapping[int, str]:
        return self._unclear

    @property
    @override
    def validates(self) -> bool:
        return float(self.hparams.val_fraction) > 0 or (self._is_own() and "val" in self._own_images().labels)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The data set that "auto" stood for, so that a checkpoint is used with the right classes and statistics."""
        own = {"classes": list(self.info.classes)} if self.dataset == "custom" else {}
        return {"dataset": self.dataset, **own}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, self._classes = state_dict["dataset"], tuple(state_dict.get("classes", ()))
        if self.hparams.dataset not in ("auto", saved):
            raise UserError(
                f"the checkpoint was trained on {saved}, found dataset={self.dataset!r}; pass dataset={saved!r}"
            )
        if self.dataset not in ("auto", saved):
            # Lightning sets up before it reads the checkpoint, so "auto" was resolved by the files found here.
            self.dataset, self._parts, self._rows, self._own = saved, {}, {}, None
            if self.trainer is not None and self.trainer.state.fn is not None:
                self.setup(self.trainer.state.fn)
        self.dataset = saved
        if self._own and self._classes != self._own.classes:
            found = ", ".join(self._own.classes[:20])
            raise UserError(
                f"the checkpoint was trained on the classes {', '.join(self._classes[:20])}, found {found}; pass the"
                " `data_dir` that it was trained on"
            )
