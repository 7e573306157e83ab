"""What the data modules of images share: their parts, balance, statistics, loaders, and images to predict."""

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
from datamodules.images.augmentation import Normalise
from datamodules.images.file_table import FileTable
from datamodules.images.folders import ImageTree, split_by_class
from datamodules.images.given_images import GivenImages, given_images
from datamodules.images.known_sets import ImageSet
from datamodules.notes import inform_if_slow, warn
from datamodules.ranges import COUNT, Range, check_choice, check_ranges


def balanced_class_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Weights with which all classes that have labels weigh the same, float32 of shape (classes,).

    A class with count_c of n labels gets n / (classes with labels * count_c), as scikit-learn's "balanced"; their mean
    over the labels is 1. A class without labels gets 0.

    Args:
        labels: int64 of shape (n,); negative ones do not count.

    Example:
        >>> balanced_class_weights(torch.tensor([0, 0, 0, 2, -100]), num_classes=3)
        tensor([0.6667, 0.0000, 2.0000])
    """
    counts = torch.bincount(labels[labels >= 0], minlength=num_classes).double()
    present = (counts > 0).sum()
    return torch.where(counts > 0, counts.sum() / (present * counts), 0.0).float()


def describe_classes(names: Sequence[str], counts: Sequence[int]) -> str:
    """A line on the classes and how many samples each has, which a run prints before it trains; ten are named."""
    named = [f"{name} ({count:,})" for name, count in zip(names[:10], counts)]
    if len(names) > 10:
        named.append(f"and {len(names) - 10:,} more")
    return f"{len(names):,} classes: {', '.join(named)}"


class ImageDataModule(BaseDataModule):
    """Images and their classes; a subclass says which there are, how they are read, and how they are augmented.

    `_sources` holds the parts of the set as it is published, `_parts` the images and labels that loaders read, and
    `_rows` which of them make "train", "val" and "test": a part that the set does not have is held out of its training
    part.
    """

    _colour: ClassVar[bool]
    """What an array of shape (3, height, width) is: an image in colour, or three in grey."""
    _sets: ClassVar[Mapping[str, ImageSet]]
    _own_name: ClassVar[str]
    """What `dataset` is where the images are your own, and what else than class folders they may be."""
    _own_forms: ClassVar[str]
    _validated: ClassVar[tuple[str, ...]] = ("val",)
    """The parts that "validate" sets up."""

    batch_size: int
    dataset: str

    def __init__(self) -> None:
        super().__init__()
        self._own: ImageTree | None = None
        self._classes: tuple[str, ...] = ()
        self._sources: dict[str, tuple[Any, Tensor]] = {}
        self._parts: dict[str, tuple[Any, Tensor]] = {}
        self._rows: dict[str, Tensor] = {}
        self._names: dict[str, Sequence[str]] = {}
        self._unreadable: Mapping[int, str] = {}
        self._unclear: Mapping[int, str] = {}

    def _check(
        self, dataset: str, data_dir: str | None, balance: str, sizes: tuple[int, int], shares: tuple[float, float]
    ) -> str | None:
        """Check parameters that both data modules have, and give ``data_dir`` as it is saved."""
        check_choice("dataset", dataset, ("auto", *self._sets))
        check_choice("balance", balance, ("none", "loss"))
        share = Range(0, 1, below=True)
        check_ranges(val_fraction=(shares[0], share), test_fraction=(shares[1], share))
        check_ranges(batch_size=(sizes[0], COUNT), eval_batch_size=(sizes[1], COUNT))
        if dataset == "digits" and data_dir is not None:
            raise UserError(f"dataset='digits' comes with this package, so data_dir={data_dir!s} would not be read")
        self.dataset, self.batch_size = dataset, sizes[0]
        # A Path among the hyper-parameters makes a checkpoint unloadable with weights_only=True.
        return str(Path(data_dir).expanduser()) if data_dir is not None else None

    @property
    def info(self) -> ImageSet:
        """Names and statistics of the set; its classes once it has been read. "auto" is MNIST until it is decided."""
        known = self._sets["mnist" if self.dataset == "auto" else self.dataset]
        if self.dataset == self._own_name and self._own is not None:
            return replace(known, title=self._own.title, classes=self._own.classes)
        return replace(known, classes=self._classes) if self._classes else known

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
        return len((self._own_images() if self._is_own and not self._classes else self.info).classes)

    @property
    @override
    def class_names(self) -> Sequence[str]:
        """The names of the classes, once the set has been read."""
        return self.info.classes

    @property
    @override
    def left_out(self) -> Mapping[str, int]:
        """Files and rows of your own that are not used, by reason."""
        return self._own.left_out if self._own else {}

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
    def _folder(self) -> Path:
        return Path(self.hparams.data_dir or "data")

    @property
    def _is_own(self) -> bool:
        """Whether the images are your own."""
        return self.dataset == self._own_name

    @abstractmethod
    def _list(self) -> ImageTree:
        """Your own images in the folder."""

    def _own_images(self) -> ImageTree:
        """Your own images, listed once; remarks on them are logged."""
        if self._own is None:
            if self.hparams.data_dir is None:
                raise UserError(
                    f"dataset={self._own_name!r} needs `data_dir`, a folder with a folder of images for each"
                    f" class{self._own_forms}"
                )
            with inform_if_slow(f"listing the images in {self._folder} ..."):
                tree = self._list()
            for note in tree.notes:
                warn(f"note: {note}")
            self._own = replace(tree, title=tree.title or self._folder.resolve().name)
        return self._own

    @property
    def _published(self) -> Collection[str]:
        """The parts that the set has as it is published; your own images are listed for it."""
        return self._own_images().parts if self._is_own else self.info.parts

    @abstractmethod
    def _load(self, part: str) -> tuple[Any, Tensor]:
        """Images and labels of a part as it is published."""

    def _source(self, part: str) -> tuple[Any, Tensor]:
        if part not in self._sources:
            with inform_if_slow(f"{self.title}: reading the {part} part ..."):
                self._sources[part] = self._load(part)
        return self._sources[part]

    def _split(self, labels: Tensor) -> dict[str, Tensor]:
        """The sample numbers of "train" and of what is held out of it, as it is not published."""
        fractions = {"test": self.hparams.test_fraction, "val": self.hparams.val_fraction}
        fractions = {part: share for part, share in fractions.items() if part not in self._published and share}
        return split_by_class(labels.cpu(), self.info.classes, fractions, self.hparams.seed)

    @abstractmethod
    def _decide(self) -> None:
        """Replace ``dataset="auto"`` by what it stands for, and log where that is not what was looked for."""

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

    def _take(self, part: str, images: Any, labels: Tensor, rows: Tensor) -> None:
        """Set up a part: these rows of what is published."""
        self._parts[part], self._rows[part] = (images, labels), rows

    @override
    def setup(self, stage: str) -> None:
        """Set up the parts that `stage` needs: "fit", "validate", "test" or "predict" (which needs none)."""
        if stage == "predict":
            return
        self._decide()
        for part in {"fit": ("train", "val"), "validate": self._validated, "test": ("test",)}[stage]:
            if part not in self._parts:
                published = part != "train" and part in self._published
                source = part if published else "train"
                images, labels = self._source(source)
                rows, files = torch.arange(len(labels)), self._own_images().parts[source][0] if self._is_own else ()
                self._names[part] = files if isinstance(files, FileTable) else ()
                self._take(part, images, labels, rows if published else self._split(labels).get(part, rows[:0]))

    @property
    def _training_labels(self) -> Tensor | None:
        """The labels of the samples that are trained on, on the CPU; None before `setup`."""
        return self._parts["train"][1].cpu()[self._rows["train"]] if "train" in self._parts else None

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
        return self._evaluation_loader("val", **self._ranks) if len(self._rows["val"]) else []

    @override
    def test_dataloader(self) -> Any:
        """What there is or is held out for testing; nothing where there is neither."""
        return self._evaluation_loader("test", **self._ranks) if len(self._rows["test"]) else []

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
        """Refuse a checkpoint of other classes than those that are here, naming some of them."""
        if tuple(saved) != tuple(self.info.classes):
            theirs, ours = (
                ", ".join(names[:shown]) + f", ... ({len(names)} in all)" * (len(names) > shown)
                for names in (saved, self.info.classes)
            )
            raise UserError(
                f"the checkpoint was trained on the classes {theirs}, found {ours}; pass the `data_dir` that it was"
                " trained on"
            )
