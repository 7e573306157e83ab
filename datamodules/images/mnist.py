"""MNIST, Fashion-MNIST, and small images of your own as one uint8 tensor, on the training device where it fits."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.contract import Free, OneCall, Rare
from datamodules.errors import UserError
from datamodules.images import known_sets
from datamodules.images.arrays import holds_own_images, images_from_arrays, read_own_images
from datamodules.images.augmentation import RandomAffine
from datamodules.images.file_table import FileTable
from datamodules.images.folders import ImageTree
from datamodules.images.image_data import ImageDataModule
from datamodules.images.mnist_form import read_digits, read_set
from datamodules.loading.loaders import EvaluationLoader, TrainLoader, Transform
from datamodules.loading.sampling import split_indices
from datamodules.notes import warn
from datamodules.ranges import COUNT, Range, check_choice, check_ranges


class MNISTDataModule(ImageDataModule):
    """MNIST and Fashion-MNIST, scikit-learn's bundled digits or your own, exact on any number of devices.

    Batches are ``(images, labels)``: float32 of shape (batch, 1, 28, 28), normalised, and int64 of shape (batch,), on
    the training device. A part of the training set is held out for validation; the test set is read by ``test`` only.

    Args:
        dataset: name of the data set; "custom" is your own in `data_dir`. "auto" is what `data_dir` holds; where it is
            empty or not given, MNIST is downloaded, and where that fails without a `data_dir`, the bundled digits.
        data_dir: folder of the images: your own in class folders, lists (train.csv) or a NumPy file (.npz),
            which may be given itself; or the idx or idx.gz files, flat or in torchvision's layout, and downloads, by
            default "data".
        batch_size: samples on one device in one forward pass.
        eval_batch_size: samples in one forward pass of validation, test and prediction.
        val_fraction: share of the training set held out for validation; of each class, of your own.
        test_fraction: share of each class held out for the test, where your own have no test part.
        balance: what makes up for classes of unequal size: weights in the training loss (loss), or nothing. Other
            losses and scores stay as they are.
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

    photographs = False
    image_size = 28
    _colour: ClassVar = False
    _sets: ClassVar = known_sets.DATASETS
    _own_name: ClassVar = "custom"
    _own_forms: ClassVar = " or a NumPy file"
    _validated: ClassVar = ("train", "val")

    def __init__(
        self,
        dataset: Literal["auto", "mnist", "fashion-mnist", "digits", "custom"] = "auto",
        data_dir: str | None = None,
        batch_size: int = 256,
        eval_batch_size: int = 500,
        val_fraction: float = 0.08,
        test_fraction: float = 0.1,
        balance: Literal["none", "loss"] = "none",
        num_classes: int | None = None,
        shift: float = 2.0,
        rotation: float | None = None,
        scale: float | None = None,
        flip: Rare[bool | None] = None,
        seed: int = 1,
        download: Rare[Free[bool]] = True,
        predict_inputs: OneCall[list[str] | None] = None,
    ) -> None:
        super().__init__()
        check_ranges(
            num_classes=(num_classes, COUNT),
            shift=(shift, Range(0, 28)),
            rotation=(rotation, Range(0, 180)),
            scale=(scale, Range(0, 1, below=True)),
        )
        sizes, shares = (batch_size, eval_batch_size), (val_fraction, test_fraction)
        data_dir = self._check(dataset, data_dir, balance, sizes, shares)
        # An open number is no hyper-parameter: Lightning refuses one that differs from the network's.
        self.save_hyperparameters(ignore=["num_classes"] if num_classes is None else [])
        self._num_classes = num_classes
        self._no_download: Exception | None = None

    @override
    def take_samples(self, samples: Any) -> None:
        """Take images and labels in memory.

        Args:
            samples: images and labels; or a dict of such pairs, for "train" and, where they are given, "val" and
                "test". Images are an array, a tensor or a list of shape (n, height, width), (n, height, width,
                channels), (n, channels, height, width) or (n, pixels): whole numbers from 0 to 255, or floats from 0
                to 1. Labels are class numbers from 0, or names, of shape (n,).

        Raises:
            UserError: for other types, shapes and values.

        Example:
            >>> from datamodules import bundled_digits
            >>> data = MNISTDataModule(batch_size=64)
            >>> data.take_samples(bundled_digits())
            >>> data.setup("fit")
            >>> data.num_classes, data.sizes
            (10, {'train': 1475, 'val': 143})
        """
        parts = samples if isinstance(samples, Mapping) else {"train": samples}
        given = {part: pair for part, pair in parts.items() if pair is not None}
        pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given.values())
        if not pairs or "train" not in given or given.keys() - {"train", "val", "test"}:
            raise UserError("expected (images, labels), or a dict of such pairs with the keys train, val and test")
        self._own = images_from_arrays(given, "arrays")
        self.dataset = "custom"
        self.hparams.update({"dataset": "custom"})

    @override
    def _list(self) -> ImageTree:
        return read_own_images(self._folder)

    @property
    @override
    def _is_own(self) -> bool:
        """As "auto" decides where ``data_dir`` is given and holds no MNIST files."""
        if self.dataset != "auto":
            return self.dataset == "custom"
        given = self.hparams.data_dir is not None
        return given and known_sets.find_files("mnist", self._folder) is None and holds_own_images(self._folder)

    @property
    @override
    def num_classes(self) -> int:
        """``num_classes``, or the number of the data set's; your own are listed for it."""
        return self._num_classes or super().num_classes

    @property
    @override
    def class_names(self) -> Sequence[str]:
        """The data set's names; empty where ``num_classes`` is not its number of classes."""
        return self.info.classes if len(self.info.classes) == self.num_classes else ()

    @override
    def prepare_data(self) -> None:
        """Download what is missing. Lightning calls this in one process per node.

        A failure is raised in `setup`, which every process reaches: raised here, the other processes would wait.
        """
        name = "mnist" if self.dataset == "auto" else self.dataset
        predicts = self.trainer is not None and self.trainer.state.fn == "predict"
        if predicts or not self.hparams.download or not self.info.torchvision_name:
            return
        # Only an empty folder is one to download into without being asked by dataset="mnist".
        asked = self.dataset != "auto" or self.hparams.data_dir is None
        try:
            if not known_sets.find_files(name, self._folder) and (
                asked or not known_sets.holds_other_files(self._folder)
            ):
                known_sets.download_files(name, self._folder)
        except (UserError, OSError) as error:
            self._no_download = error

    def _missing(self, name: str) -> str:
        return known_sets.describe_missing(name, self._folder) + (f"; {self._no_download}" if self._no_download else "")

    @override
    def _choices(self) -> dict[str, Any]:
        return {"dataset": self.dataset, **self._augmentation, "num_classes": self.num_classes}

    @property
    def _augmentation(self) -> dict[str, Any]:
        """Rotation, scale and flip, which are the data set's where they are not given."""
        names = ("rotation", "scale", "flip")
        return {name: getattr(self.info, name) if self.hparams[name] is None else self.hparams[name] for name in names}

    @override
    def _decide(self) -> None:
        """The same on every rank: rank 0 decides, since nodes may see different folders."""
        if self.dataset != "auto":
            return
        choices, given = (*known_sets.DATASETS, "none"), self.hparams.data_dir is not None
        # Only the default folder is replaced by other data than it holds.
        chosen = "custom" if self._is_own else "none" if given else "digits"
        chosen = "mnist" if known_sets.find_files("mnist", self._folder) else chosen
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
            warn(
                "warning: %s: using the 1,797 bundled digits; pass data_dir='FOLDER' for MNIST or your own images",
                self._missing("mnist"),
            )
        self.dataset = chosen

    @override
    def _load(self, part: str) -> tuple[Tensor, Tensor]:
        """Read and check a part, and keep it on the device where it fits."""
        if self.dataset == "custom":
            own = self._own_images()
            files, labels = own.parts[part]
            source, images = (f"the {part} images", f"the {part} labels"), read_set(files)
            if blank := (images.flatten(1).amax(1) == 0).nonzero().flatten().tolist():
                row = blank[0]
                first = files[row] if isinstance(files, FileTable) else f"row {row} of {source[0]}{own.source}"
                warn(f"note: {len(blank):,} of {len(images):,} {part} images are blank, such as {first}")
        elif found := known_sets.read_part(self.dataset, part, self._folder):
            images, labels, source = found
        else:
            first = known_sets.FILES["train"][0]
            raise UserError(
                f"{self._missing(self.dataset)}; pass data_dir='FOLDER' with {first}[.gz] and the other three"
                " files, or dataset='digits'"
            )
        known_sets.check_images_and_labels(images, labels, self.num_classes, *source)
        images, labels = images.unsqueeze(1), labels.long()
        if self._device.type != "cuda" or images.nbytes <= torch.cuda.mem_get_info(self._device)[0] // 4:
            images, labels = images.to(self._device), labels.to(self._device)
        return images, labels

    @override
    def _split(self, labels: Tensor) -> dict[str, Tensor]:
        if self._is_own:
            return super()._split(labels)
        count, fraction = len(labels), self.hparams.val_fraction
        train, val = split_indices(count, max(round(count * fraction), 1 if fraction else 0), self.hparams.seed)
        return {"train": train, "val": val}

    def _training_transform(self) -> Transform:
        count = len(self._parts["train"][1])
        augment = RandomAffine(self.hparams.seed, self.hparams.shift, **self._augmentation, count=count)
        normalise = self.preprocessing()

        def transform(images: Tensor, rows: Tensor, epoch: int) -> Tensor:
            # The map fills with zeros, which is the background before normalisation, so it comes first.
            if augment and len(images):
                images = augment(images.float(), rows, epoch)
            normalised: Tensor = normalise(images)
            return normalised

        return transform

    @override
    def train_dataloader(self) -> TrainLoader:
        how = {"transform": self._training_transform(), "device": self._device, **self._training_order()}
        loader = TrainLoader(*self._parts["train"], **how)
        # A loader that is refused is not described.
        self._note_classes()
        augmentation = {"shift": self.hparams.shift, **self._augmentation}
        settings = ", ".join(f"{name}={value}" for name, value in augmentation.items())
        self._note(f"{self.title}: augmented by {settings}")
        return loader

    @override
    def _evaluation_loader(self, part: str, **ranks: Any) -> EvaluationLoader:
        (images, labels), normalise = self._parts[part], self.preprocessing()
        rows = self._rows[part] if part in self._rows else torch.arange(len(labels))
        how = {"transform": lambda images, *_: normalise(images), "device": self._device, **ranks}
        return EvaluationLoader(images, labels, rows, self.hparams.eval_batch_size, **how)

    @override
    def predict_dataloader(self) -> EvaluationLoader:
        """The images of ``predict_inputs`` and their places in `prediction_names`, without blank ones."""
        images = read_digits(self._given.contents)
        self._unreadable, self._unclear = images.unreadable, images.unclear
        if len(images.unreadable) == len(self._given):
            raise UserError(next(iter(images.unreadable.values())))
        self._parts["predict"] = images.pixels.to(self._device), images.numbers.to(self._device)
        return self._evaluation_loader("predict", **self._ranks)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The data set that "auto" stood for, so that a checkpoint is used with the right classes and statistics."""
        own = {"classes": list(self.info.classes)} if self.dataset == "custom" else {}
        return {"dataset": self.dataset, **own}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, self._classes = state_dict["dataset"], tuple(state_dict.get("classes", ()))
        check_choice("dataset", saved, tuple(self._sets))
        if self.hparams.dataset not in ("auto", saved):
            raise UserError(
                f"the checkpoint was trained on {saved}, found dataset={self.dataset!r}; pass dataset={saved!r}"
            )
        if self.dataset not in ("auto", saved):
            # Lightning sets up before it reads the checkpoint, so "auto" was resolved by the files found here.
            self.dataset, self._own, self._sources, self._parts, self._rows = saved, None, {}, {}, {}
            if self.trainer is not None and self.trainer.state.fn is not None:
                self.setup(self.trainer.state.fn)
        self.dataset = saved
        if self._own:
            self._refuse_other_classes(self._classes, shown=20)
