"""What the data modules of images share: a source, its split into parts, balance, and images to predict."""

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
from datamodules.errors import UserError
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
    """Images of a `Source` and their classes; a subclass says how they are augmented, and makes the loaders.

    A part that the source does not have is held out of its training part.

    After `setup`, ``_parts`` holds what the loaders of a part read, images and labels, and ``_rows`` which of these
    samples are of the part.
    """

    _colour: ClassVar[bool]
    """What an array of shape (3, height, width) is: an image in colour, or three in grey."""
    _sets: ClassVar[Mapping[str, ImageSet]]
    _own: ClassVar[str]
    """What `dataset` is where the images are your own, and what else than class folders they may be."""
    _own_forms: ClassVar[str]
    _validated: ClassVar[tuple[str, ...]] = ("val",)
    """The parts that "validate" sets up."""

    batch_size: int
    dataset: str

    def __init__(self) -> None:
        super().__init__()
        self._source: Source | None = None
        # What a checkpoint says of its data, where it is used without them.
        self._restored: dict[str, Any] = {}
        self._parts: dict[str, tuple[Any, Tensor]] = {}
        self._rows: dict[str, Tensor] = {}
        self._names: dict[str, Sequence[str]] = {}
        self._unreadable: Mapping[int, str] = {}
        self._unclear: Mapping[int, str] = {}

    def _check(
        self, dataset: str, data_dir: str | None, balance: str, sizes: tuple[int, int], shares: tuple[float, float]
    ) -> str | None:
        """Check parameters that all data modules of images have, and give ``data_dir`` as it is saved."""
        check_choice("dataset", dataset, ("auto", *self._sets))
        check_choice("balance", balance, ("none", "loss"))
        share = Range(0, 1, below=True)
        check_ranges(val_fraction=(shares[0], share), test_fraction=(shares[1], share))
        if sum(shares) >= 1:
            raise UserError("`val_fraction` and `test_fraction` leave nothing to train on; pass 0.1 for each")
        check_ranges(batch_size=(sizes[0], COUNT), eval_batch_size=(sizes[1], COUNT))
        if dataset == "digits" and data_dir is not None:
            raise UserError(f"dataset='digits' comes with this package, so data_dir={data_dir!s} would not be read")
        self.dataset = dataset
        # An attribute, since tuners of batch sizes set it.
        self.batch_size = sizes[0]
        if data_dir is None:
            return None
        # A Path among the hyper-parameters makes a checkpoint unloadable with weights_only=True.
        return str(Path(data_dir).expanduser())

    @abstractmethod
    def _find_source(self) -> Source:
        """The data set that ``dataset`` and ``data_dir`` say."""

    @abstractmethod
    def _decide(self) -> None:
        """Replace ``dataset="auto"`` by what it stands for, and log where that is not what was looked for."""

    @property
    def source(self) -> Source:
        """The data set; your own images are listed when it is first asked for, and remarks on them are logged."""
        if self._source is None:
            if self._is_own and self.hparams.data_dir is None:
                raise UserError(
                    f"dataset={self._own!r} needs `data_dir`, a folder with a folder of images for each"
                    f" class{self._own_forms}"
                )
            with inform_if_slow(f"listing the images in {self._folder} ..."):
                self._source = self._find_source()
            for note in self._source.notes:
                warn(f"note: {note}")
        return self._source

    @override
    def take_samples(self, samples: Any) -> None:
        """Take a `Source`, or images and labels in memory.

        Args:
            samples: a `Source`; or images and labels; or a dict of such pairs, for "train" and, where they are given,
                "val" and "test". Images are an array, a tensor or a list of shape (n, height, width), (n, height,
                width, channels), (n, channels, height, width) or (n, pixels): whole numbers from 0 to 255, or floats
                from 0 to 1. Labels are class numbers from 0, or names, of shape (n,).

        Raises:
            UserError: for other types, shapes and values.
        """
        self._source = samples if isinstance(samples, Source) else from_samples(samples)
        self.dataset = self._own
        self.hparams.update({"dataset": self._own})

    @property
    def _folder(self) -> Path:
        return Path(self.hparams.data_dir or "data")

    @property
    def _is_own(self) -> bool:
        """Whether the images are your own."""
        return self.dataset == self._own

    @property
    def info(self) -> ImageSet:
        """Names and statistics of the set; its classes once it has been read. "auto" is MNIST until it is decided."""
        known = self._sets["mnist" if self.dataset == "auto" else self.dataset]
        if self.dataset == self._own and self._source is not None:
            return replace(known, title=self._source.title, classes=self._source.classes)
        classes = tuple(self._restored.get("classes", ()))
        return replace(known, classes=classes or known.classes)

    @property
    def pixel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean and the standard deviation of each channel that images are normalised with."""
        return self.info.mean, self.info.std

    @property
    @override
    def title(self) -> str:
        return self.info.title

    @property
    @override
    def num_classes(self) -> int:
        """The number of classes; your own images are listed for it."""
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
        """The names of the classes, once the set has been read."""
        return self.info.classes

    @property
    @override
    def left_out(self) -> Mapping[str, int]:
        """Files and rows of your own that are not used, by reason."""
        return self._source.left_out if self._source is not None else {}

    @property
    @override
    def sizes(self) -> dict[str, int]:
        return {part: len(rows) for part, rows in self._rows.items()}

    @override
    def sample_names(self, part: str) -> Sequence[str]:
        """The files of a part that has been set up; empty for sets in larger files."""
        return self._names.get(part, ())

    @property
    @override
    def validates(self) -> bool:
        """Whether there is a part to validate on; your own images are listed for it."""
        return bool(self.hparams.val_fraction) or "val" in self._published

    @property
    def _published(self) -> Collection[str]:
        """The parts that the set has as it is published; your own images are listed for it."""
        return self.source.parts if self._is_own else self.info.parts

    @abstractmethod
    def _choices(self) -> dict[str, Any]:
        """Parameters that may be left open, and what stands for them here."""

    @override
    def resolve(self) -> dict[str, Any]:
        """Parameters that are open, by the data; what is missing is downloaded, and of a folder some files are read.

        Raises:
            UserError: ``data_dir`` was given and holds nothing to train on.
        """
        if self.dataset == "auto":
            self.prepare_data()
        self._decide()
        return {name: value for name, value in self._choices().items() if self.hparams.get(name) in (None, "auto")}

    def _split(self, labels: Tensor) -> dict[str, Tensor]:
        """The sample numbers of "train" and of what is held out of it, as it is not published."""
        fractions = {}
        # The test is held out first: another share to validate on leaves it as it is.
        for part in ("test", "val"):
            share = self.hparams[f"{part}_fraction"]
            if share and part not in self._published:
                fractions[part] = share
        return split_by_class(labels.cpu(), self.info.classes, fractions, self.hparams.seed)

    @abstractmethod
    def _take(self, part: str, published: str, samples: Samples, rows: Tensor | None) -> None:
        """Set up a part: all samples of a published one, or those of the training part with these numbers."""

    @override
    def setup(self, stage: str) -> None:
        """Set up the parts that `stage` needs: "fit", "validate", "test" or "predict" (which needs none)."""
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
        """The labels of the samples that are trained on, on the CPU; None before `setup`."""
        if "train" not in self._parts:
            return None
        return self._parts["train"][1].cpu()[self._rows["train"]]

    @property
    @override
    def class_weights(self) -> Tensor | None:
        """Those of ``balance="loss"``, by the samples that are trained on; None otherwise, and before `setup`."""
        labels = self._training_labels
        if self.hparams.balance != "loss" or labels is None:
            return None
        return balanced_class_weights(labels, self.num_classes)

    def _note_classes(self) -> None:
        """Log the classes that are trained on."""
        labels = self._training_labels
        assert labels is not None
        names = self.class_names or [str(number) for number in range(self.num_classes)]
        counts = labels.bincount(minlength=len(names)).tolist()
        self._note(f"{self.title}: training on {describe_classes(names, counts)}")

    @override
    def preprocessing(self) -> Normalise:
        """Maps uint8 of shape (batch, channels, height, width) to floats of about mean 0 and standard deviation 1."""
        return Normalise(*self.pixel_statistics)

    def _training_order(self) -> dict[str, Any]:
        """What the training loader needs to know of the order, besides the samples."""
        how = {"seed": self.hparams.seed, "shuffle": self._shuffles}
        return {"rows": self._rows["train"], "batch_size": self.batch_size, **self._ranks, **how}

    @property
    def _ranks(self) -> dict[str, Any]:
        return {"rank": self._rank, "world_size": self._world_size}

    @abstractmethod
    def _evaluation_loader(self, part: str, **ranks: Any) -> Any:
        """Each sample of a part once."""

    @override
    def val_dataloader(self) -> Any:
        """What there is or is held out for validation; nothing where there is neither."""
        # Lightning validates nothing where there is no loader.
        if not len(self._rows["val"]):
            return []
        return self._evaluation_loader("val", **self._ranks)

    @override
    def test_dataloader(self) -> Any:
        """What there is or is held out for testing; nothing where there is neither."""
        if not len(self._rows["test"]):
            return []
        return self._evaluation_loader("test", **self._ranks)

    @override
    def take_inputs(self, inputs: Any) -> None:
        """Images to predict, as `given_images` takes them."""
        self._given = given_images(inputs, colour=self._colour)

    @cached_property
    def _given(self) -> GivenImages:
        return given_images(self.hparams.predict_inputs or [], colour=self._colour)

    @property
    @override
    def prediction_names(self) -> list[str]:
        """The files, or the places of images from Python; batches of `predict_dataloader` hold their numbers."""
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
        """Refuse a checkpoint of other classes than those that are here."""
        refuse_other_classes(saved, self.info.classes, shown)
