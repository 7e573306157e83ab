"""Data module of MNIST, Fashion-MNIST and the user's small images, and which of them "auto" is."""

from collections.abc import Callable
from typing import Any, Literal

from typing_extensions import override

from datamodules.contract import Advanced, Changeable, Transient
from datamodules.errors import UserError, spelled
from datamodules.images import builtin_datasets
from datamodules.images.image_data import ImageDataModule
from datamodules.images.layouts import DataSet, check_path
from datamodules.images.source import Source
from datamodules.images.tensor_pipeline import TensorPipeline
from datamodules.notes import warn


class MNISTSet(DataSet):
    """MNIST or Fashion-MNIST, downloaded if they are missing, the bundled digits or the user's images.

    "auto" is what the folder holds, else MNIST, or the digits if no folder was given and no download has succeeded.
    """

    @property
    @override
    def is_own(self) -> bool:
        """Whether the data set is the user's images. "auto" is, if ``data_dir`` holds anything but MNIST's files."""
        if self.name != "auto":
            return self.name == self.own
        if self.settings["data_dir"] is None or self._files("mnist"):
            return False
        # With some of MNIST's files only, the error names the others.
        return any("ubyte" not in name for name in builtin_datasets.other_files(self.folder))

    def _files(self, name: str) -> Any:
        return builtin_datasets.find_files(name, self.folder, self.settings["columns"])

    @override
    def _download(self) -> None:
        name = "mnist" if self.name == "auto" else self.name
        if not self.settings["download"] or not self.info.torchvision_name:
            return
        # Without dataset="mnist", files are downloaded into a given folder only if it is empty.
        is_asked = self.name != "auto" or self.settings["data_dir"] is None
        if not self._files(name) and (is_asked or not builtin_datasets.other_files(self.folder)):
            builtin_datasets.download_files(name, self.folder)

    def _missing(self, name: str) -> str:
        """Return which files of a data set are missing, and why they were not downloaded."""
        reason = f"; {self._download_error}" if self._download_error else ""
        return builtin_datasets.describe_missing(name, self.folder) + reason

    @override
    def _read(self) -> Source:
        if self.is_own or not self.info.torchvision_name:
            return super()._read()
        files = self._files(self.name)
        if files is None:
            location = f"{builtin_datasets.proposal(self.folder)}{spelled('data_dir', 'FOLDER')}"
            raise UserError(
                f"{self._missing(self.name)}; pass {location} with {builtin_datasets.FILES['train'][0]}[.gz] and the"
                f" other three files, or {spelled('dataset', 'digits')}"
            )
        return builtin_datasets.from_idx(self.info, files)

    @override
    def decide(self, note: Callable[..., None], from_rank_zero: Callable[[int], int]) -> None:
        """Choose the data set of "auto" on rank 0, for all ranks, since nodes may see different folders."""
        if self.name != "auto":
            return
        choices = (*self.sets, "none")
        if self._files("mnist"):
            chosen = "mnist"
            found = f"{self.folder} holds files of MNIST's names, which Fashion-MNIST has too"
            note(f"{found}; pass {spelled('dataset', 'fashion-mnist')} for it")
        elif self.is_own:
            chosen = self.own
        else:
            # Another data set replaces a missing one only if no folder was given.
            chosen = "none" if self.settings["data_dir"] is not None else "digits"
        chosen = choices[from_rank_zero(choices.index(chosen))]
        if chosen == "none":
            advice = f"{builtin_datasets.proposal(self.folder)}a folder with them"
            raise UserError(
                f"{self._missing('mnist')} and no images of your own; pass {advice}, {spelled('dataset', 'mnist')} to"
                f" download MNIST into it, or {spelled('dataset', 'digits')}"
            )
        if chosen == "digits":
            warn(
                f"warning: {self._missing('mnist')}: using the 1,797 bundled digits; pass"
                f" {spelled('data_dir', 'FOLDER')} for MNIST or your own images"
            )
        self.name = chosen


class MNISTDataModule(ImageDataModule):
    """MNIST and Fashion-MNIST, scikit-learn's bundled digits or your own, exact on any number of devices.

    Batches are ``(images, labels)``: float32 of shape (batch, 1, 28, 28), normalized, and int64 of shape (batch,), on
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
        balance: what makes up for classes of unequal size: weights in the training loss (loss); draws with replacement
            that give each class as many training samples (sampler); or nothing. Other losses and scores stay as they
            are.
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
        balance: Literal["none", "loss", "sampler"] = "none",
        num_classes: int | None = None,
        shift: float = 2.0,
        rotation: float | None = None,
        scale: float | None = None,
        flip: Advanced[bool | None] = None,
        seed: int = 1,
        download: Advanced[Changeable[bool]] = True,
        predict_inputs: Transient[list[str] | None] = None,
    ) -> None:
        data_dir = check_path(dataset, data_dir, TensorPipeline.sets)
        super().__init__(
            MNISTSet(TensorPipeline.sets, TensorPipeline.own, dataset),
            TensorPipeline(shift, rotation, scale, flip, invert),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            balance=balance,
            num_classes=num_classes,
            seed=seed,
            predict_inputs=predict_inputs,
        )
        # None is not saved: Lightning raises an error if a hyper-parameter differs from that of the network.
        self.save_hyperparameters(ignore=["num_classes"] if num_classes is None else [])

    @override
    def resolve(self) -> dict[str, Any]:
        values = super().resolve()
        return values if self.data_set.declared_num_classes else {**values, "num_classes": self.num_classes}
