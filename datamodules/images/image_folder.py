"""Data module for fine-tuning: images in class folders or tables, CIFAR, or the bundled digits."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor
from typing_extensions import override

from datamodules.contract import Advanced, Changeable, Transient
from datamodules.images.builtin_datasets import ARCHIVES
from datamodules.images.file_pipeline import FilePipeline
from datamodules.images.image_data import ImageDataModule
from datamodules.images.layouts import DataSet, check_path


class ImageFolderDataModule(ImageDataModule):
    """Images in class folders or tables, CIFAR, or the bundled digits, exact on any number of devices and workers.

    Training batches are ``(images, labels)``: normalized float32 of shape (batch, 3, size, size), and int64 of shape
    (batch,), or with MixUp or CutMix soft labels, float32 of shape (batch, classes). A folder holds train/CLASS/,
    val/CLASS/ and optionally test/CLASS/, or CLASS/ folders only, of which a share is then held out. A .zip of such a
    folder is read in place and gives the same batches. Tables have the columns path and label.

    Args:
        dataset: "folder", "digits", or "cifar10" or "cifar100", whose archive is downloaded; "auto" is the folder or
            the archive of CIFAR in `data_dir`, else the bundled digits.
        data_dir: folder with one folder of images per class, or a .zip or .tar of it; a table with the columns path
            and label, and optionally split; or a folder with such tables, train.csv and val.csv. For CIFAR, the
            archive or the folder to download it into, by default "data".
        layout: positions of class and part in the paths of the images, as in "{split}/images/{class}_[0-9]*.jpg"; by
            default CLASS/IMAGE, or train/CLASS/IMAGE with val and test.
        columns: other names of the columns of a table, as in path=file,label=breed,split=fold.
        image_size: side of the network's inputs in pixels; by default 32 for digits, else 224, or the size of the
            files if they are smaller.
        batch_size: samples on one device in one forward pass.
        eval_batch_size: samples in one forward pass of validation, test and prediction.
        val_fraction: share of each class held out for validation, if there is no folder val.
        test_fraction: share of each class held out for testing, if there is no folder test.
        balance: compensation for classes of unequal size: weights in the training loss (loss), sampling with
            replacement of each class equally often (sampler), or none. Other losses and metrics are unweighted.
        augment: augmentation of training images: none; shifts and mirroring (light); or random crops, mirroring and
            colors (standard). By default light below 64 pixels, else standard. Digits are never mirrored.
        mixup: alpha of MixUp (Zhang et al., 2018), such as 0.2; 0 is off.
        cutmix: alpha of CutMix (Yun et al., 2019), such as 1.0; 0 is off.
        num_workers: worker processes that read images; by default half of the cores per device, at most 8, and 0 on a
            CPU.
        cache_gb: disk space for the decoded images of each part, in GiB, which later epochs and runs read; 0 disables
            the cache.
        pixel_mean: mean of each channel for the normalization, for pixels from 0 to 1; by default the mean of
            the pretrained weights, else of the data set; for a folder ImageNet's, or measured below 64 pixels.
        pixel_std: standard deviation of each channel for the normalization; by default as for `pixel_mean`.
        on_corrupt: whether unreadable files and faulty rows of a table are an error, or skipped with a warning.
        seed: seed of the split, the shuffling and the augmentation.
        predict_inputs: images, and folders of images, that `predict` reads.

    Raises:
        UserError: a parameter is invalid, or at set-up, the folder is not a data set.
    """

    def __init__(
        self,
        dataset: Literal["auto", "folder", "digits", "cifar10", "cifar100"] = "auto",
        data_dir: str | None = None,
        image_size: int | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        layout: str | None = None,
        columns: str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        balance: Literal["none", "loss", "sampler"] = "none",
        augment: Literal["auto", "none", "light", "standard"] = "auto",
        mixup: float = 0.0,
        cutmix: float = 0.0,
        num_workers: int | None = None,
        cache_gb: Changeable[float] = 2.0,
        pixel_mean: Advanced[Sequence[float] | None] = None,
        pixel_std: Advanced[Sequence[float] | None] = None,
        on_corrupt: Literal["error", "skip"] = "error",
        seed: int = 1,
        predict_inputs: Transient[Sequence[str] | None] = None,
    ) -> None:
        data_dir = check_path(dataset, data_dir, FilePipeline.sets)
        name: str = dataset
        if dataset == "auto":
            name = "folder" if data_dir else "digits"
            name = ARCHIVES.get(Path(data_dir or "").name, name)
        pipeline = FilePipeline(
            image_size, augment, mixup, cutmix, num_workers, cache_gb, pixel_mean, pixel_std, on_corrupt
        )
        # As lists: `save_hyperparameters` saves these local variables, and a checkpoint holds plain Python.
        pixel_mean, pixel_std = pipeline.settings["pixel_mean"], pipeline.settings["pixel_std"]
        predict_inputs = [str(name) for name in predict_inputs] if predict_inputs is not None else None
        super().__init__(
            DataSet(FilePipeline.sets, FilePipeline.own, name),
            pipeline,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            balance=balance,
            seed=seed,
            predict_inputs=predict_inputs,
        )
        self.save_hyperparameters()

    @override
    def numbered_batches(
        self, part: str, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        pipeline = self.pipeline
        assert isinstance(pipeline, FilePipeline)
        pipeline.check_unaugmented()
        process = self._process._replace(rank=rank, world_size=world_size)
        return pipeline.numbered_batches(self._parts[part], self.hparams.eval_batch_size, process)

    @override
    def chosen_batches(
        self, part: str, numbers: Tensor, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        pipeline = self.pipeline
        assert isinstance(pipeline, FilePipeline)
        process = self._process._replace(rank=rank, world_size=world_size)
        return pipeline.numbered_batches(self._parts[part], self.hparams.eval_batch_size, process, numbers)
