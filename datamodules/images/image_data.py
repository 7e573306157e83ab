"""Data module of images: a data set, its split into parts, and a pipeline from images to batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.base import BaseDataModule, Process
from datamodules.contract import Transient
from datamodules.errors import UserError, spelled
from datamodules.images.arrays import InputImages, collect_images
from datamodules.images.augmentation import Normalize
from datamodules.images.builtin_datasets import ImageSet
from datamodules.images.labels import balanced_class_weights, check_labels, describe_classes
from datamodules.images.layouts import DataSet
from datamodules.images.source import Source, held_out
from datamodules.notes import inform, inform_if_slow
from datamodules.ranges import COUNT, Range, check_choice, check_ranges

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, for pixels from 0 to 1."""


@dataclass
class Part:
    """Part of a data set that a pipeline has opened.

    Attributes:
        images: tensor or files that the loaders read.
        labels: labels of all images, int64 of shape (n,).
        rows: sample numbers of the part, int64 of shape (m,). Random numbers are a function of these numbers.
        names: file of each image; empty if the images are not files.
    """

    images: Any
    labels: Tensor
    rows: Tensor
    names: Sequence[str] = ()


class Order(NamedTuple):
    """Arguments that determine the order of the training samples, besides the epoch."""

    batch_size: int
    seed: int
    shuffle: bool
    weights: Tensor | None = None
    """Relative probabilities of the samples, of shape (m,), for sampling with replacement; None visits each once."""


class Pipeline(ABC):
    """Interface of a pipeline from images to batches: reading, augmentation and normalization.

    Args:
        settings: arguments of the constructor, which become hyperparameters of the data module.
    """

    sets: ClassVar[Mapping[str, ImageSet]]
    """Facts about each data set in the form of this pipeline, by name."""
    own: ClassVar[str]
    """Name of the user's images in `sets`."""

    def __init__(self, **settings: Any) -> None:
        self.settings: dict[str, Any] = settings
        """Settings; in a data module its hyperparameters, some of which are set after the constructor."""
        self.data_set = DataSet(self.sets, self.own, self.own)
        self.note: Callable[[str], None] = inform
        """Function that logs a text once."""
        self.unreadable: Mapping[int, UserError] = {}
        """Errors of unreadable images to predict, by index."""
        self.unclear: Mapping[int, str] = {}
        """Remarks on doubtful images to predict, by index."""

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Side of the network's inputs, in pixels. Reads the sizes of some images if it is not set."""

    @property
    @abstractmethod
    def statistics(self) -> Statistics:
        """Statistics of the normalization."""

    @abstractmethod
    def resolve(self) -> dict[str, Any]:
        """Return the values of all settings that may be None or "auto"."""

    @abstractmethod
    def open(self, part: str, published: str, rows: Tensor | None, process: Process) -> Part:
        """Return a part: the samples of a published part, or those at `rows`, int64 of shape (m,)."""

    @abstractmethod
    def train(self, part: Part, order: Order, process: Process) -> Any:
        """Return a loader of augmented batches on the device of the process."""

    @abstractmethod
    def evaluate(self, part: Part, batch_size: int, process: Process) -> Any:
        """Return a loader that yields each sample of a part once, without augmentation."""

    @abstractmethod
    def predict(self, images: InputImages, batch_size: int, process: Process) -> Any:
        """Return a loader of images to predict and their indices, without unreadable images."""

    @property
    @abstractmethod
    def state(self) -> dict[str, Any]:
        """State for a checkpoint, so that prediction needs no data set."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""

    def close(self) -> None:  # noqa: B027 - only some have worker processes
        """Shut worker processes down."""


class ImageDataModule(BaseDataModule):
    """Data module of a source of images and a pipeline, exact on any number of devices.

    Parts that the source lacks are held out of its training part, by the seed.

    Args:
        source: the data set.
        pipeline: `TensorPipeline` for small gray images in memory, or `FilePipeline` for images in color.
        batch_size: samples on one device in one forward pass.
        eval_batch_size: samples in one forward pass of validation, test and prediction.
        val_fraction: share of each class held out for validation, if the source has no validation part.
        test_fraction: share of each class held out for testing, if the source has no test part.
        balance: compensation for classes of unequal size: weights in the training loss ("loss"), sampling with
            replacement of each class equally often ("sampler"), or "none".
        num_classes: number of classes, by default the data's.
        seed: seed of the split, the shuffling and the augmentation.
        predict_inputs: images, and folders of images, that `predict` reads.

    Example:
        >>> from datamodules import FilePipeline, bundled_digits, from_arrays
        >>> images, labels = bundled_digits()
        >>> data = ImageDataModule(from_arrays({"train": (images, labels)}), FilePipeline(image_size=8, augment="none"))
        >>> data.setup("fit")
        >>> next(iter(data.train_dataloader()))[0].shape
        torch.Size([32, 3, 8, 8])
    """

    def __init__(
        self,
        source: Source | DataSet,
        pipeline: Pipeline,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        balance: str = "none",
        num_classes: int | None = None,
        seed: int = 1,
        predict_inputs: Transient[Sequence[str] | None] = None,
    ) -> None:
        super().__init__()
        check_choice("balance", balance, ("none", "loss", "sampler"))
        share = Range(0, 1, below=True)
        check_ranges(
            val_fraction=(val_fraction, share),
            test_fraction=(test_fraction, share),
            batch_size=(batch_size, COUNT),
            eval_batch_size=(eval_batch_size, COUNT),
            num_classes=(num_classes, COUNT),
        )
        if val_fraction + test_fraction >= 1:
            raise UserError(
                f"{spelled('val_fraction')} and {spelled('test_fraction')} leave nothing to train on; pass 0.1 for each"
            )
        self.save_hyperparameters(
            *("batch_size", "eval_batch_size", "val_fraction", "test_fraction", "balance", "seed", "predict_inputs")
        )
        # Also an attribute, because Lightning's batch size finder sets it.
        self.batch_size = batch_size
        self.pipeline = pipeline
        if isinstance(source, Source):
            source = DataSet(pipeline.sets, pipeline.own, pipeline.own, source)
        self.data_set = source
        source.declared_num_classes = num_classes
        self._parts: dict[str, Part] = {}
        # One mapping: the pipeline and the data set also see hyperparameters that are set later.
        self.hparams.update(pipeline.settings)
        pipeline.settings = source.settings = self.hparams
        pipeline.data_set = source
        pipeline.note = self._note

    @property
    def dataset(self) -> str:
        """Name of the data set."""
        return self.data_set.name

    @property
    def source(self) -> Source:
        """Source of the data set. The first access lists the user's images, and logs notes about them."""
        return self.data_set.source

    @property
    def info(self) -> ImageSet:
        """Name, statistics and, once known, classes of the data set."""
        return self.data_set.info

    @override
    def set_samples(self, samples: Any) -> None:
        """Set a `Source`, or images and labels in memory.

        Args:
            samples: a `Source`; (images, labels); or a dict of such pairs for "train" and optionally "val" and "test".
                Images are an array, a tensor or a list of shape (n, height, width), (n, height, width, channels),
                or (n, channels, height, width): integers from 0 to 255, or floats from 0 to 1. Labels are class numbers
                from 0, or names, of shape (n,).

        Raises:
            UserError: types, shapes or values are not supported.
        """
        self.data_set.set_source(samples)
        self.hparams.update({"dataset": self.dataset})

    @property
    @override
    def title(self) -> str:
        return self.info.title

    @property
    @override
    def num_classes(self) -> int:
        """Number of classes: the declared number, else the data's. Lists the user's images."""
        return self.data_set.num_classes

    @property
    @override
    def class_names(self) -> Sequence[str]:
        return self.data_set.class_names

    @property
    @override
    def natural_images(self) -> bool:
        return self.info.natural_images

    @property
    @override
    def image_size(self) -> int:
        """Side of the network's inputs, in pixels. Reads the sizes of some images if it is not set."""
        return self.pipeline.image_size

    @property
    @override
    def left_out(self) -> Mapping[str, int]:
        """Number of unused files and rows of the user, by reason."""
        return self.source.left_out if self.data_set.is_read else {}

    @property
    @override
    def sizes(self) -> dict[str, int]:
        """Number of samples in each part that has been set up and is not empty: "train", "val", "test"."""
        return {name: len(part.rows) for name, part in self._parts.items() if len(part.rows)}

    @override
    def sample_names(self, part: str) -> Sequence[str]:
        """Return the files of a part that has been set up. Empty if the images are not files."""
        return self._parts[part].names if part in self._parts else ()

    @property
    @override
    def validates(self) -> bool:
        """Whether there is a validation part. Lists the user's images."""
        return bool(self.hparams.val_fraction) or "val" in self.data_set.parts

    @property
    @override
    def class_weights(self) -> Tensor | None:
        """Class weights for ``balance="loss"``, from the training samples; None otherwise, and before `setup`."""
        if self.hparams.balance != "loss" or "train" not in self._parts:
            return None
        return balanced_class_weights(self._training_labels, self.num_classes)

    @property
    def _sample_weights(self) -> Tensor | None:
        """Sampling weights for ``balance="sampler"``, of shape (m,); None otherwise."""
        if self.hparams.balance != "sampler":
            return None
        labels = self._training_labels
        return balanced_class_weights(labels, self.num_classes)[labels]

    @property
    def _training_labels(self) -> Tensor:
        """Labels of the training samples, on the CPU."""
        part = self._parts["train"]
        return part.labels.cpu()[part.rows]

    @override
    def preprocessing(self) -> Normalize:
        """Return the normalization of uint8 images of shape (batch, channels, height, width) to float32."""
        return Normalize(*self.pipeline.statistics)

    def _from_rank_zero(self, number: int) -> int:
        """Broadcast a number from rank 0 to all ranks of the Trainer."""
        if self.trainer is None:
            return number
        # The other ranks contribute 0, so the sum is the number of rank 0.
        contribution = torch.tensor(number if self.trainer.is_global_zero else 0, device=self._process.device)
        return int(self.trainer.strategy.reduce(contribution, reduce_op="sum"))

    @override
    def resolve(self) -> dict[str, Any]:
        """Return values for the parameters that are None or "auto". May download data, and reads some images.

        Raises:
            UserError: ``data_dir`` was given and holds no data to train on.
        """
        if self.dataset == "auto":
            self.prepare_data()
        self.data_set.decide(self._note, self._from_rank_zero)
        values = {"dataset": self.dataset, **self.pipeline.resolve()}
        return {name: value for name, value in values.items() if self.hparams.get(name, 0) in (None, "auto")}

    @override
    def prepare_data(self) -> None:
        """Download missing files. Lightning calls this in one process per node."""
        if self.trainer is None or self.trainer.state.fn != "predict":
            self.data_set.prepare()

    @override
    def setup(self, stage: str) -> None:
        """Set up the parts of a stage: "fit", "validate" or "test". "predict" needs no part."""
        if stage == "predict":
            return
        self.data_set.decide(self._note, self._from_rank_zero)
        for part in {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}[stage]:
            if part not in self._parts:
                self._parts[part] = self._opened(part)
        if stage == "fit":
            names = self.class_names or [str(number) for number in range(self.num_classes)]
            counts = self._training_labels.bincount(minlength=len(names)).tolist()
            self._note(f"{self.title}: training on {describe_classes(names, counts)}")
            if self.hparams.balance == "sampler":
                draws = f"an epoch draws {sum(counts):,} images with replacement, each class equally often"
                self._note(f"{self.title}: {draws}")
            absent = [name for name, count in zip(names, counts) if not count]
            if absent:
                more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
                shown = ", ".join(absent[:5])
                self._note(f"warning: {self.title}: {len(absent)} classes have no image to train on: {shown}{more}")

    def _opened(self, part: str) -> Part:
        """Open a part of the data set, or the samples held out for it."""
        published = part if part in self.data_set.parts else "train"
        with inform_if_slow(f"{self.title}: reading the {published} part ..."):
            labels = self.source.parts[published].labels
        check_labels(labels, self.num_classes, self.source.labels_from.get(published, f"the {published} labels"))
        rows = None
        if part == "train" or published != part:
            # Test first, so that `val_fraction` does not change the test part.
            missing = [name for name in ("test", "val") if name not in self.data_set.parts]
            fractions = {name: self.hparams[f"{name}_fraction"] for name in missing}
            split = held_out(labels, self.info.classes, fractions, self.hparams.seed, self.info.splits_by_class)
            rows = split.get(part, torch.arange(0))
        return self.pipeline.open(part, published, rows, self._process)

    @override
    def train_dataloader(self) -> Any:
        order = Order(self.batch_size, self.hparams.seed, self._shuffles, self._sample_weights)
        return self.pipeline.train(self._parts["train"], order, self._process)

    def _evaluation_loader(self, part: str) -> Any:
        """Return the loader of a part; an empty list if it has no samples, so that Lightning skips the evaluation."""
        if not len(self._parts[part].rows):
            return []
        return self.pipeline.evaluate(self._parts[part], self.hparams.eval_batch_size, self._process)

    @override
    def val_dataloader(self) -> Any:
        """Return the loader of the validation part, or an empty list if there is none."""
        return self._evaluation_loader("val")

    @override
    def test_dataloader(self) -> Any:
        """Return the loader of the test part, or an empty list if there is none."""
        return self._evaluation_loader("test")

    @override
    def predict_dataloader(self) -> Any:
        """Return a loader of ``predict_inputs`` and their indices in `prediction_names`."""
        return self.pipeline.predict(self._given, self.hparams.eval_batch_size, self._process)

    @override
    def set_inputs(self, inputs: Any) -> None:
        """Set the images to predict, in the forms of `collect_images`."""
        self._given = collect_images(inputs, color=len(self.info.mean) == 3)

    @cached_property
    def _given(self) -> InputImages:
        return collect_images(self.hparams.predict_inputs or [], color=len(self.info.mean) == 3)

    @property
    @override
    def prediction_names(self) -> list[str]:
        """File or index of each image to predict. Batches of `predict_dataloader` contain the indices."""
        return self._given.names

    @property
    @override
    def unreadable_inputs(self) -> Mapping[int, UserError]:
        return self.pipeline.unreadable

    @property
    @override
    def unclear_inputs(self) -> Mapping[int, str]:
        return self.pipeline.unclear

    @override
    def teardown(self, stage: str) -> None:
        """Shut worker processes down."""
        self.pipeline.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Shut worker processes down after an error or Ctrl-C."""
        self.pipeline.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the data set, its classes and the state of the pipeline."""
        classes = {"classes": list(self.info.classes)} if self.data_set.is_own else {}
        return {"dataset": self.dataset, **classes, **self.pipeline.state}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        changed = self.data_set.restore(state_dict)
        self.pipeline.restore(state_dict)
        if changed:
            # Lightning calls `setup` before it reads the checkpoint, so the files here have resolved "auto".
            self._parts.clear()
            if self.trainer is not None and self.trainer.state.fn is not None:
                self.setup(self.trainer.state.fn)
