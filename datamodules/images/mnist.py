"""Data module of MNIST, Fashion-MNIST and the user's small images, and the resolution of "auto"."""

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
    """MNIST or Fashion-MNIST, downloaded if missing, the bundled digits, or the user's images.

    "auto" is the content of the folder, else MNIST, or the digits if no folder is given and the download fails.
    """

    @property
    @override
    def is_own(self) -> bool:
        """Whether the data set is the user's images; "auto" is if ``data_dir`` holds anything but MNIST's files."""
        if self.name != "auto":
            return self.name == self.own
        if self.settings["data_dir"] is None or self._files("mnist"):
            return False
        # If some of MNIST's four files are missing, the error names them.
        return any("ubyte" not in name for name in builtin_datasets.other_files(self.folder))

    def _files(self, name: str) -> Any:
        return builtin_datasets.find_files(name, self.folder, self.settings["columns"])

    @override
    def _download(self) -> None:
        name = "mnist" if self.name == "auto" else self.name
        if not self.settings["download"] or not self.info.torchvision_name:
            return
        # For "auto", files are downloaded into a given folder only if it is empty.
        is_asked = self.name != "auto" or self.settings["data_dir"] is None
        if not self._files(name) and (is_asked or not builtin_datasets.other_files(self.folder)):
            builtin_datasets.download_files(name, self.folder)

    def _missing(self, name: str) -> str:
        """Describe which files of a data set are missing, and why they were not downloaded."""
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
        """Resolve "auto" on rank 0 for all ranks: nodes may see different folders."""
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
            # The digits replace missing files only if no folder is given.
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
    """MNIST, Fashion-MNIST, scikit-learn's bundled digits or your own images, exact on any number of devices.

    Batches are ``(images, labels)``: float32 of shape (batch, 1, 28, 28), normalized, and int64 of shape (batch,), on
    the training device. A share of the training set is held out for validation. Only ``test`` reads the test set.

    Args:
        dataset: name of the data set; "custom" is your own images in `data_dir`. "auto" is the content of `data_dir`;
            if that is empty or not given, MNIST is downloaded; if the download fails without a `data_dir`, it is the
            bundled digits.
        data_dir: your own images: class folders, also in a .zip or .tar, a table of path,label, or a NumPy file
            (.npz); or the folder of the idx or idx.gz files, flat or in torchvision's layout, and of downloads, by
            default "data".
        layout: positions of class and part in the paths of your images, as in "{split}/images/{class}_[0-9]*.png"; by
            default CLASS/IMAGE, or train/CLASS/IMAGE with val and test.
        columns: other names of the columns of a table, the arrays of an .npz or the idx files, as in
            path=file,label=digit or images=x_train,labels=y_train.
        invert: invert your images, which are dark on light, as ink on paper; by default as in the checkpoint, else
            false.
        batch_size: samples on one device in one forward pass.
        eval_batch_size: samples in one forward pass of validation, test and prediction.
        val_fraction: share of the training set held out for validation; for your images, of each class.
        test_fraction: share of each class held out for testing, if your images have no test part.
        balance: compensation for classes of unequal size: weights in the training loss (loss), sampling with
            replacement of each class equally often (sampler), or none. Other losses and metrics are unweighted.
        num_classes: number of classes, by default the data's; labels are in [0, num_classes).
        shift: augmentation: largest translation, in pixels.
        rotation: augmentation: largest rotation, in degrees; by default 10, and 0 for Fashion-MNIST.
        scale: augmentation: largest change of scale, as in 0.1 for 0.9 to 1.1; by default 0.1, and 0 for Fashion-MNIST.
        flip: augmentation: mirror half of the images, and the other half in the next epoch; by default for
            Fashion-MNIST.
        seed: seed of the split, the shuffling and the augmentation.
        download: download missing files.
        predict_inputs: images, and folders of images, that `predict` reads.

    Raises:
        UserError: at set-up, the folder is missing, or files are damaged, empty or inconsistent.
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
        # None is not saved: Lightning raises an error if module and data module differ in a hyperparameter.
        self.save_hyperparameters(ignore=["num_classes"] if num_classes is None else [])

    @override
    def resolve(self) -> dict[str, Any]:
        values = super().resolve()
        return values if self.data_set.declared_num_classes else {**values, "num_classes": self.num_classes}
