"""Data module of images in class folders or tables, or of the bundled digits, for fine-tuning."""

import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.contract import Free, OneCall, Rare
from datamodules.errors import UserError, spelled
from datamodules.images import reading
from datamodules.images.augmentation import AUGMENTATIONS, BatchAugmentation, Mixing, describe_augmentation
from datamodules.images.crop import Crop
from datamodules.images.decoding import is_small
from datamodules.images.finding import find_images
from datamodules.images.image_data import ImageDataModule
from datamodules.images.known_sets import IMAGE_SETS, IMAGENET_MEAN, digits_source
from datamodules.images.normalise import Normalise, check_statistics, normaliser
from datamodules.images.reading import BatchReader
from datamodules.images.source import Images, Samples, Source
from datamodules.loading.file_table import FileTable
from datamodules.loading.worker_loaders import WorkerEvaluationLoader, WorkerTrainLoader
from datamodules.notes import warn
from datamodules.ranges import NOT_NEGATIVE, Range, check_choice, check_ranges


class ImageFolderDataModule(ImageDataModule):
    """Images in class folders or lists, or the bundled digits, exact on any number of devices and workers.

    Training batches are ``(images, labels)``: float32 of shape (batch, 3, size, size), normalised on the device, and
    int64 of shape (batch,); with MixUp or CutMix soft labels, float32 of shape (batch, classes). A folder holds
    train/CLASS/, val/CLASS/ and perhaps test/CLASS/, or just CLASS/ folders, of which a share is then held out. A .zip
    of such a folder is read in place, to the same batches. So are tables with the columns path and label.

    Args:
        dataset: "folder" or "digits"; "auto" takes the folder where one is given, else the bundled digits.
        data_dir: folder with a folder of images for each class, or a .zip or .tar of it; a table with the columns path
            and label, perhaps split; or a folder with such tables, train.csv and val.csv.
        layout: where class and part are in the paths of the images, as in "{split}/images/{class}_[0-9]*.jpg"; by
            default CLASS/IMAGE, or train/CLASS/IMAGE, and val and test so.
        columns: names of the columns of a table that are called otherwise, as in path=file,label=breed,split=fold.
        image_size: side of the network's inputs in pixels; by default 32 for digits, 224 for others, and the size of a
            folder's files where they are smaller.
        batch_size: samples on one device in one forward pass.
        eval_batch_size: samples in one forward pass of validation, test and prediction.
        val_fraction: share of each class held out for validation, where there is no folder val.
        test_fraction: share of each class held out for testing, where there is no folder test.
        balance: what makes up for classes of unequal size: weights in the training loss (loss), or nothing. Other
            losses and scores stay as they are.
        augment: augmentation of training images: none; shifts and mirroring (light); or random crops, mirroring and
            colours (standard). By default light below 64 pixels, else standard. Digits are never mirrored.
        mixup: alpha of MixUp (Zhang et al., 2018), such as 0.2; 0 is off.
        cutmix: alpha of CutMix (Yun et al., 2019), such as 1.0; 0 is off.
        num_workers: worker processes that read images; by default half the cores per device, 8 at most, and on a CPU
            none.
        cache_gb: disk space for the decoded images of each part, in GiB, from which later epochs and runs read them; 0
            keeps none.
        pixel_mean: what is subtracted from the pixels, which are from 0 to 1, by channel; by default that of the
            pretrained weights, else the data set's; of a folder, ImageNet's, or measured below 64 pixels.
        pixel_std: what they are divided by then.
        on_corrupt: what to do about a file that cannot be read, and about wrong lines of a list: end with an error, or
            skip them with a warning.
        seed: seed of the split, the shuffling and the augmentation.
        predict_inputs: images, and folders of images, that `predict` reads.

    Raises:
        UserError: for invalid parameters, and at set-up for a folder that cannot be trained on.
    """

    _colour: ClassVar = True
    _sets: ClassVar = IMAGE_SETS
    _own: ClassVar = "folder"
    _own_forms: ClassVar = ", a .zip of it, or a table"

    def __init__(
        self,
        dataset: Literal["auto", "folder", "digits"] = "auto",
        data_dir: str | None = None,
        image_size: int | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        layout: str | None = None,
        columns: str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        balance: Literal["none", "loss"] = "none",
        augment: Literal["auto", "none", "light", "standard"] = "auto",
        mixup: float = 0.0,
        cutmix: float = 0.0,
        num_workers: int | None = None,
        cache_gb: Free[float] = 2.0,
        pixel_mean: Rare[Sequence[float] | None] = None,
        pixel_std: Rare[Sequence[float] | None] = None,
        on_corrupt: Literal["error", "skip"] = "error",
        seed: int = 1,
        predict_inputs: OneCall[Sequence[str] | None] = None,
    ) -> None:
        super().__init__()
        check_choice("augment", augment, ("auto", *AUGMENTATIONS))
        check_choice("on_corrupt", on_corrupt, ("error", "skip"))
        data_dir = self._check(dataset, data_dir, balance, (batch_size, eval_batch_size), (val_fraction, test_fraction))
        check_ranges(
            image_size=(image_size, Range(8, 2**14, whole=True)),
            mixup=(mixup, NOT_NEGATIVE),
            cutmix=(cutmix, NOT_NEGATIVE),
            num_workers=(num_workers, Range(0, 1024, whole=True)),
            cache_gb=(cache_gb, Range(0, 2**20)),
        )
        pixel_mean = check_statistics("pixel_mean", pixel_mean, least=0)
        pixel_std = check_statistics("pixel_std", pixel_std, least=1e-6)
        predict_inputs = [str(name) for name in predict_inputs] if predict_inputs is not None else None
        self.save_hyperparameters()
        if dataset == "auto":
            self.dataset = "folder" if data_dir else "digits"
        self._held: dict[str, Tensor | None] = {}
        # Weak, so that a loader that is no longer used ends its workers, as when each epoch builds a new one.
        self._loaders: weakref.WeakSet[WorkerTrainLoader | WorkerEvaluationLoader] = weakref.WeakSet()

    @property
    @override
    def sizes(self) -> dict[str, int]:
        """Number of samples in each part that has been set up and is not empty: "train", "val", "test"."""
        return {part: size for part, size in super().sizes.items() if size}

    @property
    @override
    def image_size(self) -> int:
        """Side of the network's inputs, in pixels. If it is not set, this reads the sizes of some images."""
        known = self.hparams.image_size or self._restored.get("image_size")
        return int(known or self._size_of_files or self.info.image_size)

    @cached_property
    def _size_of_files(self) -> int | None:
        """Size that fits the user's images; None if they are large or not known yet."""
        if not self._is_own or (self._source is None and self.hparams.data_dir is None):
            return None
        return reading.usual_size(self.source.parts["train"].images)

    @property
    def augment(self) -> str:
        """Name of the augmentation of training images."""
        name: str = self.hparams.augment
        if name == "auto":
            return "light" if is_small(self.image_size) else "standard"
        return name

    @property
    def augments(self) -> bool:
        """Whether the images differ from epoch to epoch."""
        return self.augment != "none" or self._mixing

    @property
    def _mixing(self) -> bool:
        return bool(self.hparams.mixup or self.hparams.cutmix)

    @property
    @override
    def pixel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, of pixels from 0 to 1, for the normalisation."""
        mean = self.hparams.pixel_mean
        std = self.hparams.pixel_std
        if mean is None or std is None:
            known = self._restored.get("statistics") or self._statistics_of_files or (self.info.mean, self.info.std)
            mean = mean or known[0]
            std = std or known[1]
        return tuple(mean), tuple(std)

    @cached_property
    def _statistics_of_files(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Statistics of the user's images if they are small, since published weights are not made for such images."""
        if self._restored or not self._is_own or not is_small(self.image_size):
            return None
        return reading.pixel_statistics(self.source.parts["train"].images, self.image_size)

    @override
    def _choices(self) -> dict[str, Any]:
        """Return data set, image size, augmentation and pixel statistics. This reads some of the user's images."""
        mean, std = self.pixel_statistics
        self._note_choices()
        names = {"dataset": self.dataset, "image_size": self.image_size, "augment": self.augment}
        return {**names, "pixel_mean": list(mean), "pixel_std": list(std)}

    def _note_choices(self) -> None:
        """Log the settings that were chosen by the data."""
        options = self.hparams
        chosen = []
        if options.image_size is None:
            why = " as the files have" if self.dataset == "folder" and self._size_of_files else ""
            chosen.append(f"images of {self.image_size} pixels{why}")
        if options.augment == "auto":
            chosen.append(f"augment={self.augment!r} ({describe_augmentation(self.augment, self.info.flip)})")
        mean = ", ".join(f"{value:.3f}" for value in self.pixel_statistics[0])
        whose = "their"
        if options.pixel_mean is not None:
            whose = "the"
        if self.pixel_statistics[0] == IMAGENET_MEAN:
            whose = "ImageNet's"
        chosen.append(f"pixels normalised by {whose} mean ({mean})")
        self._note(f"{self.title}: {', '.join(chosen)}")

    @override
    def _decide(self) -> None:
        if self.dataset == "digits" and self.hparams.dataset == "auto":
            self._note(
                f"no {spelled('data_dir')}: using the 1,797 bundled digits as small colour images; pass"
                f" {spelled('data_dir', 'FOLDER')} for your own",
                warn,
            )

    def _normaliser(self, device: torch.device) -> Normalise:
        return normaliser(*self.pixel_statistics, device)

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise uint8 images of shape (batch, 3, height, width) to float32 with about mean 0 and std 1."""
        normalised: Tensor = self._normaliser(images.device)(images)
        return normalised

    def numbered_batches(
        self, part: str, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (normalised images, labels, sample numbers) of a part on the device, without augmentation.

        The ranks together get each sample once. Sample numbers are those of the part's loader.
        """
        loader = self._evaluation_loader(part, rank=rank, world_size=world_size)
        try:
            for batch in loader.loaded_batches():
                images = self.normalise(batch.inputs.to(self._device, non_blocking=True))
                targets, rows = (ints.to(self._device, non_blocking=True) for ints in (batch.targets, batch.rows))
                yield images, targets, rows
        finally:
            loader.close()
            self._loaders.discard(loader)

    @property
    def _processes_here(self) -> int:
        return max(1, self.trainer.num_devices) if self.trainer else 1

    @override
    def _find_source(self) -> Source:
        if self.dataset == "digits":
            return digits_source(colour=True)
        options = self.hparams
        return find_images(options.data_dir, options.layout, options.columns, options.on_corrupt)

    @override
    def _take(self, part: str, published: str, samples: Samples, rows: Tensor | None) -> None:
        images, labels = samples
        if rows is not None:
            images = images.select(rows)
            labels = labels[rows]
        if isinstance(images, FileTable):
            self._names[part] = images
        self._parts[part] = self._open(images, self.augment if part == "train" else "none"), labels
        # Samples are numbered within their part. Their random numbers depend on these numbers.
        self._rows[part] = torch.arange(len(labels))

    def _open(self, images: Images, crop: str) -> reading.ImageFiles:
        return reading.open_images(images, crop, self.image_size, int(self.hparams.cache_gb * 2**30))

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self._note_classes()
        if stage != "predict" and self._size_of_files and self.hparams.image_size is None:
            self._note_choices()

    def _reader(self, part: str, augment: str) -> BatchReader:
        """Return the reader of a part. Small images are kept in memory, at one size, on the device."""
        images, targets = self._parts[part]
        crop = Crop(augment, self.image_size, self.hparams.seed)
        if part != "predict" and crop.is_centre:
            # Tried once per part, also if the images cannot be kept: it reads all of them.
            if part not in self._held:
                held = reading.held_in_memory(images, crop, self._processes_here)
                self._held[part] = None if held is None else held.to(self._device)
            if (held := self._held[part]) is not None:
                images = held
        return BatchReader(images, targets, crop)

    def _options(self, reader: BatchReader) -> dict[str, Any]:
        workers = self.hparams.num_workers
        if reader.is_in_memory:
            workers = 0
        elif workers is None:
            # Starting a process takes longer than decoding the digits.
            beside_gpu = self.photographs and self._device.type != "cpu"
            workers = reading.usual_workers(self._processes_here) if beside_gpu else 0
        return {"num_workers": workers, "pin_memory": self._device.type == "cuda", "device": self._device}

    def _augmentation(self, name: str) -> BatchAugmentation:
        return BatchAugmentation(name, self.image_size, self.hparams.seed, self.info.flip, self._normaliser)

    @override
    def train_dataloader(self) -> WorkerTrainLoader:
        options, reader = self.hparams, self._reader("train", self.augment)
        loader = WorkerTrainLoader(
            reader,
            **self._training_order(),
            skip_unreadable=options.on_corrupt == "skip",
            transform=self._augmentation(self.augment),
            names=self.sample_names("train"),
            mix=Mixing(options.mixup, options.cutmix, self.num_classes, options.seed) if self._mixing else None,
            **self._options(reader),
        )
        self._loaders.add(loader)
        return loader

    @override
    def _evaluation_loader(self, part: str, **ranks: Any) -> WorkerEvaluationLoader:
        reader = self._reader(part, "none")
        predicts = part == "predict"
        loader = WorkerEvaluationLoader(
            reader,
            torch.arange(len(reader.targets)),
            self.hparams.eval_batch_size,
            skip_unreadable=predicts or self.hparams.on_corrupt == "skip",
            transform=self._augmentation("none"),
            **self._options(reader),
            **ranks,
        )
        self._loaders.add(loader)
        return loader

    @override
    def predict_dataloader(self) -> WorkerEvaluationLoader:
        """Return a loader of the images in ``predict_inputs`` and their numbers, without unreadable images."""
        # Not in `setup`: the checkpoint, which Lightning reads after it, may hold the size of the images.
        self._parts["predict"] = self._open(self._given, "none"), torch.arange(len(self._given))
        loader = self._evaluation_loader("predict", **self._ranks)
        # The table of predictions has a row for each of them.
        loader.warn_unreadable = False
        self._unreadable = loader.unreadable
        return loader

    @override
    def teardown(self, stage: str) -> None:
        """Shut the worker processes down."""
        for loader in list(self._loaders):
            loader.close()
        self._loaders.clear()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Shut the worker processes down after an error or Ctrl-C."""
        self.teardown("fit")

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return data set, classes, image size and statistics, so that no checkpoint is used on other classes."""
        mean, std = self.pixel_statistics
        names = {"dataset": self.dataset, "classes": list(self.info.classes)}
        return {**names, "image_size": self.image_size, "statistics": [list(mean), list(std)]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["dataset"]
        check_choice("dataset", saved, tuple(self._sets))
        self._restored = dict(state_dict)
        if self._source is None:
            # Prediction reads no data set. Class names and image size are then those of the checkpoint.
            self.dataset = saved
            return
        if saved != self.dataset:
            parameter = spelled("dataset", saved) if saved != "folder" else spelled("data_dir", "FOLDER")
            raise UserError(f"the checkpoint was trained on {saved}, found {self.dataset}; pass {parameter}")
        self._refuse_other_classes(state_dict["classes"], shown=8)
