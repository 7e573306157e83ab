"""Base class of the image data modules: data set, split into parts, class weights, and images to predict."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.base import BaseDataModule
from datamodules.errors import UserError, spelled
from datamodules.images.arrays import from_samples
from datamodules.images.given_images import GivenImages, given_images
from datamodules.images.known_sets import ImageSet
from datamodules.images.labels import balanced_class_weights, describe_classes, refuse_other_classes
from datamodules.images.normalise import Normalise
from datamodules.images.source import Samples, Source, split_by_class
from datamodules.loading.file_table import FileTable
from datamodules.notes import inform_if_slow, warn
from datamodules.ranges import COUNT, Range, check_choice, check_ranges


class ImageDataModule(BaseDataModule):
    """Data module of the images of a `Source`. Subclasses augment the images and build the loaders.

    If the source has no validation or test part, it is held out of the training part.

    After `setup`, ``_parts`` holds the images and labels that the loaders of a part read, and ``_rows`` the numbers of
    the part's samples among them.
    """

    _colour: ClassVar[bool]
    """Whether an array of shape (3, height, width) is one image in colour, or three in grey."""
    _sets: ClassVar[Mapping[str, ImageSet]]
    _own: ClassVar[str]
    """Value of `dataset` for the user's images."""
    _own_forms: ClassVar[str]
    """Other supported forms of the user's images than class folders, for an error message."""
    _validated: ClassVar[tuple[str, ...]] = ("val",)
    """Parts that the stage "validate" sets up."""

    batch_size: int
    dataset: str

    def __init__(self) -> None:
        super().__init__()
        self._source: Source | None = None
        # Data set, classes and statistics of a checkpoint. Prediction needs them without the data.
        self._restored: dict[str, Any] = {}
        self._parts: dict[str, tuple[Any, Tensor]] = {}
        self._rows: dict[str, Tensor] = {}
        self._names: dict[str, Sequence[str]] = {}
        self._unreadable: Mapping[int, str] = {}
        self._unclear: Mapping[int, str] = {}

    def _check(
        self, dataset: str, data_dir: str | None, balance: str, sizes: tuple[int, int], shares: tuple[float, float]
    ) -> str | None:
        """Check the parameters that all image data modules share, and return ``data_dir`` as a string."""
        check_choice("dataset", dataset, ("auto", *self._sets))
        check_choice("balance", balance, ("none", "loss"))
        share = Range(0, 1, below=True)
        check_ranges(val_fraction=(shares[0], share), test_fraction=(shares[1], share))
        if sum(shares) >= 1:
            raise UserError(
                f"{spelled('val_fraction')} and {spelled('test_fraction')} leave nothing to train on; pass 0.1 for each"
            )
        check_ranges(batch_size=(sizes[0], COUNT), eval_batch_size=(sizes[1], COUNT))
        if dataset == "digits" and data_dir is not None:
            raise UserError(
                f"{spelled('dataset', dataset)} comes with this package, so {spelled('data_dir', str(data_dir))} would"
                " not be read"
            )
        self.dataset = dataset
        # An attribute besides the hyper-parameter, since Lightning's batch size finder sets it.
        self.batch_size = sizes[0]
        if data_dir is None:
            return None
        # A Path among the hyper-parameters makes a checkpoint unloadable with weights_only=True.
        return str(Path(data_dir).expanduser())

    @abstractmethod
    def _find_source(self) -> Source:
        """Return the data set of the parameters ``dataset`` and ``data_dir``."""

    @abstractmethod
    def _decide(self) -> None:
        """Replace ``dataset="auto"`` by a data set, and log if it is a fallback."""

    @property
    def source(self) -> Source:
        """The data set. The first access lists the user's images and logs remarks on them."""
        if self._source is None:
            if self._is_own and self.hparams.data_dir is None:
                raise UserError(
                    f"{spelled('dataset', self._own)} needs {spelled('data_dir')}, a folder with a folder of images for"
                    f" each class{self._own_forms}"
                )
            with inform_if_slow(f"listing the images in {self._folder} ..."):
                self._source = self._find_source()
            for note in self._source.notes:
                warn(f"note: {note}")
        return self._source

    @override
    def take_samples(self, samples: Any) -> None:
        """Use a `Source`, or images and labels in memory.

        Args:
            samples: a `Source`; (images, labels); or a dict of such pairs for "train" and optionally "val" and "test".
                Images are an array, a tensor or a list of shape (n, height, width), (n, height, width, channels),
                or (n, channels, height, width): integers from 0 to 255, or floats from 0 to 1. Labels are class numbers
                from 0, or names, of shape (n,).

        Raises:
            UserError: types, shapes or values are not supported.
        """
        self._source = samples if isinstance(samples, Source) else from_samples(samples)
        self.dataset = self._own
        self.hparams.update({"dataset": self._own})

    @property
    def _folder(self) -> Path:
        return Path(self.hparams.data_dir or "data")

    @property
    def _is_own(self) -> bool:
        """Whether the data set is the user's images."""
        return self.dataset == self._own

    @property
    def info(self) -> ImageSet:
        """Name, statistics and, once known, classes of the data set. "auto" counts as MNIST until it is decided."""
        known = self._sets["mnist" if self.dataset == "auto" else self.dataset]
        if self.dataset == self._own and self._source is not None:
            return replace(known, title=self._source.title, classes=self._source.classes)
        classes = tuple(self._restored.get("classes", ()))
        return replace(known, classes=classes or known.classes)

    @property
    def pixel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, of pixels from 0 to 1, for the normalisation."""
        return self.info.mean, self.info.std

    @property
    @override
    def title(self) -> str:
        return self.info.title

    @property
    @override
    def num_classes(self) -> int:
        """Number of classes. For the user's images, this lists them."""
        if self._is_own and not self._restored.get("classes"):
            return len(self.source.classes)
        return len(self.info.classes)

    @property
    @override
    def photographs(self) -> bool:
        return self.dataset != "digits"

    @property
    @override
    def class_names(self) -> Sequence[str]:
        """Names of the classes. Empty until the data set has been read."""
        return self.info.classes

    @property
    @override
    def left_out(self) -> Mapping[str, int]:
        """Number of the user's files and rows that are not used, by reason."""
        return self._source.left_out if self._source is not None else {}

    @property
    @override
    def sizes(self) -> dict[str, int]:
        return {part: len(rows) for part, rows in self._rows.items()}

    @override
    def sample_names(self, part: str) -> Sequence[str]:
        """Return the files of a part that has been set up. Empty for data sets that are not files of one image each."""
        return self._names.get(part, ())

    @property
    @override
    def validates(self) -> bool:
        """Whether there is a validation part. For the user's images, this lists them."""
        return bool(self.hparams.val_fraction) or "val" in self._published

    @property
    def _published(self) -> Collection[str]:
        """Parts that the data set itself has. For the user's images, this lists them."""
        return self.source.parts if self._is_own else self.info.parts

    @abstractmethod
    def _choices(self) -> dict[str, Any]:
        """Return the values of all parameters that may be None or "auto"."""

    @override
    def resolve(self) -> dict[str, Any]:
        """Return values for the parameters that are None or "auto". This may download data and read some images.

        Raises:
            UserError: ``data_dir`` was given and holds no data to train on.
        """
        if self.dataset == "auto":
            self.prepare_data()
        self._decide()
        return {name: value for name, value in self._choices().items() if self.hparams.get(name) in (None, "auto")}

    def _split(self, labels: Tensor) -> dict[str, Tensor]:
        """Split the training part and return the sample numbers of "train" and of each held-out part."""
        fractions = {}
        # The test part is held out first, so that another `val_fraction` does not change it.
        for part in ("test", "val"):
            share = self.hparams[f"{part}_fraction"]
            if share and part not in self._published:
                fractions[part] = share
        return split_by_class(labels.cpu(), self.info.classes, fractions, self.hparams.seed)

    @abstractmethod
    def _take(self, part: str, published: str, samples: Samples, rows: Tensor | None) -> None:
        """Set up a part: all samples of a published part, or the samples `rows` of the training part."""

    @override
    def setup(self, stage: str) -> None:
        """Set up the parts for a stage: "fit", "validate" or "test". "predict" needs no part."""
        if stage == "predict":
            return
        self._decide()
        for part in {"fit": ("train", "val"), "validate": self._validated, "test": ("test",)}[stage]:
            if part in self._parts:
                continue
            published = part if part in self._published else "train"
            with inform_if_slow(f"{self.title}: reading the {published} part ..."):
                samples = self.source.parts[published]
            rows = None
            if part == "train" or published != part:
                rows = self._split(samples.labels).get(part, torch.arange(0))
            if isinstance(samples.images, FileTable):
                self._names[part] = samples.images
            self._take(part, published, samples, rows)

    @property
    def _training_labels(self) -> Tensor | None:
        """Labels of the training samples, on the CPU, or None before `setup`."""
        if "train" not in self._parts:
            return None
        return self._parts["train"][1].cpu()[self._rows["train"]]

    @property
    @override
    def class_weights(self) -> Tensor | None:
        """Class weights of ``balance="loss"``, from the training samples. None otherwise, and before `setup`."""
        labels = self._training_labels
        if self.hparams.balance != "loss" or labels is None:
            return None
        return balanced_class_weights(labels, self.num_classes)

    def _note_classes(self) -> None:
        """Log the classes and their numbers of training samples."""
        labels = self._training_labels
        assert labels is not None
        names = self.class_names or [str(number) for number in range(self.num_classes)]
        counts = labels.bincount(minlength=len(names)).tolist()
        self._note(f"{self.title}: training on {describe_classes(names, counts)}")

    @override
    def preprocessing(self) -> Normalise:
        """Return the normalisation of uint8 images of shape (batch, channels, height, width) to float32."""
        return Normalise(*self.pixel_statistics)

    def _training_order(self) -> dict[str, Any]:
        """Return the arguments of the training loader that determine its order."""
        return {
            "rows": self._rows["train"],
            "batch_size": self.batch_size,
            "seed": self.hparams.seed,
            "shuffle": self._shuffles,
            **self._ranks,
        }

    @property
    def _ranks(self) -> dict[str, Any]:
        return {"rank": self._rank, "world_size": self._world_size}

    @abstractmethod
    def _evaluation_loader(self, part: str, **ranks: Any) -> Any:
        """Return a loader of each sample of a part once."""

    @override
    def val_dataloader(self) -> Any:
        """Return the loader of the validation part, or an empty list if there is none."""
        # An empty list makes Lightning skip validation. A loader without samples would not.
        if not len(self._rows["val"]):
            return []
        return self._evaluation_loader("val", **self._ranks)

    @override
    def test_dataloader(self) -> Any:
        """Return the loader of the test part, or an empty list if there is none."""
        if not len(self._rows["test"]):
            return []
        return self._evaluation_loader("test", **self._ranks)

    @override
    def take_inputs(self, inputs: Any) -> None:
        """Set the images to predict, in the forms of `given_images`."""
        self._given = given_images(inputs, colour=self._colour)

    @cached_property
    def _given(self) -> GivenImages:
        return given_images(self.hparams.predict_inputs or [], colour=self._colour)

    @property
    @override
    def prediction_names(self) -> list[str]:
        """File or index of each image to predict. Batches of `predict_dataloader` contain their numbers."""
        return self._given.names

    @property
    @override
    def unreadable_inputs(self) -> Mapping[int, str]:
        return self._unreadable

    @property
    @override
    def unclear_inputs(self) -> Mapping[int, str]:
        return self._unclear

    def _refuse_other_classes(self, saved: Sequence[str], shown: int) -> None:
        """Raise an error if a checkpoint has other classes than the data set."""
        refuse_other_classes(saved, self.info.classes, shown)
