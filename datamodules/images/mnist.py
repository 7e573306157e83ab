"""Data module of MNIST, Fashion-MNIST and the user's small images, as one uint8 tensor, on the device if it fits."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.contract import Free, OneCall, Rare
from datamodules.errors import UserError, spelled
from datamodules.images import idx
from datamodules.images.affine import RandomAffine
from datamodules.images.finding import find_images
from datamodules.images.image_data import ImageDataModule
from datamodules.images.known_sets import DATASETS, digits_source
from datamodules.images.labels import check_labels
from datamodules.images.mnist_form import border_levels, read_digits, read_set
from datamodules.images.source import Samples, Source
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
        data_dir: your own images: class folders, also in a .zip or .tar, a table of path,label, or a NumPy file (.npz);
            or the folder of the idx or idx.gz files, flat or in torchvision's layout, and downloads, by default "data".
        layout: where class and part are in the paths of your own images, as in "{split}/images/{class}_[0-9]*.png"; by
            default CLASS/IMAGE, or train/CLASS/IMAGE, and val and test so.
        columns: names of the columns of a table, the arrays of an .npz or the idx files that are called otherwise, as
            in path=file,label=digit or images=x_train,labels=y_train.
        invert: your own images are dark on light, as ink on paper, and are inverted; by default as in the checkpoint,
            else not.
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
    _sets: ClassVar = DATASETS
    _own: ClassVar = "custom"
    _own_forms: ClassVar = ", a table or a NumPy file"
    _validated: ClassVar = ("train", "val")

    def __init__(
        self,
        dataset: Literal["auto", "mnist", "fashion-mnist", "digits", "custom"] = "auto",
        data_dir: str | None = None,
        batch_size: int = 256,
        eval_batch_size: int = 500,
        layout: str | None = None,
        columns: str | None = None,
        invert: bool | None = None,
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
        data_dir = self._check(dataset, data_dir, balance, (batch_size, eval_batch_size), (val_fraction, test_fraction))
        # None is not saved: Lightning raises an error if a hyper-parameter differs from that of the network.
        self.save_hyperparameters(ignore=["num_classes"] if num_classes is None else [])
        self._num_classes = num_classes
        self._download_error: Exception | None = None
        self._tensors: dict[str, tuple[Tensor, Tensor]] = {}
        self._borders: list[float] | None = None

    @override
    def _find_source(self) -> Source:
        options = self.hparams
        if self._is_own:
            return find_images(self._folder, options.layout, options.columns)
        if self.dataset == "digits":
            return digits_source()
        if idx.find_files(self.dataset, self._folder, options.columns) is None:
            raise UserError(
                f"{self._missing(self.dataset)}; pass {idx.proposal(self._folder)}{spelled('data_dir', 'FOLDER')} with"
                f" {idx.FILES['train'][0]}[.gz] and the other three files, or {spelled('dataset', 'digits')}"
            )
        return idx.from_idx(self.dataset, self._folder, options.columns)

    @property
    @override
    def _is_own(self) -> bool:
        """Whether the data set is the user's images. "auto" is, if ``data_dir`` holds anything but MNIST's files."""
        if self.dataset != "auto":
            return self.dataset == "custom"
        if self.hparams.data_dir is None or self._has_mnist:
            return False
        # With some of MNIST's files only, the error names the others.
        return any("ubyte" not in name for name in idx.other_files(self._folder))

    @property
    def _has_mnist(self) -> bool:
        return idx.find_files("mnist", self._folder, self.hparams.columns) is not None

    @property
    @override
    def num_classes(self) -> int:
        """Parameter ``num_classes``, or the number of the data set's classes. This lists the user's images."""
        return self._num_classes or super().num_classes

    @property
    @override
    def class_names(self) -> Sequence[str]:
        """Names of the classes. Empty if ``num_classes`` differs from the number of classes of the data set."""
        return self.info.classes if len(self.info.classes) == self.num_classes else ()

    @override
    def prepare_data(self) -> None:
        """Download missing files. Lightning calls this in one process per node.

        An error is raised later, in `setup`, which every process calls. Raised here, the other processes would wait
        forever.
        """
        name = "mnist" if self.dataset == "auto" else self.dataset
        predicts = self.trainer is not None and self.trainer.state.fn == "predict"
        if predicts or not self.hparams.download or not self.info.torchvision_name:
            return
        # Without dataset="mnist", files are downloaded into a given folder only if it is empty.
        asked = self.dataset != "auto" or self.hparams.data_dir is None
        try:
            has_files = idx.find_files(name, self._folder, self.hparams.columns)
            if not has_files and (asked or not idx.other_files(self._folder)):
                idx.download_files(name, self._folder)
        except (UserError, OSError) as error:
            self._download_error = error

    def _missing(self, name: str) -> str:
        """Return which files of a data set are missing, and why they were not downloaded."""
        reason = f"; {self._download_error}" if self._download_error else ""
        return idx.describe_missing(name, self._folder) + reason

    @override
    def _choices(self) -> dict[str, Any]:
        return {"dataset": self.dataset, **self._augmentation, "num_classes": self.num_classes}

    @property
    def _augmentation(self) -> dict[str, Any]:
        """Rotation, scale and flip. By default they are those of the data set."""
        options = {}
        for name in ("rotation", "scale", "flip"):
            value = self.hparams[name]
            options[name] = getattr(self.info, name) if value is None else value
        return options

    @override
    def _decide(self) -> None:
        """Choose the data set of "auto" on rank 0, for all ranks, since nodes may see different folders."""
        if self.dataset != "auto":
            return
        choices = (*DATASETS, "none")
        if self._has_mnist:
            chosen = "mnist"
            note = f"{self._folder} holds files of MNIST's names, which Fashion-MNIST has too; pass"
            self._note(f"{note} {spelled('dataset', 'fashion-mnist')} for it")
        elif self._is_own:
            chosen = "custom"
        else:
            # Another data set replaces a missing one only if no folder was given.
            chosen = "none" if self.hparams.data_dir is not None else "digits"
        if self.trainer is not None:
            # The other ranks contribute 0, so that the sum is the choice of rank 0.
            number = choices.index(chosen) if self.trainer.is_global_zero else 0
            contribution = torch.tensor(number, device=self.trainer.strategy.root_device)
            chosen = choices[int(self.trainer.strategy.reduce(contribution, reduce_op="sum"))]
        if chosen == "none":
            advice = f"{idx.proposal(self._folder)}a folder with them"
            raise UserError(
                f"{self._missing('mnist')} and no images of your own; pass {advice}, {spelled('dataset', 'mnist')} to"
                f" download MNIST into it, or {spelled('dataset', 'digits')}"
            )
        if chosen == "digits":
            warn(
                f"warning: {self._missing('mnist')}: using the 1,797 bundled digits; pass"
                f" {spelled('data_dir', 'FOLDER')} for MNIST or your own images"
            )
        self.dataset = chosen

    @property
    def _inverts(self) -> bool:
        """Whether the user's images are inverted: as the parameter says, else as in the checkpoint."""
        invert = self.hparams.invert
        return bool(self._restored.get("invert")) if invert is None else bool(invert)

    def _read(self, part: str, samples: Samples) -> tuple[Tensor, Tensor]:
        """Read and check images, uint8 of shape (n, 1, 28, 28), and labels, and move them to the device if they fit."""
        if self._is_own:
            images, borders = read_set(samples.images, self._inverts)
            if part == "train" and borders.median() > 127:
                warn(
                    f"note: the border of most train images is light, {borders.median():.0f} of 255; pass"
                    f" {spelled('invert', not self._inverts)} if light and dark are exchanged"
                )
            blank = (images.flatten(1).amax(1) == 0).nonzero().flatten().tolist()
            if blank:
                first = samples.images[blank[0]]
                warn(f"note: {len(blank):,} of {len(images):,} {part} images are blank, such as {first}")
        else:
            images = torch.from_numpy(samples.images.pixels)
            borders = border_levels(images)
        if part == "train":
            self._borders = [round(float(borders.min()), 1), round(float(borders.max()), 1)]
        labels = samples.labels
        check_labels(labels, self.num_classes, self.source.labels_from.get(part, f"the {part} labels"))
        images = images.unsqueeze(1)
        # At most a quarter of the free memory, since the network needs the rest.
        if self._device.type != "cuda" or images.nbytes <= torch.cuda.mem_get_info(self._device)[0] // 4:
            return images.to(self._device), labels.to(self._device)
        return images, labels

    @override
    def _take(self, part: str, published: str, samples: Samples, rows: Tensor | None) -> None:
        # A held-out part shares the tensors of the training part and differs in `rows` only.
        if published not in self._tensors:
            self._tensors[published] = self._read(published, samples)
        self._parts[part] = self._tensors[published]
        if rows is None:
            rows = torch.arange(len(samples.labels))
        self._rows[part] = rows

    @override
    def _split(self, labels: Tensor) -> dict[str, Tensor]:
        if self._is_own:
            return super()._split(labels)
        fraction = self.hparams.val_fraction
        held_out = 0
        if fraction:
            # At least one sample, even if the share rounds to none.
            held_out = max(round(len(labels) * fraction), 1)
        train, val = split_indices(len(labels), held_out, self.hparams.seed)
        return {"train": train, "val": val}

    def _training_transform(self) -> Transform:
        count = len(self._parts["train"][1])
        augment = RandomAffine(self.hparams.seed, self.hparams.shift, **self._augmentation, count=count)
        normalise = self.preprocessing()

        def transform(images: Tensor, rows: Tensor, epoch: int) -> Tensor:
            # Before the normalisation, since the affine map fills borders with zeros, the value of the background.
            if augment and len(images):
                images = augment(images.float(), rows, epoch)
            normalised: Tensor = normalise(images)
            return normalised

        return transform

    @override
    def train_dataloader(self) -> TrainLoader:
        images, labels = self._parts["train"]
        options = {"transform": self._training_transform(), "device": self._device, **self._training_order()}
        loader = TrainLoader(images, labels, **options)
        # After the loader, whose constructor may raise an error.
        self._note_classes()
        augmentation = {"shift": self.hparams.shift, **self._augmentation}
        settings = ", ".join(f"{name}={value}" for name, value in augmentation.items())
        self._note(f"{self.title}: augmented by {settings}")
        return loader

    @override
    def _evaluation_loader(self, part: str, **ranks: Any) -> EvaluationLoader:
        images, labels = self._parts[part]
        normalise = self.preprocessing()
        rows = self._rows[part] if part in self._rows else torch.arange(len(labels))

        def transform(images: Tensor, rows: Tensor, epoch: int) -> Tensor:
            normalised: Tensor = normalise(images)
            return normalised

        batch_size = self.hparams.eval_batch_size
        return EvaluationLoader(images, labels, rows, batch_size, transform=transform, device=self._device, **ranks)

    @override
    def predict_dataloader(self) -> EvaluationLoader:
        """Return a loader of the ``predict_inputs`` and their indices in `prediction_names`, without blank images."""
        images = read_digits(self._given.contents, self._inverts)
        self._note_borders(images.borders)
        self._unreadable = images.unreadable
        self._unclear = images.unclear
        if len(images.unreadable) == len(self._given):
            raise UserError(next(iter(images.unreadable.values())))
        self._parts["predict"] = images.pixels.to(self._device), images.numbers.to(self._device)
        return self._evaluation_loader("predict", **self._ranks)

    def _note_borders(self, borders: Tensor) -> None:
        """Log how many images to predict have a border outside the range of the training images, and light for dark."""
        known = self._borders or self._restored.get("borders")
        if known is None:
            return

        def distance(levels: Tensor) -> Tensor:
            return (levels - levels.clamp(*known)).abs()

        exchanged = borders[distance(borders) > distance(255 - borders)]
        if len(exchanged):
            levels = f"{exchanged.min():.0f} to {exchanged.max():.0f}"
            warn(
                f"note: {len(exchanged):,} of {len(borders):,} images have a border of brightness {levels}, and the"
                f" training images of {known[0]:.0f} to {known[1]:.0f}; pass"
                f" {spelled('invert', not self._inverts)} if light and dark are exchanged"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the data set that "auto" has chosen and its form, so that a checkpoint is used with the same."""
        state: dict[str, Any] = {"dataset": self.dataset, "invert": self._inverts}
        if self._borders is not None or "borders" in self._restored:
            state["borders"] = self._borders or self._restored["borders"]
        if self.dataset == "custom":
            state["classes"] = list(self.info.classes)
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["dataset"]
        self._restored = dict(state_dict)
        check_choice("dataset", saved, tuple(self._sets))
        if self.hparams.dataset not in ("auto", saved):
            raise UserError(
                f"the checkpoint was trained on {saved}, found {spelled('dataset', self.dataset)}; pass"
                f" {spelled('dataset', saved)}"
            )
        if self.dataset not in ("auto", saved):
            # Lightning calls `setup` before it reads the checkpoint, so "auto" was resolved by the files on this
            # machine.
            self.dataset = saved
            self._source = None
            for cached in (self._tensors, self._parts, self._rows):
                cached.clear()
            if self.trainer is not None and self.trainer.state.fn is not None:
                self.setup(self.trainer.state.fn)
        self.dataset = saved
        if self._is_own and self._source is not None:
            self._refuse_other_classes(state_dict["classes"], shown=20)
